"""State what a job's model is while it runs: its modules, their code and settings, its hooks and its parameters.

`model_facts_taker.py` says when. Nothing waits for a device: the buffers' values are copied as a pass's tensors are.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from os.path import isabs
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from capture.file_format.model_facts import ModelFacts
from capture.file_format.name_patterns import ANY, format_patterns, split_name
from capture.file_format.optimizer_step import strip_wrappers
from capture.record.callables import (
    describe_function,
    digest_function,
    digest_methods,
    find_own_code,
    find_package,
    find_package_of,
    is_of_package,
    is_plumbing,
    list_called_names,
    list_names,
    name_class,
    name_function,
    name_module,
    name_python,
    unwrap,
)
from capture.record.host_copy import copy_to_host, is_capturing_graph
from capture.record.job_facts import is_compiled, read_autocast_dtype
from capture.record.wrapper_facts import collect_wrapper_facts, find_class

# A buffer with more elements is a table of masks or positions, and no setting.
_MAX_BUFFER_ELEMENTS = 4096
_NUM_BUFFER_VALUES = 4
# A list of more values is no setting.
_MAX_VALUES = 8
# Settings that libraries change while a job runs, and that change no number of a pass.
_CHANGING_SETTINGS = frozenset({"training", "gradient_checkpointing", "name_or_path", "is_parallelizable", "use_cache"})
_NOT_SETTINGS = _CHANGING_SETTINGS | vars(nn.Module()).keys()
# Private settings that count: whether an adapter acts.
_PRIVATE_SETTINGS = frozenset({"_disable_adapters"})
_HOOK_DICTIONARIES = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
# Where a job's code may have put a function of its own in the place of the library's.
_PATCHED_NAMESPACES = ("torch.nn.functional", "torch.distributed", "torch")
# Files of transformers whose functions every model calls.
_SHARED_FILES = (
    "transformers.masking_utils",
    "transformers.modeling_rope_utils",
    "transformers.loss.loss_utils",
    "transformers.integrations.sdpa_attention",
)
# Packages whose functions are not listed: a forward of theirs has a digest of its own.
_FILES_LEFT_OUT = frozenset({"torch", "peft", "accelerate", "deepspeed"})
# transformers' hook that adds noise to embeddings is no plumbing.
_NOISE = "neftune"


@dataclass(frozen=True, kw_only=True, slots=True)
class RawModelFacts:
    """The facts as the job's thread took them, with the buffers on the host once `copy_events` have happened.

    modules, parameters  by name
    buffers              name to tensor
    rest                 fields of `ModelFacts` that are final
    """

    modules: Mapping[str, Mapping[str, object]]
    parameters: Mapping[str, Mapping[str, object]]
    buffers: Mapping[str, Tensor]
    copy_events: list[torch.cuda.Event]
    rest: Mapping[str, Any]

    def to_model_facts(self, *, rank: int = 0, recording: str = "", in_patterns: bool = True) -> ModelFacts:
        """Return the facts once the copies are done.

        in_patterns  as they are written; otherwise each module has its own name
        """
        group = group_by_pattern if in_patterns else dict
        buffers = {name: _describe_buffer(tensor) for name, tensor in self.buffers.items()}
        return ModelFacts(
            rank=rank,
            recording=recording,
            modules=group(self.modules),
            parameters=group(self.parameters),
            buffers=group(buffers),
            **self.rest,
        )


def group_by_pattern(facts: Mapping[str, Mapping[str, object]]) -> dict[str, Mapping[str, object]]:
    """Write equal facts of several layers once, by the pattern of their names."""
    names_by_template: dict[str, dict[str, list[str]]] = {}
    for name, values in facts.items():
        template, _ = split_name(name)
        names_by_template.setdefault(template, {}).setdefault(json.dumps(values, default=str), []).append(name)
    return {
        pattern: json.loads(text)
        for names_by_text in names_by_template.values()
        for all_names in [[name for names in names_by_text.values() for name in names]]
        for text, names in names_by_text.items()
        for pattern in format_patterns(names, all_names)
    }


def collect_model_facts(
    model: nn.Module, *, forward: int, trains: bool, config: Mapping[str, object] | None = None
) -> RawModelFacts:
    """Take the facts of `model` as it is now, in some milliseconds for hundreds of modules.

    forward, trains  the pass that begins
    config           settings of the running model's config that are other than in `actor.json`
    """
    wrappers, modules = split_wrappers(model)
    root = modules.get("") or model
    parameters, tied = _list_parameters(modules)
    device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
    buffers = _list_small_buffers(modules)
    copies, copy_events = ({}, []) if is_capturing_graph(buffers) else copy_to_host(buffers)
    names = {id(module): name for name, module in modules.items()}
    classes: dict[type[nn.Module], Mapping[str, object]] = {}
    module_facts = {name: _describe_module(name, module, names, classes) for name, module in modules.items()}
    return RawModelFacts(
        modules=module_facts,
        parameters={name: _describe_parameter(parameter) for name, parameter in parameters.items()},
        buffers=copies,
        copy_events=copy_events,
        rest={
            "forward": forward,
            "trains": trains,
            "python": name_python(),
            "versions": _read_versions(modules.values()),
            "config": dict(config or {}),
            "tied": tied,
            "frozen_later": {},
            "functions": _list_functions(classes),
            "patches": _list_patches(),
            "loss_function": describe_or_none(_find_loss_function(root)),
            "attention": _describe_attention(root),
            "compiled": _list_compiled(model),
            "autocast": read_autocast_dtype(device.type),
            "checkpoints": any(vars(module).get("gradient_checkpointing") is True for module in modules.values()),
            "wrappers": collect_wrapper_facts(wrappers, list(modules.values())),
        },
    )


def split_wrappers(model: nn.Module) -> tuple[list[nn.Module], dict[str, nn.Module]]:
    """Return the wrappers around the model, and the modules inside them by the names that the model gives them."""
    wrappers: list[nn.Module] = []
    modules: dict[str, nn.Module] = {}
    for full_name, module in model.named_modules():
        name = _strip_wrappers(full_name)
        if name == "base_model" and "peft_config" in vars(module):
            continue
        # Of a module and the wrappers around it, which have its name, the innermost comes last.
        if name == "" and name in modules:
            wrappers.append(modules[name])
        modules[name] = module
    return wrappers, modules


def _strip_wrappers(module_name: str) -> str:
    """Return a module's name without those of wrappers; that of a wrapper is that of what is in it."""
    return strip_wrappers(f"{module_name}.x" if module_name else "x").removesuffix("x").removesuffix(".")


