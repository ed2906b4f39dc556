"""Build a Hugging Face causal LM from a name, a folder or a captured config: on the meta device, then on a real one."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from actor_init.initial_values import INIT_FILLS_BUFFERS, build_with_values, copy_buffers
from actor_init.spec import ActorSpec, UsageError
from actor_init.weights import FolderWeights, OnProgress, RandomWeights, Weights, unheard
from capture.file_format.actor_config import read_actor_config
from capture.file_format.micro_batch import CaptureError

PRESETS = files("actor_init") / "presets"
PASSING = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "use_cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model: its config (already cut to the requested layers), its weights, and its display name."""

    config: PretrainedConfig
    weights: Weights
    name: str


def find_model(spec: ActorSpec, captured: Mapping[str, Any] | None, captured_name: str) -> ModelSource:
    """Return the model that `spec` names, or the one whose config (`captured`) is stored beside the inputs.

    Raises UsageError if there is no such model, its config cannot be used, or it has fewer layers than requested.
    """
    folder = None
    if spec.model is None:
        if captured is None:
            raise UsageError(
                f"no actor.json beside the inputs says which model they came from. "
                f"Try: --model {_preset_names()[0]}, or --model <folder or config.json>"
            )
        values, name = dict(captured), captured_name
    elif spec.model in _preset_names():
        values, name = json.loads((PRESETS / f"{spec.model}.json").read_text()), spec.model
    else:
        path = Path(spec.model)
        name = str(path)
        if path.is_dir() and not (path / "config.json").exists() and (config := _captured_config(path)) is not None:
            values = config
        else:
            values = _read_config(path / "config.json" if path.is_dir() else path, spec.model)
        folder = path if path.is_dir() and any(path.glob("*.safetensors")) else None
    config = _cut_layers(_hf_config(values, name), spec.num_layers)
    weights: Weights
    if folder is not None and not spec.random_weights:
        weights = FolderWeights.open(folder)
    else:
        weights = random_weights(config, spec.weights_seed)
    return ModelSource(config=config, weights=weights, name=name)


def random_weights(config: PretrainedConfig, seed: int) -> RandomWeights:
    """Return the random weights of a model without a checkpoint."""
    std = getattr(config, "initializer_range", None) or 0.02
    return RandomWeights(seed=seed, std=std, own_init=VectorInit(config))


class VectorInit:
    """Run a model's own `_init_weights` for its vectors, with only the module that holds one off the meta device.

    Random draws in it (states' time steps, sinks) use a generator seeded by the module's name.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self._config = config

    @cached_property
    def _model(self) -> PreTrainedModel:
        build = build_on_meta if INIT_FILLS_BUFFERS else build_with_values
        return build(self._config, attention="eager", dtype=torch.float32)

    @torch.no_grad()
    def vector(self, name: str) -> Tensor:
        module_name, _, own_name = name.rpartition(".")
        module = self._model.get_submodule(module_name)
        small = {key: p for key, p in module.named_parameters(recurse=False) if p.ndim < 2}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(hashlib.sha256(module_name.encode()).digest()[:7], "little"))
            for key, parameter in small.items():
                own = torch.zeros_like(parameter, device="cpu") if parameter.is_meta else parameter.clone()
                setattr(module, key, nn.Parameter(own))
            self._model._init_weights(module)
        values: Tensor = module.get_parameter(own_name).detach()
        for key, parameter in small.items():
            setattr(module, key, parameter)
        return values


def lasting_config(config: PretrainedConfig) -> dict[str, Any]:
    """Return `config` as it reads back from JSON, without fields that do not change the model."""
    plain: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in plain.items() if key not in PASSING}


def build_on_meta(config: PretrainedConfig, *, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the module tree with parameters and buffers on the meta device. `attention` is a transformers kernel name.

    It gets its own copy of the config, because its layers look up their kernel there in every forward.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=attention, dtype=dtype)
    assert isinstance(model, PreTrainedModel)
    return model


def parameter_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's parameters by qualified name; a tied one is listed under each of its names."""
    model = build_on_meta(config, attention="eager", dtype=torch.float32)
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}


def count_parameters(config: PretrainedConfig) -> int:
    """Count the elements of the model's parameters; a tied one counts once."""
    return sum(p.numel() for p in build_on_meta(config, attention="eager", dtype=torch.float32).parameters())


