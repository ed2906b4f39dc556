"""From a name, a folder or a captured config to a Hugging Face causal LM: on the meta device, then on a real one."""

import json
import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from actor_init.spec import ActorSpec, UsageError
from actor_init.weights import FolderWeights, RandomWeights, Weights

PRESETS = files("actor_init") / "presets"
PASSING = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "use_cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Which model: its config (layers already cut to what was asked for), its weights, and what to call it."""

    config: PretrainedConfig
    weights: Weights
    name: str


def find_model(spec: ActorSpec, captured: Mapping[str, Any] | None, captured_name: str) -> ModelSource:
    """The model that `spec` names, or the one whose config (`captured`) lies beside the inputs.

    Raises UsageError if there is no such model, its config cannot be used, or it has fewer layers than asked for.
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
        config_path = path / "config.json" if path.is_dir() else path
        values, name = _read_config(config_path, spec.model), str(path)
        folder = path if path.is_dir() and any(path.glob("*.safetensors")) else None
    config = _cut_layers(_hf_config(values, name), spec.num_layers)
    weights: Weights
    if folder is not None and not spec.random_weights:
        weights = FolderWeights.open(folder)
    else:
        weights = RandomWeights(seed=spec.weights_seed, std=getattr(config, "initializer_range", None) or 0.02)
    return ModelSource(config=config, weights=weights, name=name)


def lasting_config(config: PretrainedConfig) -> dict[str, Any]:
    """`config` as JSON gives it back, without what makes no other model."""
    plain: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in plain.items() if key not in PASSING}


def build_on_meta(config: PretrainedConfig, *, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """The module tree with parameters and buffers on the meta device. `attention` is a transformers kernel name.

    It has a config of its own, since that is where its layers look up their kernel in every forward.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=attention, dtype=dtype)
    assert isinstance(model, PreTrainedModel)
    return model


def parameter_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Of the model's parameters by qualified name, tied ones under each of their names."""
    model = build_on_meta(config, attention="eager", dtype=torch.float32)
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}


def blocks_of(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The transformer layers by qualified name: the model's largest nn.ModuleList.

    Raises UsageError where there is none.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UsageError(f"{type(model).__name__} has no list of layers; a decoder-only causal LM is needed")
    name, layers = max(lists, key=lambda item: len(item[1]))
    return [(f"{name}.{index}", layer) for index, layer in enumerate(layers)]


@torch.no_grad()
def materialise(model: PreTrainedModel, weights: Weights, device: torch.device, prefix: str = "") -> None:
    """Put what is still on the meta device below `prefix` on `device`, with its values. Tied parameters stay tied.

    Raises UsageError where neither the weights nor transformers' own init say what a buffer holds.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
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
        if new or buffers:
            model._init_weights(module)
        for name in new:
            weights.fill(f"{module_name}.{name}" if module_name else name, made[own[name]])
        for name in buffers:
            _fill_buffer(f"{module_name}.{name}", module.get_buffer(name), weights)


def _unset(buffer: Tensor) -> float | int:
    """What no model's buffer is filled with."""
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
