"""Build a LoRA adapter into an actor, as PEFT does in a job: its own weights are trained, the base's are frozen.

The only file that imports peft, where an adapter is built. Names of parameters are those that PEFT gives them:

    model.layers.0.self_attn.q_proj.base_layer.weight       `...q_proj.weight` of the base
    model.layers.0.self_attn.q_proj.lora_A.default.weight   of the adapter `default`
    lm_head.modules_to_save.default.weight                  trained whole, and saved with the adapter
"""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from actor_init.spec import UsageError
from actor_init.weights import FolderWeights, OnProgress, Weights, ignore_progress
from capture.facts import Setting

CONFIG_NAME = "adapter_config.json"
DEFAULT_NAME = "default"
FOLDER_SETTING, NONE_SETTING = Setting("adapter", "FOLDER"), Setting("adapter", "none")
# Names in an adapter's file begin with this.
_SAVED_PREFIX = "base_model.model."
# What PEFT warns of where an adapter breaks a tie: `model.list_broken_ties` finds it, and a note says it.
_TIE_WARNING = "Model has `tie_word_embeddings=True`"
_SUPPORTED_SETTINGS = frozenset(
    {
        *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "use_rslora"),
        *("modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "use_dora"),
        *("lora_bias", "ensure_weight_tying", "target_parameters"),
    }
)
_LATER_SETTINGS = ("ensure_weight_tying", "target_parameters")
# Settings that say where the weights begin, or where they came from: they do not change the modules.
_IGNORED_SETTINGS = frozenset(
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("megatron_config", "megatron_core", "runtime_config", "qalora_group_size"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """An adapter to build.

    name      as in the names of its parameters
    settings  of peft.LoraConfig, those that say what is built
    """

    name: str
    settings: Mapping[str, Any]

    @classmethod
    def from_configs(cls, configs: Mapping[str, Mapping[str, Any]], source: str) -> "Adapter":
        """Choose the adapter of a job from its configs by name. Raises UsageError for one that cannot be built."""
        if len(configs) != 1:
            why = f"has {len(configs)} adapters ({', '.join(configs)}), and one can be built"
            advice = f"Try: {FOLDER_SETTING} with the one that was trained, or {NONE_SETTING}"
            raise UsageError(source, why, advice)
        ((name, config),) = configs.items()
        others = [
            key
            for key, value in config.items()
            if key not in _SUPPORTED_SETTINGS | _IGNORED_SETTINGS and _is_set(value)
        ]
        if config.get("peft_type") != "LORA":
            others = [f"peft_type {config.get('peft_type')}"]
        if others:
            why = f"has an adapter with {', '.join(others)}, which is not built here; LoRA and DoRA are"
            advice = f"Try: {NONE_SETTING}, with {Setting('model')} a folder into which the adapter is merged"
            raise UsageError(source, why, advice)
        settings = {key: value for key, value in config.items() if key in _SUPPORTED_SETTINGS}
        for later in _LATER_SETTINGS:
            # Releases of PEFT before these settings refuse them.
            if not settings.get(later):
                settings.pop(later, None)
        return cls(name=name, settings=settings)

    def describe(self) -> str:
        targets = self.settings.get("target_modules") or ()
        names = [targets] if isinstance(targets, str) else sorted(targets)
        target_names = ", ".join([*names, *sorted(self.settings.get("target_parameters") or ())])
        return (
            f"{'DoRA' if self.settings.get('use_dora') else 'LoRA'} of rank {self.settings.get('r')} on {target_names}"
        )

    def describe_training(self) -> str:
        """Say what is trained besides the matrices, and what is not."""
        names = self.settings.get("modules_to_save") or []
        # PEFT adds the whole name of an embedding that it ties to one that a job named by its end.
        whole = [name for name in names if not any(name.endswith(f".{other}") for other in names)]
        tied = " with what is tied to it" if self.settings.get("ensure_weight_tying") else ""
        return f"{', '.join(whole)} trained whole{tied}; the rest is frozen" if whole else "the rest is frozen"


def _is_set(value: Any) -> bool:
    return value not in (None, False, "none", [], {}, "")


def read_adapter(folder: Path, name: str) -> Adapter:
    """Read the adapter that PEFT's `save_pretrained` wrote. Raises UsageError."""
    path, setting = folder / CONFIG_NAME, Setting("adapter", folder)
    try:
        config = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = f"{path}: {error.strerror}" if isinstance(error, OSError) else f"{path}: {error}"
        files = f"{CONFIG_NAME} and adapter_model.safetensors"
        advice = f"Give a folder with {files}, as PEFT's save_pretrained writes it, or none"
        raise UsageError(setting, f": {reason}", advice) from error
    if not isinstance(config, dict):
        why = f": {path} holds a {type(config).__name__}, not an adapter's config"
        raise UsageError(setting, why)
    return Adapter.from_configs({name: config}, str(path))


def add_adapter(model: nn.Module, adapter: Adapter | None) -> None:
    """Put the adapter's modules into a model on the meta device, and freeze what is not the adapter's.

    Does nothing without an adapter. Raises UsageError if peft is missing or finds nothing to adapt.
    """
    if adapter is None:
        return
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        why = f"needs peft: {error}"
        raise UsageError(f"the job's {adapter.describe()}", why, "Try: pip install peft") from error
    try:
        # PEFT adds the names of tied modules to the lists that it is given.
        config = LoraConfig(**deepcopy(dict(adapter.settings)), init_lora_weights=False, inference_mode=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=re.escape(_TIE_WARNING))
            inject_adapter_in_model(config, model, adapter_name=adapter.name)
    except (ValueError, TypeError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"peft refuses the {adapter.describe()}: {reason}") from error
    if getattr(config, "target_modules_to_tie", None):
        why = "shares its matrices between tied layers (ensure_weight_tying), which is not built here"
        raise UsageError(f"the {adapter.describe()}", why, f"Try: {NONE_SETTING}")


def list_trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedWeights:
    """The weights of a base, whose parameters have other names since the adapter wraps them, and the adapter's own.

    adapter_weights  from the adapter's folder; None: matrices are random by name, biases 0
    """

    base: Weights
    adapter: Adapter
    adapter_weights: FolderWeights | None

    def describe(self) -> str:
        origin = "random" if self.adapter_weights is None else f"from {self.adapter_weights.folder}"
        return f"{self.base.describe()}, adapter {origin}"

    def has_tensor(self, name: str) -> bool:
        weights, weights_name = self._locate(name)
        return weights is not None and weights.has_tensor(weights_name)

    def fill(self, name: str, parameter: Tensor, on_progress: OnProgress = ignore_progress) -> bool:
        """Fill `parameter`. Raises UsageError if the folder of its weights has none of the name and shape."""
        weights, weights_name = self._locate(name)
        if weights is None:
            if "lora_magnitude_vector" in name:
                why = "are not known without the adapter"
                raise UsageError("DoRA's magnitudes", why, f"Try: {FOLDER_SETTING}")
            parameter.detach().zero_()
            return True
        return weights.fill(weights_name, parameter, on_progress)

    def sample(self, name: str, shape: Sequence[int], start: int, count: int) -> Tensor | None:
        weights, weights_name = self._locate(name)
        return None if weights is None else weights.sample(weights_name, shape, start, count)

    def _locate(self, name: str) -> tuple[Weights | None, str]:
        """Return the weights that have the values of `name`, and their name in these; None: no weights have them."""
        parts = name.split(".")
        is_lora = any(part.startswith("lora_") for part in parts)
        if not is_lora and "modules_to_save" not in parts:
            return self.base, ".".join(part for part in parts if part not in ("base_layer", "original_module"))
        plain = ".".join(part for part in parts if part not in ("modules_to_save", self.adapter.name))
        if self.adapter_weights is not None:
            # PEFT saves DoRA's magnitudes under the name of their module.
            if "lora_magnitude_vector" in parts:
                plain = plain.removesuffix(".weight")
            return self.adapter_weights, _SAVED_PREFIX + plain
        if not is_lora:
            return self.base, plain
        return (None if parts[-1] == "bias" or "lora_magnitude_vector" in parts else self.base), name
