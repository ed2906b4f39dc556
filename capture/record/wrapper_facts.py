"""State what DDP, FSDP and DeepSpeed around a job's model do with its gradients."""

import weakref
from collections.abc import Sequence
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from capture.record.callables import describe_function, find_own_code

GRADIENT_SYNC = "gradient_sync"
_DDP = "DistributedDataParallel"
# Bases that FSDP2 and its relatives put before a module's own class.
_MIXED_IN = ("FSDPModule", "ReplicateModule")
_DDP_SETTINGS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
_GROUP_SETTINGS = ("gradient_divide_factor", "force_sum_reduction_for_comms", "reduce_grads", "all_reduce_grads")
_POLICY_SETTINGS = ("param_dtype", "reduce_dtype", "output_dtype")
_ENGINE_SETTINGS = (
    *("zero_optimization_stage", "gradient_accumulation_steps", "postscale_gradients", "gradient_predivide_factor"),
    "communication_data_type",
)
# Of DeepSpeed's optimizers, which reduce gradients themselves.
_ZERO_SETTINGS = ("gradient_average",)


class GradientSyncReader:
    """Reads whether DDP will reduce the gradients of a pass. DDP decides that where its forward begins."""

    def __init__(self, model: nn.Module) -> None:
        # Of several ones the outermost counts.
        wrapper = next((module for module in model.modules() if type(module).__name__ == _DDP), None)
        self._wrapper = None if wrapper is None else weakref.ref(wrapper)

    def read(self) -> dict[str, str]:
        """Return the setting of a pass, `gradient_sync`; empty without DDP."""
        wrapper: Any = None if self._wrapper is None else self._wrapper()
        if wrapper is None:
            return {}
        return {GRADIENT_SYNC: "on" if wrapper.require_backward_grad_sync else "off"}


def find_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before FSDP2 put its own in front."""
    class_ = type(module)
    while len(class_.__bases__) == 2 and class_.__bases__[0].__name__ in _MIXED_IN:
        class_ = class_.__bases__[1]
    return class_


def collect_wrapper_facts(wrappers: Sequence[nn.Module], modules: Sequence[nn.Module]) -> list[dict[str, object]]:
    """Describe each wrapper: its class, its settings, and the functions of the job that stand in for its own.

    wrappers  the modules around the model, from the outside in
    modules   those of the model, which FSDP2 wraps without a module of its own
    """
    facts = [description for wrapper in wrappers if (description := _describe_wrapper(wrapper)) is not None]
    if (sharded := _describe_fsdp2(modules)) is not None:
        facts.append(sharded)
    return facts


def _describe_wrapper(wrapper: Any) -> dict[str, object] | None:
    name = type(wrapper).__name__
    if name == _DDP:
        ignored = set(wrapper.parameters_to_ignore) & {key for key, _ in wrapper.module.named_parameters()}
        return {
            "class": name,
            **_read_settings(wrapper, _DDP_SETTINGS),
            "parameters_to_ignore": sorted(ignored),
            "comm_hooks": [describe_function(hook).to_json() for hook, _ in getattr(wrapper, "_comm_hooks", ())],
            **_list_replaced_functions(wrapper),
        }
    if name == "FullyShardedDataParallel":
        hook = getattr(wrapper, "_comm_hook", None)
        return {
            "class": name,
            "sharding_strategy": str(getattr(wrapper, "sharding_strategy", None)),
            "comm_hooks": [] if hook is None else [describe_function(hook).to_json()],
            **_list_replaced_functions(wrapper),
        }
    if name == "DeepSpeedEngine":
        optimizer = getattr(wrapper, "optimizer", None)
        return {
            "class": name,
            **_read_settings(wrapper, _ENGINE_SETTINGS),
            **_read_settings(optimizer, _ZERO_SETTINGS),
            **_list_replaced_functions(wrapper, optimizer),
        }
    return None


def _describe_fsdp2(modules: Sequence[Any]) -> dict[str, object] | None:
    """Describe the groups of parameters that FSDP2 reduces together; None without any."""
    groups = [
        group for module in modules if type(module).__bases__[0].__name__ in _MIXED_IN for group in _list_groups(module)
    ]
    if not groups:
        return None
    distinct: dict[str, list[object]] = {}
    for group in groups:
        policy = getattr(group, "mp_policy", None)
        settings = {**_read_settings(group, _GROUP_SETTINGS), **_read_settings(policy, _POLICY_SETTINGS)}
        for key, value in {**settings, **_list_replaced_functions(group)}.items():
            if value not in distinct.setdefault(key, []):
                distinct[key].append(value)
    # A setting that groups have in common is that; another one is a list of all values.
    settings = {key: values[0] if len(values) == 1 else values for key, values in distinct.items()}
    return {"class": "FSDPModule", **settings}


def _list_groups(module: Any) -> Sequence[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _list_replaced_functions(*owners: object) -> dict[str, object]:
    """List the methods of objects in whose place is a function of the job: `replaced`, by the method's name."""
    replaced = {
        key: describe_function(own).to_json()
        for owner in owners
        if owner is not None
        for key, value in vars(owner).items()
        if isinstance(value, FunctionType | MethodType)
        and hasattr(type(owner), key)
        and (own := find_own_code(value)) is not None
    }
    return {"replaced": replaced} if replaced else {}


def _read_settings(owner: object, names: Sequence[str]) -> dict[str, object]:
    """Read settings, of which some are methods."""
    values = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
    return {name: _to_plain(value() if isinstance(value, MethodType) else value) for name, value in values.items()}


def _to_plain(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value).removeprefix("torch.")
