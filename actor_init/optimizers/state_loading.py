"""Give an optimizer the state that a job's had: find which parameter each part is of, and shard it as the parameter is.

torch.save keeps a state by the number of each parameter in the optimizer's groups, so what is known of the groups
decides: the names that the file has, those that a recording has, or the order in which trainers group parameters. An
order counts only if every shape fits, and if no other order fits as well.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from actor_init.declarations.optimizers import OPTIMIZERS
from actor_init.optimizers.saved_state import STEP, OptimizerState, find_shape, read_state
from actor_init.spec import ActorSpec, UsageError
from capture.facts import Setting
from capture.file_format.optimizer_step import strip_wrappers

# Parameters that transformers' Trainer leaves without weight decay, by parts of their names; those of nn.LayerNorm too.
_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)
NamedParameters = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedParameter:
    """A parameter of the replay that is trained, with its whole shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignedState:
    """The state of a job's optimizer by the replay's names of the parameters.

    counts       the different numbers of steps that it has counted; empty where it counts none
    num_trained  the parameters of the replay that are trained
    learning_rates  of its groups, as they were saved; empty where it does not say them
    """

    path: Path
    by_name: Mapping[str, Mapping[str, Any]]
    counts: tuple[int, ...]
    num_trained: int
    learning_rates: Sequence[float] = ()

    def describe(self) -> str:
        counts = " and ".join(map(str, self.counts))
        steps = f" after {counts} step{'s' * (self.counts != (1,))}" if self.counts else ""
        share = f"{len(self.by_name)} of {self.num_trained} parameters"
        return f"the state{steps} of {share}, from {self.path}"


def assign_state(
    state: OptimizerState,
    parameters: Sequence[TrainedParameter],
    spec: ActorSpec,
    recorded_groups: Sequence[Sequence[str]] = (),
) -> AssignedState:
    """Find which of the replay's parameters each part of a state is of.

    parameters       those that are trained, in the model's order
    recorded_groups  the names of each group's parameters, where a recording has them; of another number: not used

    Raises UsageError, with facts, where it does not fit, or fits in several ways.
    """
    by_name = _assign_names(state, parameters) if state.by_name else _assign_numbers(state, parameters, recorded_groups)
    setting = Setting("optimizer_state", state.path)
    if not by_name:
        raise UsageError(setting, "holds no state of any parameter", "Leave it out: the optimizer then begins without")
    by_name = {name: _rename(values) for name, values in by_name.items()}
    _refuse_other_family(setting, by_name, spec)
    return AssignedState(
        path=state.path,
        by_name=by_name,
        counts=state.list_counts(),
        num_trained=len(parameters),
        learning_rates=state.learning_rates,
    )


def _rename(values: Mapping[str, Any]) -> dict[str, Any]:
    """Give the state of bitsandbytes' 32-bit classes the names that torch's have."""
    is_in_32_bits = "state1" in values and "absmax1" not in values
    names = {"state1": "exp_avg", "state2": "exp_avg_sq"} if is_in_32_bits else {}
    return {names.get(key, key): value for key, value in values.items()}


def _refuse_other_family(setting: Setting, by_name: Mapping[str, Mapping[str, Any]], spec: ActorSpec) -> None:
    """Raise UsageError for a parameter whose state is not what the replay's optimizer keeps."""
    family = OPTIMIZERS.get(spec.optimizer)
    if family is None:
        return
    companion = OPTIMIZERS[family.companion].state if family.companion is not None else ()
    known = (*family.state, *companion)
    for name, values in by_name.items():
        if known and not any(keys <= values.keys() for keys in known):
            known_states = " or ".join(" and ".join(sorted(keys)) for keys in known)
            optimizer = Setting("optimizer", family.option_value)
            why = f"has {', '.join(sorted(values))} of {name}, and {optimizer} keeps {known_states}"
            raise UsageError(setting, why, f"Try: {Setting('optimizer')} of the job")


# By names


def _assign_names(state: OptimizerState, parameters: Sequence[TrainedParameter]) -> dict[str, Mapping[str, Any]]:
    shapes = {parameter.name: parameter.shape for parameter in parameters}
    by_name: dict[str, Mapping[str, Any]] = {}
    setting = Setting("optimizer_state", state.path)
    for job_name, values in state.by_name.items():
        name = _match_name(job_name, shapes)
        if name is None:
            raise UsageError(setting, f"has a state of {job_name}, which is not trained here", _ADVICE)
        if (wrong := _find_other_shape(values, shapes[name])) is not None:
            why = f": {wrong[0]} of {job_name} is {list(wrong[1])}, and {name} is {list(shapes[name])}"
            raise UsageError(setting, why, _ADVICE)
        by_name[name] = values
    return by_name


_ADVICE = f"Name the job's model, with {Setting('model')} and {Setting('num_layers')}"


def _match_name(job_name: str, names: Mapping[str, Any]) -> str | None:
    """Find the replay's name of a parameter, which the job may have wrapped in other modules."""
    parts = strip_wrappers(job_name).split(".")
    inner = (".".join(parts[begin:]) for begin in range(len(parts)))
    return next((name for name in inner if name in names), None)


