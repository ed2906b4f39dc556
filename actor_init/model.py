"""Build a Hugging Face causal LM from a name, a folder or a captured config: on the meta device, then on a real one."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from actor_init.adapters import CONFIG_NAME as ADAPTER_CONFIG_NAME
from actor_init.adapters import DEFAULT_NAME, AdaptedWeights, Adapter, add_adapter, read_adapter
from actor_init.custom import building
from actor_init.custom.checkpoint import CheckpointWeights
from actor_init.custom.config import CustomConfig, CustomVectors
from actor_init.custom.user_file import UserFunction
from actor_init.model_form import HeadForm, Layout
from actor_init.optimizer import TORCH_DTYPES
from actor_init.spec import ActorSpec, UsageError
from actor_init.weights import (
    INIT_FILLS_BUFFERS,
    FolderWeights,
    OnProgress,
    RandomWeights,
    Weights,
    build_with_values,
    copy_buffers,
    unheard,
)
from capture.facts import Setting
from capture.file_format.actor_config import read_actor_config
from capture.file_format.micro_batch import CaptureError

PRESETS = files("actor_init") / "presets"
PASSING = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "use_cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model: its config (already cut to the requested layers), its weights, its display name, and how it is fed."""

    config: PretrainedConfig
    weights: Weights
    name: str
    facts: Mapping[str, str] = field(default_factory=dict)  # of the file that built it, for run.json
    adapter: Adapter | None = None
    layout: Layout | None = None  # of rows; None: packed or padded as the spec says, and not proved
    head: HeadForm | None = None  # how log-probs are computed; None: from whole logits
    frozen: frozenset[str] = frozenset()  # parameters that are not trained, beside those that an adapter freezes

    def layout_under(self, spec: ActorSpec) -> Layout:
        """Return how rows are fed."""
        return self.layout or Layout(packs=spec.packs)


def find_model(
    spec: ActorSpec,
    captured: Mapping[str, object] | None,
    captured_name: str,
    adapters: Mapping[str, Mapping[str, object]] | None = None,
) -> ModelSource:
    """Return the model that `spec` names, or the one whose config (`captured`) is stored beside the inputs.

    adapters  configs of the job's adapters by name

    Raises UsageError if there is no such model, its config cannot be used, or it has fewer layers than requested.
    """
    if spec.custom_model is not None:
        return _custom_source(spec, captured)
    folder = None
    if spec.model is None:
        if captured is None:
            given = Setting("model")
            advice = (
                f"Try: {given.with_value(_preset_names()[0])}, or {given} <folder, config.json or FILE.py:function>"
            )
            raise UsageError(f"no actor.json beside the inputs says which model they came from. {advice}")
        values, name = dict(captured), captured_name
    elif spec.model in _preset_names():
        values, name = json.loads((PRESETS / f"{spec.model}.json").read_text()), spec.model
    else:
        path = Path(spec.model)
        name = str(path)
        if path.is_dir() and not (path / "config.json").exists() and (config := _captured_config(path)) is not None:
            values = config
        elif path.is_dir() and (path / ADAPTER_CONFIG_NAME).exists() and not (path / "config.json").exists():
            given, advice = Setting("model", path), f"Try: {Setting('model', 'BASE')} {Setting('adapter', path)}"
            raise UsageError(given, "is an adapter without its base", advice)
        else:
            values = _read_config(path / "config.json" if path.is_dir() else path, spec.model)
        folder = path if path.is_dir() and any(path.glob("*.safetensors")) else None
    config = _cut_layers(_hf_config(values, name), spec.num_layers)
    weights: Weights
    if folder is not None and not spec.random_weights:
        weights = FolderWeights.open(folder, build_on_meta(config, attention="eager", dtype=torch.float32))
    else:
        weights = random_weights(config, spec.weights_seed)
    source = ModelSource(config=config, weights=weights, name=name)
    return _adapted(source, spec, adapters or {}, captured_name)


def _adapted(
    base: ModelSource, spec: ActorSpec, adapters: Mapping[str, Mapping[str, object]], captured_name: str
) -> ModelSource:
    """Return the model with the adapter that was asked for, or that the job had. Raises UsageError."""
    if spec.adapter is None and (not adapters or isinstance(base.weights, FolderWeights)):
        return base
    if spec.adapter == "none":
        return base
    own = None
    if spec.adapter is None:
        adapter = Adapter.of(adapters, captured_name)
    else:
        folder = Path(spec.adapter)
        adapter = read_adapter(folder, next(iter(adapters)) if len(adapters) == 1 else DEFAULT_NAME)
        own = FolderWeights.open(folder, None)
    if spec.parallel.tp > 1:
        given, without = Setting("tp", spec.parallel.tp), Setting("adapter", "none")
        why = f"splits Linears, and this model has a {adapter.describe()} in them"
        raise UsageError(given, why, f"Try: no {Setting('tp')}, or {without}")
    return replace(base, adapter=adapter, weights=AdaptedWeights(base=base.weights, adapter=adapter, own=own))


