"""Build a Hugging Face causal LM from a name, a folder or a captured config: on the meta device, then on a real one."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from actor_init.adapters import CONFIG_NAME as ADAPTER_CONFIG_NAME
from actor_init.adapters import (
    DEFAULT_NAME,
    AdaptedWeights,
    Adapter,
    add_adapter,
    list_trained_parameters,
    read_adapter,
)
from actor_init.custom import building
from actor_init.custom.checkpoint import CheckpointWeights
from actor_init.custom.config import CustomConfig, CustomVectors
from actor_init.custom.user_file import UserFunction
from actor_init.declarations.optimizers.declaration import ParameterGroup
from actor_init.hub import find_folder
from actor_init.model_config import (
    cut_layers,
    parse_hf_config,
    read_captured_config,
    read_config,
)
from actor_init.model_form import HeadForm, Layout
from actor_init.optimizers.state_loading import AssignedState
from actor_init.option_values import PRESET_NAMES, PRESETS
from actor_init.schedule_and_norm import TORCH_DTYPES
from actor_init.spec import ActorSpec, UsageError
from actor_init.weights import (
    INIT_FILLS_BUFFERS,
    FolderWeights,
    OnProgress,
    RandomWeights,
    TiedParameters,
    Weights,
    build_with_values,
    copy_buffers,
    ignore_progress,
    list_modules_below,
)
from capture.facts import Setting

# Fields of a config that do not change the model.
IRRELEVANT_FIELDS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "use_cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model: its config (already cut to the requested layers), its weights, its display name, and how it is fed.

    facts   what run.json says of the file that built it
    layout  how rows are fed; None: packed or padded as the spec says, and not proved
    head    how log-probs are computed; None: from whole logits
    frozen  parameters that are not trained, beside those that an adapter freezes
    frozen_later  by the number of a forward of the job: parameters that it did not train from there on, beside those
    optimizer_state   what the optimizer begins with; None: nothing
    optimizer_groups  how the job's optimizer grouped the parameters; empty: as the spec says
    """

    config: PretrainedConfig
    weights: Weights
    name: str
    facts: Mapping[str, str] = field(default_factory=dict)
    adapter: Adapter | None = None
    layout: Layout | None = None
    head: HeadForm | None = None
    frozen: frozenset[str] = frozenset()
    frozen_later: Mapping[int, frozenset[str]] = field(default_factory=dict)
    optimizer_groups: Sequence[ParameterGroup] = ()
    optimizer_state: AssignedState | None = None

    def find_frozen_at(self, forward: int | None) -> frozenset[str]:
        """Return what the job did not train in a forward, beside what it never trained."""
        dated = [number for number in self.frozen_later if forward is not None and number <= forward]
        return self.frozen_later[max(dated)] if dated else frozenset()

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

    The order of the places: a user's function; the captured config where no model is named; a preset; a folder of
    captures; a model folder or a config.json. Only a model folder brings weights of its own.

    adapters  configs of the job's adapters by name

    Raises UsageError if there is no such model, its config cannot be used, or it has fewer layers than requested.
    """
    if spec.custom_model is not None:
        return _open_custom_source(spec, captured)
    folder = None
    if spec.model is None:
        if captured is None:
            setting = Setting("model")
            preset = setting.with_value(PRESET_NAMES[0])
            advice = f"Try: {preset}, or {setting} <folder, config.json or FILE.py:function>"
            raise UsageError(f"no actor.json beside the inputs says which model they came from. {advice}")
        values, name = dict(captured), captured_name
    elif spec.model in PRESET_NAMES:
        values, name = json.loads((PRESETS / f"{spec.model}.json").read_text()), spec.model
    else:
        path, name = find_folder(Setting("model", spec.model)), str(Path(spec.model))
        if path.is_dir() and not (path / "config.json").exists() and (config := read_captured_config(path)) is not None:
            values = config
        elif path.is_dir() and (path / ADAPTER_CONFIG_NAME).exists() and not (path / "config.json").exists():
            setting, advice = Setting("model", path), f"Try: {Setting('model', 'BASE')} {Setting('adapter', path)}"
            raise UsageError(setting, "is an adapter without its base", advice)
        else:
            values = read_config(path / "config.json" if path.is_dir() else path, spec.model)
        folder = path if path.is_dir() and any(path.glob("*.safetensors")) else None
    config = cut_layers(parse_hf_config(values, name), spec.num_layers)
    weights: Weights
    if folder is not None and not spec.random_weights:
        weights = FolderWeights.open(folder, build_on_meta(config, attention="eager", dtype=torch.float32))
    else:
        weights = make_random_weights(config, spec.weights_seed)
    source = ModelSource(config=config, weights=weights, name=name)
    return _add_adapter_weights(source, spec, adapters or {}, captured_name)


def _add_adapter_weights(
    base: ModelSource, spec: ActorSpec, adapters: Mapping[str, Mapping[str, object]], captured_name: str
) -> ModelSource:
    """Return the model with the adapter that the spec names, or that the job had. Raises UsageError."""
    if spec.adapter is None and (not adapters or isinstance(base.weights, FolderWeights)):
        return base
    if spec.adapter == "none":
        return base
    adapter_weights = None
    if spec.adapter is None:
        adapter = Adapter.from_configs(adapters, captured_name)
    else:
        folder = find_folder(Setting("adapter", spec.adapter))
        adapter = read_adapter(folder, next(iter(adapters)) if len(adapters) == 1 else DEFAULT_NAME)
        adapter_weights = FolderWeights.open(folder, None)
    if spec.parallel.tp > 1:
        setting, without = Setting("tp", spec.parallel.tp), Setting("adapter", "none")
        why = f"splits Linears, and this model has a {adapter.describe()} in them"
        raise UsageError(setting, why, f"Try: no {Setting('tp')}, or {without}")
    weights = AdaptedWeights(base=base.weights, adapter=adapter, adapter_weights=adapter_weights)
    return replace(base, adapter=adapter, weights=weights)


def _open_custom_source(spec: ActorSpec, captured: Mapping[str, object] | None) -> ModelSource:
    """Return the model that a user's function builds, with weights of --weights, or random by name."""
    assert spec.custom_model is not None
    function = UserFunction.open(*spec.custom_model)
    config = CustomConfig.open(function, captured, blocks=spec.blocks, num_layers=spec.num_layers)
    weights = (
        make_random_weights(config, spec.weights_seed)
        if spec.weights is None
        else CheckpointWeights.open(spec.weights, config.build(torch.float32))
    )
    return ModelSource(config=config, weights=weights, name=str(spec.model), facts=config.facts())