def _describe_module(
    name: str, module: nn.Module, names: Mapping[int, str], classes: dict[type[nn.Module], Mapping[str, object]]
) -> dict[str, object]:
    """Describe one module. `classes` keeps what is known of classes."""
    class_ = find_class(module)
    if class_ not in classes:
        classes[class_] = _describe_class(class_)
    facts = dict(classes[class_])
    if attributes := _read_attributes(name, module):
        facts["attributes"] = attributes
    if "forward" in vars(module) and (forward := _find_replaced_forward(module, class_, names)) is not None:
        facts["forward"] = forward
    if hooks := _list_hooks(module):
        facts["hooks"] = hooks
    return facts


def _describe_class(class_: type[nn.Module]) -> dict[str, object]:
    facts: dict[str, object] = {"class": name_class(class_), "code": digest_function(class_.forward)}
    if find_package(class_.__module__) != "torch":
        facts["methods"] = digest_methods(class_, nn.Module)
    # A job may put a function of its own into the class of a package.
    for part in unwrap(class_.forward) if is_of_package(class_) else ():
        is_own = find_package_of(part) == find_package(class_.__module__)
        if type(part) is FunctionType and not is_plumbing(part) and not is_own:
            facts["forward"] = describe_function(part).to_json()
            break
    return facts


def _find_replaced_forward(module: nn.Module, class_: type[nn.Module], names: Mapping[int, str]) -> list[str] | None:
    """Return name and digest of a module's own forward if it is not that of its class; None if it is."""
    own = vars(module)["forward"]
    owner = own.__self__ if isinstance(own, MethodType) else module
    if owner is not module and id(owner) in names:
        return [f"the forward of {names[id(owner)]}", digest_function(own)]
    class_parts = {id(part) for part in unwrap(class_.forward)}
    for part in unwrap(own):
        if type(part) is FunctionType and not is_plumbing(part) and id(part) not in class_parts:
            return describe_function(part).to_json()
    return None


def _list_hooks(module: nn.Module) -> list[list[str]]:
    """List the hooks that are of no library's machinery: their kind, name and digest."""
    return [
        [kind, *describe_function(own).to_json()]
        for dictionary, kind in _HOOK_DICTIONARIES.items()
        for hook in vars(module).get(dictionary, {}).values()
        if (own := _find_acting_hook(hook)) is not None
    ]


