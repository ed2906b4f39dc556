"""Make the optimizer of an actor, of the family that the spec names, or of a job's groups."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from actor_init.custom.user_file import UserFunction
from actor_init.declarations.optimizers import find_optimizer
from actor_init.declarations.optimizers.declaration import OptimizerDeclaration, ParameterGroup
from actor_init.declarations.optimizers.user_function import spell_by_options
from actor_init.optimizers.combined import CombinedOptimizer
from actor_init.optimizers.state_loading import AssignedState, NamedParameters, load_optimizer_state
from actor_init.optimizers.whole_parameters import WholeParameterOptimizer
from actor_init.schedule_and_norm import GROUP_NUMBER
from actor_init.spec import ActorSpec, UsageError
from capture.facts import Setting


def list_named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List the trained parameters with their names; one that has several names once."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def find_outer_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names of the weights of embedding and head, which Muon leaves to another optimizer."""
    modules = [
        module
        for getter in ("get_input_embeddings", "get_output_embeddings")
        if (module := getattr(model, getter, lambda: None)()) is not None
    ]
    modules += [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outer = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in outer)


def make_optimizer(
    spec: ActorSpec,
    parameters: NamedParameters,
    *,
    outer: frozenset[str] = frozenset(),
    groups: Sequence[ParameterGroup] = (),
    state: AssignedState | None = None,
) -> Optimizer | None:
    """Return the optimizer over these parameters; None for --optimizer none.

    outer   names of the weights of embedding and head
    groups  how the job grouped its parameters, and with which settings it began; empty: as the spec says
    state   what it begins with; None: its state is allocated at the first step, as in training

    Raises UsageError for a family that cannot step on these parameters, for a user's function that returns no
    optimizer, and where a parameter is in no group.
    """
    if not spec.has_optimizer:
        return None
    if spec.custom_optimizer is not None:
        optimizer = _make_custom_optimizer(spec, parameters, groups)
    else:
        optimizer = _make_declared_optimizer(spec, parameters, outer, groups)
    if state is not None:
        load_optimizer_state(optimizer, parameters, state)
    return optimizer


def _make_declared_optimizer(
    spec: ActorSpec, parameters: NamedParameters, outer: frozenset[str], groups: Sequence[ParameterGroup]
) -> Optimizer:
    members: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for number, group in enumerate(groups or _group_by_spec(spec, parameters, outer)):
        filled = [{**options, GROUP_NUMBER: number} for options in _fill_group(group, parameters)]
        members.setdefault((group.family, group.is_fused), []).extend(filled)
    grouped = {name for group in groups for name in group.names}
    if groups and (missing := [name for name, _ in parameters if name not in grouped]):
        raise UsageError("the job's optimizer", f"has no {missing[0]}, which is trained here")
    optimizers = [
        _make_member(find_optimizer(family), member_groups, is_fused=is_fused)
        for (family, is_fused), member_groups in members.items()
    ]
    return optimizers[0] if len(optimizers) == 1 else CombinedOptimizer(optimizers)


def _group_by_spec(spec: ActorSpec, parameters: NamedParameters, outer: frozenset[str]) -> list[ParameterGroup]:
    """Group the parameters by what the family steps on, with the settings that the options give."""
    family = find_optimizer(spec.optimizer)
    names = frozenset(name for name, _ in parameters)
    matrices = frozenset(name for name, parameter in parameters if parameter.ndim == 2) - outer
    own = matrices if family.steps_matrices else names
    groups = [ParameterGroup(family=family.option_value, settings=family.read_options(spec), names=own)] if own else []
    if family.companion is not None and (others := names - own):
        companion = find_optimizer(family.companion)
        groups.append(
            ParameterGroup(family=companion.option_value, settings=_read_companion(companion, spec), names=others)
        )
    return groups


def _read_companion(companion: OptimizerDeclaration, spec: ActorSpec) -> dict[str, Any]:
    """Return the settings of the companion: of the options the learning rate and the weight decay, else its own."""
    settings = {setting.name: setting.default for setting in companion.settings}
    decay = {} if spec.weight_decay is None else {"weight_decay": spec.weight_decay}
    return {"lr": spec.base_rate, **settings, **decay}