def make_random_weights(config: PretrainedConfig, seed: int) -> RandomWeights:
    """Return the random weights of a model without a checkpoint."""
    std = getattr(config, "initializer_range", None) or 0.02
    vector_source = CustomVectors(config) if isinstance(config, CustomConfig) else ModelVectors(config)
    return RandomWeights(seed=seed, std=std, vector_source=vector_source)


class ModelVectors:
    """Run a model's own `_init_weights` for its vectors, with only the module that holds one off the meta device.

    Random draws in it (states' time steps, sinks) use a generator seeded by the module's name.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self._config = config
        # The actor is filled from it, and the job's samples are compared with it.
        self._vectors: dict[str, Tensor] = {}

    @cached_property
    def _model(self) -> PreTrainedModel:
        if INIT_FILLS_BUFFERS:
            return share_meta_model(self._config)
        return build_with_values(self._config, attention="eager", dtype=torch.float32)

    def make_vector(self, name: str) -> Tensor:
        if name not in self._vectors:
            self._vectors[name] = self._run_init(name)
        return self._vectors[name]

    @torch.no_grad()
    def _run_init(self, name: str) -> Tensor:
        module_name, _, parameter_name = name.rpartition(".")
        module = self._model.get_submodule(module_name)
        vectors = {key: parameter for key, parameter in module.named_parameters(recurse=False) if parameter.ndim < 2}
        with torch.random.fork_rng(devices=[]):
            # `torch.manual_seed` would seed the GPUs too, and note its callers for each kind of GPU that is not in use.
            seed = int.from_bytes(hashlib.sha256(module_name.encode()).digest()[:7], "little")
            torch.default_generator.manual_seed(seed)
            try:
                for key, parameter in vectors.items():
                    values = torch.zeros_like(parameter, device="cpu") if parameter.is_meta else parameter.clone()
                    setattr(module, key, nn.Parameter(values))
                _find_submodel(self._model, module_name)._init_weights(module)
                vector: Tensor = module.get_parameter(parameter_name).detach()
            finally:
                # Others look at the same model.
                for key, parameter in vectors.items():
                    setattr(module, key, parameter)
        return vector


def to_plain_config(config: PretrainedConfig) -> dict[str, object]:
    """Return `config` as a dict, as it reads back from JSON, without fields that do not change the model."""
    plain: dict[str, object] = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in plain.items() if key not in IRRELEVANT_FIELDS}


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
            # torch.normal makes DiffLlama's parameters on the CPU, whatever the default device is.
            if not parameter.is_meta:
                setattr(module, name, nn.Parameter(parameter.to("meta"), parameter.requires_grad))
    return model


def share_meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return the fp32 model on the meta device, built once for all that look at it in turn. Nobody may change it.

    A model of many layers takes a good part of a replay's start to build. The last config's is kept.
    """
    # A user's function may build another model than before, so its config stands for the function as it was opened.
    kind = id(config) if isinstance(config, CustomConfig) else type(config)
    key = kind, config.to_json_string(use_diff=False)
    if key not in _shared:
        model = build_on_meta(config, attention="eager", dtype=torch.float32)
        _shared.clear()
        # With the config, whose id no other object gets while it is kept.
        _shared[key] = config, model
    return _shared[key][1]