def blocks_of(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return the transformer layers by qualified name: the model's largest nn.ModuleList.

    Raises UsageError if there is none.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UsageError(f"{type(model).__name__} has no list of layers; a decoder-only causal LM is needed")
    name, layers = max(lists, key=lambda item: len(item[1]))
    return [(f"{name}.{index}", layer) for index, layer in enumerate(layers)]


@torch.no_grad()
def materialise(
    model: PreTrainedModel,
    weights: Weights,
    device: torch.device,
    prefix: str = "",
    on_progress: OnProgress = unheard,
) -> None:
    """Move what is on the meta device below `prefix` to `device` and fill it. Tied parameters stay tied.

    Large models take minutes: `on_progress` is called for each module, and with the size of each part of a parameter.

    Raises UsageError if neither the weights nor transformers' own init define a buffer's values.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    with_values = None if INIT_FILLS_BUFFERS else _with_values(model)
    for module_name, module in model.named_modules():
        if prefix and module_name != prefix and not module_name.startswith(f"{prefix}."):
            continue
        own = {name: p for name, p in module.named_parameters(recurse=False) if p.is_meta}
        buffers = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta}
        if not own and not buffers:
            continue
        new = [name for name, parameter in own.items() if parameter not in made]
        for name, parameter in own.items():
            if parameter not in made:
                made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            setattr(module, name, made[parameter])
        for name, buffer in buffers.items():
            setattr(module, name, torch.full_like(buffer, _unset(buffer), device=device))
        path = f"{module_name}." if module_name else ""
        filled = {n: made[own[n]] for n in new if weights.fill(path + n, made[own[n]], on_progress)}
        if len(filled) < len(new) or buffers:
            for name in _changed_by_init(model, module, filled):
                weights.fill(path + name, filled[name], on_progress)
        if buffers and with_values is not None:
            copy_buffers(with_values.get_submodule(module_name), module, device)
        for name in buffers:
            _fill_buffer(f"{module_name}.{name}", module.get_buffer(name), weights)
        on_progress(0)


def _changed_by_init(model: PreTrainedModel, module: nn.Module, filled: Mapping[str, nn.Parameter]) -> list[str]:
    """Let transformers initialise the rest of `module`, and return the names in `filled` that it may have overwritten.

    Its init skips tensors with a flag, as when it loads weights: normal values for an embedding of half a billion
    elements would take longer than everything else. For some models it writes zeros for padding, which no flag
    prevents. Before 5.0 it knows no such flag.
    """
    if not INIT_FILLS_BUFFERS:
        model._init_weights(module)
        return list(filled)
    before = {name: parameter._version for name, parameter in filled.items()}
    flagged: Sequence[Any] = list(filled.values())
    for parameter in flagged:
        parameter._is_hf_initialized = True
    model._init_weights(module)
    for parameter in flagged:
        del parameter._is_hf_initialized
    has_padding = getattr(module, "padding_idx", None) is not None
    return [name for name, parameter in filled.items() if has_padding or parameter._version != before[name]]


_copies_with_values: "WeakKeyDictionary[PreTrainedModel, PreTrainedModel]" = WeakKeyDictionary()


def _with_values(model: PreTrainedModel) -> PreTrainedModel:
    """Build `model` again with its buffers' values, once: blocks are materialised one by one."""
    if model not in _copies_with_values:
        attention, dtype = model.config._attn_implementation, model.dtype
        _copies_with_values[model] = build_with_values(model.config, attention=attention, dtype=dtype)
    return _copies_with_values[model]


def _unset(buffer: Tensor) -> float | int:
    """Return a value that no model's buffer is filled with."""
    return math.nan if buffer.is_floating_point() else 113


def _fill_buffer(name: str, buffer: Tensor, weights: Weights) -> None:
    if weights.holds(name):
        weights.fill(name, buffer)
    unset = buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer)
    if buffer.dtype is not torch.bool and bool(unset.all()):
        raise UsageError(
            f"transformers does not say what {name} holds before weights are loaded, and these weights have no such "
            "tensor. Try: --model with a folder of weights that has it"
        )


def _preset_names() -> list[str]:
    return sorted(entry.name.removesuffix(".json") for entry in PRESETS.iterdir())


def _captured_config(folder: Path) -> dict[str, Any] | None:
    """Return the config of a folder of captures. Raises UsageError if its actor.json is damaged."""
    try:
        return read_actor_config(folder)
    except CaptureError as error:
        raise UsageError(str(error)) from error


def _read_config(path: Path, asked: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(
            f"--model {asked}: {error}. "
            f"Allowed: {', '.join(_preset_names())}, a folder with config.json, or a config.json"
        ) from error
    if not isinstance(values, dict):
        raise UsageError(f"--model {asked}: {path} holds a {type(values).__name__}, not a model config")
    return values


def _hf_config(values: Mapping[str, Any], name: str) -> PretrainedConfig:
    rest = dict(values)
    model_type = rest.pop("model_type", None)
    if not model_type:
        raise UsageError(f"the config of {name} does not name its model_type, as Hugging Face's config.json does")
    try:
        return AutoConfig.for_model(model_type, **rest)
    except (ValueError, TypeError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"the config of {name} is refused by transformers: {reason}") from error


def _cut_layers(config: PretrainedConfig, num_layers: int | None) -> PretrainedConfig:
    if num_layers is None:
        return config
    if num_layers > config.num_hidden_layers:
        raise UsageError(
            f"--num-layers {num_layers}, but the model has {config.num_hidden_layers}. "
            f"Allowed: 1 to {config.num_hidden_layers}"
        )
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    return config