def _custom_source(spec: ActorSpec, captured: Mapping[str, object] | None) -> ModelSource:
    """Return the model that a user's function builds, with weights of --weights, or random by name."""
    assert spec.custom_model is not None
    function = UserFunction.open(*spec.custom_model)
    config = CustomConfig.open(function, captured, blocks=spec.blocks, num_layers=spec.num_layers)
    weights = (
        random_weights(config, spec.weights_seed) if spec.weights is None else CheckpointWeights.open(spec.weights)
    )
    return ModelSource(config=config, weights=weights, name=str(spec.model), facts=config.facts())


def random_weights(config: PretrainedConfig, seed: int) -> RandomWeights:
    """Return the random weights of a model without a checkpoint."""
    std = getattr(config, "initializer_range", None) or 0.02
    own_init = CustomVectors(config) if isinstance(config, CustomConfig) else VectorInit(config)
    return RandomWeights(seed=seed, std=std, own_init=own_init)


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
            _submodel_of(self._model, module_name)._init_weights(module)
        values: Tensor = module.get_parameter(own_name).detach()
        for key, parameter in small.items():
            setattr(module, key, parameter)
        return values


def lasting_config(config: PretrainedConfig) -> dict[str, object]:
    """Return `config` as it reads back from JSON, without fields that do not change the model."""
    plain: dict[str, object] = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in plain.items() if key not in PASSING}


def build_on_meta(config: PretrainedConfig, *, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the module tree with parameters and buffers on the meta device. `attention` is a transformers kernel name.

    It gets its own copy of the config, because its layers look up their kernel there in every forward. Raises
    UsageError for a kernel that the class does not take.
    """
    if isinstance(config, CustomConfig):
        return config.build(dtype)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=attention, dtype=dtype)
    except (KeyError, ValueError, ImportError) as error:
        if attention == "eager":
            raise
        reason = (str(error).splitlines() or [""])[0][:120]
        why = f"does not take the attention kernel {attention} ({type(error).__name__}: {reason})"
        advice = f"Try: {Setting('attention', 'eager')}, without {Setting('ring')}"
        raise UsageError(f"transformers' {config.model_type}", why, advice) from error
    assert isinstance(model, PreTrainedModel)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:  # torch.normal makes DiffLlama's on the CPU whatever the default device is
                setattr(module, name, nn.Parameter(parameter.to("meta"), parameter.requires_grad))
    return model


def parameter_shapes(config: PretrainedConfig, adapter: Adapter | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's parameters by qualified name; a tied one is listed under each of its names."""
    model = build_on_meta(config, attention="eager", dtype=torch.float32)
    add_adapter(model, adapter)
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}


def make_trainable(model: nn.Module, source: ModelSource) -> None:
    """Put the source's adapter into a model on the meta device, and freeze what is not trained.

    Exception: a model of which nothing would be left to train, as a job's first layers may be, is trained.
    """
    add_adapter(model, source.adapter)
    frozen = [parameter for name, parameter in model.named_parameters() if name in source.frozen]
    if len(frozen) < len(list(model.parameters())):
        for parameter in frozen:
            parameter.requires_grad_(False)


def count_parameters(config: PretrainedConfig) -> int:
    """Count the elements of the model's parameters; a tied one counts once."""
    return sum(p.numel() for p in build_on_meta(config, attention="eager", dtype=torch.float32).parameters())


def blocks_of(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return the transformer layers by qualified name: the model's largest nn.ModuleList.

    Raises UsageError if there is none.
    """
    if (built := building.built_of(model)) is not None:
        return [(f"{built.blocks}.{index}", layer) for index, layer in enumerate(building.layers_of(model))]
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        why = "has no list of layers; a decoder-only causal LM is needed"
        raise UsageError(type(model).__name__, why)
    name, layers = max(lists, key=lambda item: len(item[1]))
    return [(f"{name}.{index}", layer) for index, layer in enumerate(layers)]


def set_up(model: PreTrainedModel, spec: ActorSpec) -> None:
    """Recompute each block's activations in backward if the spec says so, and tell a user's model its dtype."""
    if building.built_of(model) is not None:
        building.set_up(model, dtype=TORCH_DTYPES[spec.dtype], checkpoints=spec.gradient_checkpointing)
    elif spec.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def num_parameters(model: nn.Module) -> int:
    """Count the elements of a model's parameters; of a sharded one all ranks' count, and a tied one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


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
    if building.built_of(model) is not None:
        building.materialise(model, weights, device, prefix, on_progress)
        return
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
            for name in _changed_by_init(_submodel_of(model, module_name), module, filled):
                weights.fill(path + name, filled[name], on_progress)
        if buffers and with_values is not None:
            copy_buffers(with_values.get_submodule(module_name), module, device)
        for name in buffers:
            _fill_buffer(model, module_name, name, weights)
        on_progress(0)


def _submodel_of(model: PreTrainedModel, module_name: str) -> PreTrainedModel:
    """Return the innermost PreTrainedModel around a module: its class knows how to initialise it."""
    names = module_name.split(".") if module_name else []
    around = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)]
    return next(one for one in reversed(around) if isinstance(one, PreTrainedModel))


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