_shared: dict[tuple[object, str], tuple[PretrainedConfig, PreTrainedModel]] = {}


def _build_adapted(config: PretrainedConfig, adapter: Adapter | None) -> PreTrainedModel:
    if adapter is None:
        return share_meta_model(config)
    model = build_on_meta(config, attention="eager", dtype=torch.float32)
    add_adapter(model, adapter)
    return model


def find_parameter_shapes(config: PretrainedConfig, adapter: Adapter | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's parameters by qualified name; a tied one is listed under each of its names."""
    model = _build_adapted(config, adapter)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}


def list_parameter_names(config: PretrainedConfig, adapter: Adapter | None = None) -> list[str]:
    """List the model's parameters in their order; of a tied one the first of its names."""
    return [name for name, _ in _build_adapted(config, adapter).named_parameters()]


def list_broken_ties(config: PretrainedConfig, adapter: Adapter) -> list[tuple[list[str], list[str]]]:
    """List the modules that share a weight in the model, and of which the adapter trains one without the other.

    Of each weight: those that have trained parameters of their own with the adapter, and the others.
    """
    model = build_on_meta(config, attention="eager", dtype=torch.float32)
    sharing: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        sharing.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    # The ids are those of living parameters: an adapter replaces modules, and what it wraps may be freed.
    held = list(model.parameters())
    add_adapter(model, adapter)
    broken: list[tuple[list[str], list[str]]] = []
    for parameter in held:
        trained = {name: list_trained_parameters(model.get_submodule(name)) for name in sharing[id(parameter)]}
        first, *others = trained.values()
        if any(set(other) != set(first) for other in others):
            own = [name for name, parameters in trained.items() if parameters]
            broken.append((own, [name for name in trained if name not in own]))
    return broken


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
    return count_elements(share_meta_model(config))