def _find_acting_hook(hook: Any) -> Any:
    """Return a hook's function where it is no library's machinery; None where it is."""
    own = find_own_code(hook)
    return hook if own is None and _NOISE in str(getattr(hook, "__name__", "")) else own


def _read_attributes(name: str, module: nn.Module) -> dict[str, object]:
    """Read the plain settings of a module. One that is the number of its layer is written as `*`."""
    attributes: dict[str, object] = {}
    for key, value in vars(module).items():
        if key in _NOT_SETTINGS or (key[:1] == "_" and key not in _PRIVATE_SETTINGS) or "cached" in key:
            continue
        if "layer" in key and type(value) is int and value in split_name(name)[1][-1:]:
            attributes[key] = ANY
        elif _is_plain(value):
            attributes[key] = value
        elif isinstance(value, list | tuple) and len(value) <= _MAX_VALUES and all(map(_is_plain, value)):
            attributes[key] = list(value)
        elif isinstance(value, dict) and 0 < len(value) <= _MAX_VALUES and all(map(_is_plain, value.values())):
            attributes[key] = {str(inner): plain for inner, plain in value.items()}
        elif isinstance(value, FunctionType | BuiltinFunctionType | partial) and key != "forward":
            attributes[key] = name_function(next(unwrap(value), value))
    return attributes


def _is_plain(value: object) -> bool:
    return value is None or type(value) in (bool, int, float) or (type(value) is str and not isabs(value))


def _list_parameters(modules: Mapping[str, nn.Module]) -> tuple[dict[str, nn.Parameter], list[list[str]]]:
    """Return the parameters by name, tied ones by each of theirs, and the names of each that has several."""
    parameters: dict[str, nn.Parameter] = {}
    names_by_id: dict[int, list[str]] = {}
    for module_name, module in modules.items():
        for key, parameter in module._parameters.items():
            if parameter is not None and not key.startswith("_flat_param"):
                name = f"{module_name}.{key}" if module_name else key
                parameters[name] = parameter
                names_by_id.setdefault(id(parameter), []).append(name)
    return parameters, [sorted(names) for names in names_by_id.values() if len(names) > 1]


def _describe_parameter(parameter: nn.Parameter) -> dict[str, object]:
    facts: dict[str, object] = {
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "trained": parameter.requires_grad,
    }
    dictionaries = {
        "gradient hook": parameter._backward_hooks,
        "hook after accumulation": getattr(parameter, "_post_accumulate_grad_hooks", None),
    }
    hooks = [
        [kind, *describe_function(own).to_json()]
        for kind, dictionary in dictionaries.items()
        for hook in (dictionary or {}).values()
        if (own := find_own_code(hook)) is not None
    ]
    if hooks:
        facts["hooks"] = hooks
    return facts


def _list_small_buffers(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """List the small buffers that no checkpoint has: their values follow from the config."""
    return {
        f"{module_name}.{key}" if module_name else key: buffer
        for module_name, module in modules.items()
        for key, buffer in module._buffers.items()
        if buffer is not None
        and key in module._non_persistent_buffers_set
        and buffer.is_floating_point()
        and 0 < buffer.numel() <= _MAX_BUFFER_ELEMENTS
        and not buffer.is_meta
        and not hasattr(buffer, "placements")
    }


def describe_buffers(model: nn.Module) -> dict[str, dict[str, object]]:
    """Describe the small buffers of a model that has them; waits for its device."""
    _, modules = split_wrappers(model)
    return {name: _describe_buffer(buffer.detach().cpu()) for name, buffer in _list_small_buffers(modules).items()}


def _describe_buffer(tensor: Tensor) -> dict[str, object]:
    values = tensor.flatten().double()
    ends = (
        values
        if values.numel() <= 2 * _NUM_BUFFER_VALUES
        else [*values[:_NUM_BUFFER_VALUES], *values[-_NUM_BUFFER_VALUES:]]
    )
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "num_elements": tensor.numel(),
        "values": [_round(value) for value in ends],
        "norm": _round(torch.linalg.vector_norm(values)),
    }


def _round(value: Tensor) -> float:
    return float(f"{float(value):.9g}")


