"""Build a user's module without values for its parameters, and fill it later, on any device and in any shard.

Parameters of two dimensions and more are on the meta device from the moment they are registered, so that a model of
any size is built in no memory. Buffers, other tensors and vectors get the values that the user's code gives them:
rotary tables, masks, a norm's ones.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from actor_init.custom.forward_adapter import ForwardAdapter
from actor_init.custom.user_file import UserFunction
from actor_init.spec import UsageError
from actor_init.weights import OnProgress, TiedParameters, Weights, ignore_progress, list_modules_below
from capture.facts import Setting

# The root module keeps its facts under this name.
_FACTS_ATTRIBUTE = "_micro_replay"
# The seed of what the user's code draws for its vectors.
_SEED = 0
# Modules that a user's function has returned: one that returns the same module again gets a copy of it.
_returned_modules: WeakSet[nn.Module] = WeakSet()


@dataclass(slots=True, kw_only=True, eq=False)
class CustomModelFacts:
    """What is known of a module that a user's function returned.

    blocks         the name of the list of layers
    vectors        parameters of less than two dimensions, as the user's code initialised them
    checkpointing  by a layer's class, the class that recomputes it in backward
    """

    blocks: str
    forward: ForwardAdapter
    vectors: Mapping[str, Tensor]
    checkpointing: dict[type, type] = field(default_factory=dict)


def find_custom_facts(model: nn.Module) -> CustomModelFacts | None:
    """Return what is known of a user's module; None for other models."""
    facts: CustomModelFacts | None = vars(model).get(_FACTS_ATTRIBUTE)
    return facts


def build_custom_model(
    function: UserFunction,
    captured: Mapping[str, object] | None,
    *,
    blocks: str | None,
    num_layers: int | None,
    dtype: torch.dtype,
) -> nn.Module:
    """Build the module with parameters on the meta device, in `dtype`, cut to its first layers.

    Its forward is replaced by one that is called as transformers' models are. Raises UsageError for a module that has
    no list of layers, or whose forward cannot be called with token ids.
    """
    with torch.random.fork_rng(devices=[]), _register_parameters_on_meta():
        torch.manual_seed(_SEED)
        module = function.build(captured)
    # A module that the user's code keeps is theirs: another build would get it too, changed.
    if module in _returned_modules or any(_is_real_matrix(parameter) for parameter in module.parameters()):
        module = deepcopy(module)
    _returned_modules.add(module)
    name = find_blocks_name(module, blocks, str(function))
    layers: Any = module.get_submodule(name)
    if num_layers is not None:
        if num_layers > len(layers):
            why, advice = f", but {name} has {len(layers)}", f"Allowed: 1 to {len(layers)}"
            raise UsageError(Setting("num_layers", num_layers), why, advice)
        del layers[num_layers:]
    vectors = {
        parameter_name: parameter.detach().float().clone()
        for parameter_name, parameter in module.named_parameters()
        if parameter.ndim < 2 and not parameter.is_meta
    }
    _move_to_meta(module, dtype)
    forward = ForwardAdapter.from_module(module, str(function))
    setattr(module, _FACTS_ATTRIBUTE, CustomModelFacts(blocks=name, forward=forward, vectors=vectors))
    module.forward = forward
    return module


def find_blocks_name(module: nn.Module, typed: str | None, function: str) -> str:
    """Return the name of the list of layers: the one that was typed, or the longest outermost nn.ModuleList.

    Raises UsageError if there is none.
    """
    lists = {
        name: len(part)
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part)
    }
    if typed is not None:
        if typed not in lists:
            known = ", ".join(lists) or "none"
            why = f"is no list of layers in the {type(module).__name__} of {function}"
            advice = f"Its nn.ModuleLists and nn.Sequentials: {known}"
            raise UsageError(Setting("blocks", typed), why, advice)
        return typed
    module_lists = {name: size for name, size in lists.items() if isinstance(module.get_submodule(name), nn.ModuleList)}
    outermost = {
        name: size
        for name, size in module_lists.items()
        if not any(name.startswith(f"{other}.") for other in module_lists)
    }
    if not outermost:
        advice = "Put its layers into a ModuleList"
        if lists:
            advice = f"Try: {Setting('blocks', max(lists, key=lambda name: lists[name]))}"
        needed = "layers, which are compiled, checkpointed and sharded one by one"
        why = f": {type(module).__name__} has no nn.ModuleList of {needed}"
        raise UsageError(Setting("model", function), why, advice)
    longest: str = max(outermost, key=lambda name: outermost[name])
    return longest