def _fill_group(group: ParameterGroup, parameters: NamedParameters) -> list[dict[str, Any]]:
    """Return the group as torch has it; a group for each mesh, since torch's foreach functions take one at a time."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for name, parameter in parameters:
        if name in group.names:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": mesh_parameters, **group.settings} for mesh_parameters in by_mesh.values()]


def find_engine_class(declaration: OptimizerDeclaration) -> type[Optimizer]:
    """Import the class that a family steps with here. Raises UsageError where torch is too old to have it."""
    installed = (engine for engine in declaration.engine if find_spec(engine.partition(".")[0].partition(":")[0]))
    module_name, _, class_name = next(installed).partition(":")
    found: type[Optimizer] | None = getattr(import_module(module_name), class_name, None)
    if found is None:
        why = f"needs {class_name}, which {module_name} has not in the installed version"
        raise UsageError(
            Setting("optimizer", declaration.option_value), why, f"Try: {Setting('optimizer', 'FILE.py:function')}"
        )
    return found


def _make_member(
    declaration: OptimizerDeclaration, groups: Iterable[Mapping[str, Any]], *, is_fused: bool
) -> Optimizer:
    engine = find_engine_class(declaration)
    accepted = inspect.signature(engine).parameters
    # Another package's class of the same family may lack a setting. Without it the step is that of the setting's
    # default, and another value is refused.
    for group in groups:
        for setting in declaration.settings:
            if setting.name not in accepted and group[setting.name] != setting.default:
                why = f"has no {setting.name} in {engine.__module__}, and it is {group[setting.name]} here"
                raise UsageError(Setting("optimizer", declaration.option_value), why)
    names = {"params", GROUP_NUMBER, *accepted}
    kept = [{name: value for name, value in group.items() if name in names} for group in groups]
    is_sharded = any(isinstance(parameter, DTensor) for group in kept for parameter in group["params"])
    if is_sharded and not (declaration.is_elementwise and engine.__module__.startswith("torch.")):
        return WholeParameterOptimizer(engine, kept)
    # On a CPU the fused kernel rounds otherwise than the others, so there it follows the job's.
    if declaration.has_fused and (is_fused or torch.cuda.is_available()):
        return engine(kept, fused=True)  # type: ignore[call-arg]
    # Torch steps DTensors one by one unless it is told otherwise, and each operation on one takes longer than its
    # arithmetic. The foreach functions do the same arithmetic in a few operations.
    return engine(kept, foreach=True) if is_sharded and "foreach" in accepted else engine(kept)  # type: ignore[call-arg]


def _make_custom_optimizer(
    spec: ActorSpec, parameters: NamedParameters, job_groups: Sequence[ParameterGroup]
) -> Optimizer:
    """Call the user's function with the named parameters and the settings that were typed, or are the job's."""
    assert spec.custom_optimizer is not None
    function = UserFunction.open(*spec.custom_optimizer, setting="optimizer")
    settings = spec.optimizer_settings | (spell_by_options(job_groups[0].settings) if job_groups else {})
    optimizer = function.call(list(parameters), settings)
    if not isinstance(optimizer, Optimizer):
        kind = "None" if optimizer is None else f"a {type(optimizer).__name__}"
        why, advice = f": {function.function} returned {kind}", "It has to return the torch.optim.Optimizer"
        raise UsageError(function.full_setting, why, advice)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if lost := [name for name, parameter in parameters if id(parameter) not in held]:
        others = f" and {len(lost) - 1} more" if lost[1:] else ""
        why = f": the optimizer that {function.function} returned does not step on {lost[0]}{others}"
        raise UsageError(function.full_setting, why, "Give it all parameters that the function was given")
    if job_groups:
        _divide_as_job(optimizer, parameters, job_groups)
    return optimizer


def _divide_as_job(optimizer: Optimizer, parameters: NamedParameters, job_groups: Sequence[ParameterGroup]) -> None:
    """Divide an optimizer's groups so that each lies in one of the job's, and give it that group's settings.

    A group keeps its place and what it has besides. Settings that it lacks are not those of its class.
    """
    numbers = {
        id(parameter): number
        for number, job_group in enumerate(job_groups)
        for name, parameter in parameters
        if name in job_group.names
    }
    for group in list(optimizer.param_groups):
        places: dict[int, list[int]] = {}
        for place, parameter in enumerate(group["params"]):
            places.setdefault(numbers.get(id(parameter), 0), []).append(place)
        # Classes that are given names keep them beside the parameters.
        lists = {key: group[key] for key in ("params", "param_names") if key in group}
        own = dict(group)
        for place, (number, members) in enumerate(places.items()):
            part = {key: [values[member] for member in members] for key, values in lists.items()}
            settings = {name: value for name, value in job_groups[number].settings.items() if name in own}
            if place == 0:
                group.update(settings | part | {GROUP_NUMBER: number})
            else:
                optimizer.add_param_group(own | settings | part | {GROUP_NUMBER: number})