def _find_other_shape(values: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Find a part of a state that cannot be of a parameter of this shape; None if all may be.

    A factored state has one number for each row, or each column.
    """
    rows_and_columns = {
        "row_var": (*shape[:-1], 1),
        "col_var": (*shape[:-2], 1, *shape[-1:]),
        "exp_avg_sq_row": shape[:-1],
        "exp_avg_sq_col": shape[:-2] + shape[-1:],
    }
    for key, value in values.items():
        found = find_shape(value)
        if not found or key.startswith(("absmax", "qmap")):
            continue
        if found != rows_and_columns.get(key, shape):
            return key, found
    return None


# By numbers


def _assign_numbers(
    state: OptimizerState, parameters: Sequence[TrainedParameter], recorded_groups: Sequence[Sequence[str]]
) -> dict[str, Mapping[str, Any]]:
    """Assign the numbers of a state by the first known order of the groups' parameters, whose shapes have to fit."""
    shapes = {parameter.name: parameter.shape for parameter in parameters}
    setting = Setting("optimizer_state", state.path)
    numbers = [number for group in state.groups for number in group.numbers]
    if all(len(group.names) == len(group.numbers) for group in state.groups):
        named = OptimizerState(
            path=state.path,
            by_name={
                name: state.by_number[number]
                for group in state.groups
                for number, name in zip(group.numbers, group.names, strict=True)
                if state.by_number.get(number)
            },
        )
        return _assign_names(named, parameters)
    sizes = [len(group.numbers) for group in state.groups]
    fitting: list[list[str]] = []
    misfit = ""
    for names in _list_orders(sizes, parameters, recorded_groups):
        problem = _find_misfit(state, dict(zip(numbers, names, strict=True)), shapes)
        if problem is None and names not in fitting:
            fitting.append(names)
        misfit = misfit or problem or ""
    groups = " and ".join(map(str, sizes))
    if not fitting:
        why = (
            f"has groups of {groups} parameters, and {len(parameters)} are trained here"
            if not misfit
            else f"has groups of {groups} parameters, and {misfit}"
        )
        raise UsageError(setting, why, f"{_ADVICE}; or give a folder of DCP, which has names")
    if len(fitting) > 1:
        first = next(pair for pair in zip(*fitting[:2], strict=True) if pair[0] != pair[1])
        why = f"fits in several ways: its groups of {groups} parameters may have {first[0]} where they have {first[1]}"
        raise UsageError(setting, why, "Give a folder of DCP, which has names")
    return {
        name: state.by_number[number]
        for number, name in zip(numbers, fitting[0], strict=True)
        if state.by_number.get(number)
    }


def _list_orders(
    sizes: Sequence[int], parameters: Sequence[TrainedParameter], recorded_groups: Sequence[Sequence[str]]
) -> list[list[str]]:
    """List the orders of names that groups of these sizes may have: the recording's alone where it is known."""
    names = [parameter.name for parameter in parameters]
    if len(recorded_groups) == len(sizes) and list(map(len, recorded_groups)) == list(sizes):
        places = {name: place for place, name in enumerate(names)}
        if all(name in places for group in recorded_groups for name in group):
            return [[name for group in recorded_groups for name in sorted(group, key=places.__getitem__)]]
    if len(sizes) == 1:
        return [names] if len(names) == sizes[0] else []
    if len(sizes) != 2:
        return []
    # Trainers put the parameters with weight decay first, in the model's order: those of no norm and no bias, or those
    # of two dimensions and more.
    by_shape = {parameter.name: len(parameter.shape) >= 2 for parameter in parameters}
    rules: list[Callable[[str], bool]] = [lambda name: not _WITHOUT_DECAY.search(name), by_shape.__getitem__]
    orders = []
    for rule in rules:
        decayed, others = ([name for name in names if rule(name) is decays] for decays in (True, False))
        orders += [
            [*first, *second] for first, second in ((decayed, others), (others, decayed)) if len(first) == sizes[0]
        ]
    return [order for order in orders if len(order) == sum(sizes)]


def _find_misfit(state: OptimizerState, names: Mapping[int, str], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Say which part of a state has another shape than its parameter; None if all fit."""
    for number, name in names.items():
        wrong = _find_other_shape(state.by_number.get(number, {}), shapes[name])
        if wrong is not None:
            return f"{wrong[0]} of its parameter {number} is {list(wrong[1])}, and {name} is {list(shapes[name])}"
    return None


# Loading


@torch.no_grad()
def load_optimizer_state(optimizer: Optimizer, parameters: NamedParameters, state: AssignedState) -> None:
    """Give the optimizer the state. What is of a parameter's shape gets its dtype, and its shards.

    Raises UsageError for a file that is damaged.
    """
    names = {id(parameter): name for name, parameter in parameters}
    for group in optimizer.param_groups:
        # torch's fused and capturable kernels read the count on the device, the others on the host.
        is_count_on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            values = state.by_name.get(names.get(id(parameter), ""))
            if values is None:
                continue
            try:
                read = dict(read_state(values))
            except Exception as error:
                reason = " ".join(str(error).split())[:200]
                raise UsageError(Setting("optimizer_state", state.path), f"is damaged: {reason}") from error
            optimizer.state[parameter] = {
                key: _place_count(value, parameter, on_device=is_count_on_device)
                if key == STEP
                else _place(value, parameter)
                for key, value in read.items()
            }


def _place(value: Any, parameter: Tensor) -> Any:
    """Return a part of a state on the parameter's device; a copy, since the file may be mapped into memory."""
    if not isinstance(value, Tensor):
        return value
    dtype = parameter.dtype if value.is_floating_point() else value.dtype
    placed = value.detach().to(device=parameter.device, dtype=dtype, copy=True)
    if isinstance(parameter, DTensor) and placed.shape == parameter.shape:
        # Every rank has read the whole tensor, so nothing is sent.
        return distribute_tensor(placed, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return placed


def _place_count(value: Any, parameter: Tensor, *, on_device: bool) -> Tensor:
    device = parameter.device if on_device else torch.device("cpu")
    return torch.as_tensor(float(value), dtype=torch.float32, device=device)