def find_blocks(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return the transformer layers by qualified name: the model's largest nn.ModuleList.

    Raises UsageError if there is none.
    """
    if (custom := building.find_custom_facts(model)) is not None:
        return [(f"{custom.blocks}.{index}", layer) for index, layer in enumerate(building.list_layers(model))]
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        why = "has no list of layers; a decoder-only causal LM is needed"
        raise UsageError(type(model).__name__, why)
    name, layers = max(lists, key=lambda name_and_list: len(name_and_list[1]))
    return [(f"{name}.{index}", layer) for index, layer in enumerate(layers)]


def configure_model(model: PreTrainedModel, spec: ActorSpec) -> None:
    """Recompute each block's activations in backward if the spec says so, and tell a user's model its dtype."""
    if building.find_custom_facts(model) is not None:
        building.configure_custom_model(model, dtype=TORCH_DTYPES[spec.dtype], checkpoints=spec.gradient_checkpointing)
    elif spec.gradient_checkpointing:
        # transformers before 5.23 knows the older name alone, and later ones warn of it.
        name = "activation_checkpointing_enable"
        enable = getattr(model, name, None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})


def count_elements(model: nn.Module) -> int:
    """Count the elements of a model's parameters; of a sharded one all ranks' count, and a tied one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def materialise(
    model: PreTrainedModel,
    weights: Weights,
    device: torch.device,
    prefix: str = "",
    on_progress: OnProgress = ignore_progress,
) -> None:
    """Move what is on the meta device below `prefix` to `device` and fill it. Tied parameters stay tied.

    Module by module: put empty parameters and unset buffers on the device, fill the parameters from the weights, let
    transformers initialise what the weights do not define, then fill the buffers. A model that a user's function built
    has no init of transformers': `building.materialise_custom_model` fills it.

    Large models take minutes: `on_progress` is called for each module, and with the size of each part of a parameter.

    Raises UsageError if neither the weights nor transformers' own init define a buffer's values.
    """
    if building.find_custom_facts(model) is not None:
        building.materialise_custom_model(model, weights, device, prefix, on_progress)
        return
    device_parameters = TiedParameters(device)
    with_values = None if INIT_FILLS_BUFFERS else _find_copy_with_values(model)
    for module_name, module in list_modules_below(model, prefix):
        parameters = {name: tensor for name, tensor in module.named_parameters(recurse=False) if tensor.is_meta}
        buffers = {name: tensor for name, tensor in module.named_buffers(recurse=False) if tensor.is_meta}
        if not parameters and not buffers:
            continue
        new: dict[str, nn.Parameter] = {}
        for name, parameter in parameters.items():
            if parameter not in device_parameters:
                new[name] = device_parameters.get(parameter)
            setattr(module, name, device_parameters.get(parameter))
        for name, buffer in buffers.items():
            setattr(module, name, torch.full_like(buffer, _unset_value(buffer), device=device))
        path = f"{module_name}." if module_name else ""
        filled = {name: tensor for name, tensor in new.items() if weights.fill(path + name, tensor, on_progress)}
        if len(filled) < len(new) or buffers:
            for name in _initialise_rest(_find_submodel(model, module_name), module, filled):
                weights.fill(path + name, filled[name], on_progress)
        if buffers and with_values is not None:
            copy_buffers(with_values.get_submodule(module_name), module, device)
        for name in buffers:
            _fill_buffer(model, module_name, name, weights)
        on_progress(0)


def _find_submodel(model: PreTrainedModel, module_name: str) -> PreTrainedModel:
    """Return the innermost PreTrainedModel around a module: its class knows how to initialise it."""
    names = module_name.split(".") if module_name else []
    modules = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)]
    return next(module for module in reversed(modules) if isinstance(module, PreTrainedModel))


def _initialise_rest(model: PreTrainedModel, module: nn.Module, filled: Mapping[str, nn.Parameter]) -> list[str]:
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


def _find_copy_with_values(model: PreTrainedModel) -> PreTrainedModel:
    """Build `model` again with its buffers' values, once: blocks are materialised one by one."""
    if model not in _copies_with_values:
        attention, dtype = model.config._attn_implementation, model.dtype
        _copies_with_values[model] = build_with_values(model.config, attention=attention, dtype=dtype)
    return _copies_with_values[model]


def _unset_value(buffer: Tensor) -> float | int:
    """Return a value that no model's buffer is filled with."""
    return math.nan if buffer.is_floating_point() else 113


def _fill_buffer(model: PreTrainedModel, module_name: str, name: str, weights: Weights) -> None:
    """Take the buffer from the weights, or leave it as its module's init, or that of a module around it, has set it."""
    path = f"{module_name}.{name}"
    buffer = model.get_submodule(module_name).get_buffer(name)
    if weights.has_tensor(path):
        weights.fill(path, buffer)
    outer_name = module_name
    while _is_unset(buffer) and outer_name:
        outer_name = outer_name.rpartition(".")[0]
        outer = model.get_submodule(outer_name)
        parameters = dict(outer.named_parameters(recurse=False))
        # The init of a module that has parameters could overwrite them: they are filled already.
        if not parameters:
            _initialise_rest(_find_submodel(model, outer_name), outer, parameters)
    if _is_unset(buffer):
        why = f"does not say what {path} holds before weights are loaded, and these weights have no such tensor"
        advice = f"Try: {Setting('model')} with a folder of weights that has it"
        raise UsageError("transformers", why, advice)


def _is_unset(buffer: Tensor) -> bool:
    unset = buffer.isnan() if buffer.is_floating_point() else buffer == _unset_value(buffer)
    return buffer.dtype is not torch.bool and bool(unset.all())