def configure_custom_model(model: nn.Module, *, dtype: torch.dtype, checkpoints: bool) -> None:
    """Let the module compute in `dtype`, under autocast unless that is fp32, and recompute its layers in backward."""
    facts = find_custom_facts(model)
    assert facts is not None
    facts.forward.autocast_dtype = None if dtype == torch.float32 else dtype
    if checkpoints:
        for layer in list_layers(model):
            kind = type(layer)
            layer.__class__ = facts.checkpointing.setdefault(kind, type(kind.__name__, (_CheckpointedLayer, kind), {}))


def list_layers(model: nn.Module) -> list[nn.Module]:
    facts = find_custom_facts(model)
    assert facts is not None
    layers: Any = model.get_submodule(facts.blocks)
    return list(layers)


class _CheckpointedLayer(nn.Module):
    """Mixed into the class of a layer: its call, hooks and all, is done again in backward, as transformers does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)


@torch.no_grad()
def materialise_custom_model(
    model: nn.Module,
    weights: Weights,
    device: torch.device,
    prefix: str = "",
    on_progress: OnProgress = ignore_progress,
) -> None:
    """Move what is below `prefix` to `device`, and fill its parameters. Tied parameters stay tied.

    Buffers keep the values that the user's code gave them, unless the weights have some. Raises UsageError for
    parameters that the weights lack.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    device_parameters = TiedParameters(device)
    for module_name, module in list_modules_below(model, prefix):
        path = f"{module_name}." if module_name else ""
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            is_new, on_device = parameter not in device_parameters, device_parameters.get(parameter)
            if is_new:
                tied_names = names[id(parameter)]
                source_name = next((tied for tied in tied_names if weights.has_tensor(tied)), tied_names[0])
                weights.fill(source_name, on_device, on_progress)
            setattr(module, name, on_device)
        for name, buffer in list(module.named_buffers(recurse=False)):
            moved = buffer.to(device)
            if weights.has_tensor(path + name):
                moved = moved.clone()
                weights.fill(path + name, moved)
            module._buffers[name] = moved
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.device != device:
                setattr(module, name, value.to(device))
        on_progress(0)


def find_dropouts(module: nn.Module) -> dict[str, float]:
    """Return the numbers above 0 that modules keep under a name with "drop" in it, and the rates of dropout layers."""
    rates: dict[str, float] = {}
    for name, part in module.named_modules():
        attributes = {key: value for key, value in vars(part).items() if "drop" in key.lower()}
        if isinstance(part, nn.modules.dropout._DropoutNd):
            attributes["dropout"] = part.p
        for key, value in attributes.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                rates.setdefault(f"{name}.{key}" if "drop" not in name.lower() else name, float(value))
    return rates


@contextmanager
def _register_parameters_on_meta() -> Iterator[None]:
    """Put parameters of two dimensions and more on the meta device when a module registers them."""
    register = nn.Module.register_parameter
    # A parameter that is registered twice is a single parameter, and stays so.
    meta_copies = WeakIdKeyDictionary()

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and _is_real_matrix(param):
            if param not in meta_copies:
                meta_copies[param] = _copy_to_meta(param, param.dtype)
            param = meta_copies[param]
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _is_real_matrix(parameter: nn.Parameter) -> bool:
    has_shape = not isinstance(parameter, nn.UninitializedParameter)
    return has_shape and parameter.ndim > 1 and not parameter.is_meta


def _copy_to_meta(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    meta_dtype = dtype if parameter.is_floating_point() else parameter.dtype
    empty = nn.Parameter(torch.empty_like(parameter, device="meta", dtype=meta_dtype), parameter.requires_grad)
    vars(empty).update(vars(parameter))
    return empty


def _move_to_meta(module: nn.Module, dtype: torch.dtype) -> None:
    """Put every parameter on the meta device, in `dtype`; tied ones stay tied."""
    meta_copies: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter not in meta_copies:
                meta_copies[parameter] = _copy_to_meta(parameter, dtype)
            setattr(part, name, meta_copies[parameter])