def _fill_buffer(model: PreTrainedModel, module_name: str, name: str, weights: Weights) -> None:
    """Take the buffer from the weights, or leave it as its module's init, or that of a module around it, has set it."""
    path = f"{module_name}.{name}"
    buffer = model.get_submodule(module_name).get_buffer(name)
    if weights.holds(path):
        weights.fill(path, buffer)
    around = module_name
    while _is_unset(buffer) and around:
        around = around.rpartition(".")[0]
        own = dict(model.get_submodule(around).named_parameters(recurse=False))
        if not own:  # else its init could overwrite them
            _changed_by_init(_submodel_of(model, around), model.get_submodule(around), own)
    if _is_unset(buffer):
        why = f"does not say what {path} holds before weights are loaded, and these weights have no such tensor"
        advice = f"Try: {Setting('model')} with a folder of weights that has it"
        raise UsageError("transformers", why, advice)


def _is_unset(buffer: Tensor) -> bool:
    unset = buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer)
    return buffer.dtype is not torch.bool and bool(unset.all())


def _preset_names() -> list[str]:
    return sorted(entry.name.removesuffix(".json") for entry in PRESETS.iterdir())


def _captured_config(folder: Path) -> dict[str, object] | None:
    """Return the config of a folder of captures. Raises UsageError if its actor.json is damaged."""
    try:
        return read_actor_config(folder)
    except CaptureError as error:
        raise UsageError(*error.args) from error


def _read_config(path: Path, asked: str) -> dict[str, object]:
    given = Setting("model", asked)
    try:
        values = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        known = ", ".join(_preset_names())
        advice = f"Allowed: {known}, a folder with config.json, a config.json, or FILE.py:function"
        raise UsageError(given, f": {error}", advice) from error
    if not isinstance(values, dict):
        why = f": {path} holds a {type(values).__name__}, not a model config"
        raise UsageError(given, why)
    return values


def config_of(values: Mapping[str, object]) -> PretrainedConfig:
    """Return the config that `values`, read from JSON, describe. Raises what its class raises for bad values."""
    rest = _with_floats(dict(values))
    return AutoConfig.for_model(rest.pop("model_type"), **rest)


def _with_floats(value: Any) -> Any:
    """Return `value` with the infinities that transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(inner) for key, inner in value.items()}
    return [_with_floats(inner) for inner in value] if isinstance(value, list) else value


def _hf_config(values: Mapping[str, object], name: str) -> PretrainedConfig:
    model_type, config_name = values.get("model_type"), f"the config of {name}"
    if not model_type:
        why = "does not name its model_type, as Hugging Face's config.json does"
        raise UsageError(config_name, why)
    if model_type not in CONFIG_MAPPING:
        if "auto_map" in values:
            why = f"is a {model_type}, whose code came with it (auto_map), and no such code runs unless you name it"
            named = f"{Setting('model', 'FILE.py:build')} {Setting('weights', 'FOLDER')}"
            raise UsageError(name, why, f"Try: {named}, see docs/custom-models.md, Remote code")
        release = f"transformers {transformers.__version__}"
        why = f"has the model_type {model_type!r}, which {release} does not have"
        advice = f"Try: the job's transformers, or {Setting('model')} with another config.json"
        raise UsageError(config_name, why, advice)
    try:
        config = config_of(values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        why = f"is refused by transformers: {reason[:300]}"
        raise UsageError(config_name, why) from error
    _refuse_other_models(config, name)
    return config


def _refuse_other_models(config: PretrainedConfig, name: str) -> None:
    """Raise UsageError unless `config` is that of a causal LM, which reads token ids alone from left to right."""
    kind = type(config)
    is_decoder = getattr(config, "is_decoder", True)
    reads = None
    if config.is_encoder_decoder:
        reads = "an encoder and a decoder"
    elif kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reads = "transformers has no causal LM of this type"
    elif kind in MODEL_FOR_MASKED_LM_MAPPING and not is_decoder:
        reads = "an encoder, whose tokens see those behind them"
    if reads is not None:
        why = f"is a {config.model_type}, not a causal LM ({reads})"
        advice = f"Try: {Setting('model')} with a decoder-only language model, or its captures"
        raise UsageError(name, why, advice)


def _cut_layers(config: PretrainedConfig, num_layers: int | None) -> PretrainedConfig:
    if num_layers is None:
        return config
    if num_layers > config.num_hidden_layers:
        why = f", but the model has {config.num_hidden_layers}"
        advice = f"Allowed: 1 to {config.num_hidden_layers}"
        raise UsageError(Setting("num_layers", num_layers), why, advice)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    return config