def _list_functions(classes: Iterable[type[nn.Module]]) -> dict[str, dict[str, list[str]]]:
    """List by file the functions that the methods of `classes` call.

    Of functions that a file imports, and of the files that all models of transformers share, only those are listed
    that are of no library. The name of a file's own function is left empty.
    """
    names_by_file: dict[str, set[str]] = {}
    for class_ in classes:
        if find_package(class_.__module__) not in _FILES_LEFT_OUT:
            names_by_file.setdefault(class_.__module__, set()).update(list_called_names(class_))
    if any(find_package(file) == "transformers" for file in names_by_file):
        names_by_file |= {file: set() for file in _SHARED_FILES}
    functions: dict[str, dict[str, list[str]]] = {}
    for file, names in sorted(names_by_file.items()):
        if (module := sys.modules.get(file)) is None:
            continue
        called = _find_called_functions(vars(module), names)
        found = {}
        for name, value in vars(module).items():
            # `isinstance` would make deprecated objects warn.
            if type(value) is not FunctionType:
                continue
            own = find_own_code(value)
            if own is not None and find_package_of(own) != find_package(file):
                found[name] = describe_function(own).to_json()
            elif name in called:
                found[name] = ["", digest_function(value)]
        if found:
            functions[name_module(file, getattr(module, "__file__", None))] = found
    return functions


def _find_called_functions(namespace: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Return the file's own functions among `names`, with those that they call."""
    called: set[str] = set()
    remaining = list(names)
    while remaining:
        name = remaining.pop()
        value = namespace.get(name)
        if name not in called and type(value) is FunctionType and value.__globals__ is namespace:
            called.add(name)
            remaining += list_names(value.__code__)
    return called


def _list_patches() -> dict[str, list[str]]:
    """List functions of torch in whose place is one of another package: name to its name and digest."""
    patches = {}
    for namespace in _PATCHED_NAMESPACES:
        if namespace not in sys.modules:
            continue
        for name, value in vars(sys.modules[namespace]).items():
            # `isinstance` would make torch's deprecated objects warn.
            if type(value) is not FunctionType or (is_plumbing(value) and not hasattr(value, "__wrapped__")):
                continue
            if namespace == "torch" and not hasattr(torch._C._VariableFunctions, name):
                continue
            if (own := find_own_code(value)) is not None:
                patches[f"{namespace}.{name}"] = describe_function(own).to_json()
    return patches


def _find_loss_function(root: nn.Module) -> Any:
    """Return what transformers' model computes its loss with; None where nothing says so."""
    if (own := vars(root).get("_loss_function")) is not None:
        return own
    loss_type = getattr(root, "loss_type", None)
    mapping = getattr(sys.modules.get("transformers.loss.loss_utils"), "LOSS_MAPPING", None)
    if not isinstance(mapping, dict) or not hasattr(type(root), "loss_function"):
        return None
    return mapping.get(loss_type, mapping.get("ForCausalLM"))


def _describe_attention(root: nn.Module) -> dict[str, object] | None:
    """Describe the functions that transformers calls for attention and for its mask; None where nothing names one."""
    name = getattr(vars(root).get("config"), "_attn_implementation", None)
    if not isinstance(name, str):
        return None
    return {"name": name, **describe_attention_functions(name)}


def describe_attention_functions(name: str) -> dict[str, list[str] | None]:
    """Describe what transformers calls in this process for a kernel of this name."""
    tables = {
        "function": ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
        "mask": ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
    }
    return {
        key: describe_or_none(dict(getattr(sys.modules.get(file), table, None) or {}).get(name))
        for key, (file, table) in tables.items()
    }


def describe_or_none(function: Any) -> list[str] | None:
    return None if function is None else describe_function(function).to_json()


def _read_versions(modules: Iterable[nn.Module]) -> dict[str, str]:
    """Return the versions of the packages that have the modules' classes, and of those around them."""
    packages = {"torch", "transformers", "peft", "accelerate", "deepspeed"}
    packages |= {find_package(find_class(module).__module__) for module in modules}
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in sorted(packages)}
    return {name: str(version) for name, version in versions.items() if version is not None}


def _list_compiled(model: nn.Module) -> list[str]:
    """List what is compiled, as patterns of names; the whole model has an empty one."""
    if not any(map(is_compiled, model.modules())):
        return []
    names = {_strip_wrappers(name): False for name, _ in model.named_modules()}
    names |= {_strip_wrappers(name): True for name, module in model.named_modules() if is_compiled(module)}
    return format_patterns([name for name, compiled in names.items() if compiled], names)
