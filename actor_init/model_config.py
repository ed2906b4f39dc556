"""Read the config of a causal LM: from a preset, a folder of captures or a config.json, and as transformers has it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    PretrainedConfig,
)

from actor_init.option_values import MODEL_ADVICE
from actor_init.spec import UsageError
from capture.facts import Setting
from capture.file_format.actor_config import read_actor_config
from capture.file_format.micro_batch import CaptureError


def read_captured_config(folder: Path) -> dict[str, object] | None:
    """Return the config of a folder of captures. Raises UsageError if its actor.json is damaged."""
    try:
        return read_actor_config(folder)
    except CaptureError as error:
        raise UsageError(*error.args) from error


def read_config(path: Path, typed: str) -> dict[str, object]:
    """Read a config.json. Raises UsageError, which names what was `typed`, for what is none."""
    setting = Setting("model", typed)
    try:
        values = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(setting, f": {error}", MODEL_ADVICE) from error
    if not isinstance(values, dict):
        why = f": {path} holds a {type(values).__name__}, not a model config"
        raise UsageError(setting, why)
    return values


def parse_config(values: Mapping[str, object]) -> PretrainedConfig:
    """Return the config that `values`, read from JSON, describe. Raises what its class raises for bad values."""
    fields = _restore_infinities(dict(values))
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _restore_infinities(value: Any) -> Any:
    """Return `value` with the infinities that transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _restore_infinities(inner) for key, inner in value.items()}
    return [_restore_infinities(inner) for inner in value] if isinstance(value, list) else value


def parse_hf_config(values: Mapping[str, object], name: str) -> PretrainedConfig:
    """Return the config of a causal LM as transformers has it. Raises UsageError for another one."""
    model_type, config_name = values.get("model_type"), f"the config of {name}"
    if not model_type:
        why = "does not name its model_type, as Hugging Face's config.json does"
        raise UsageError(config_name, why)
    if model_type not in CONFIG_MAPPING:
        if "auto_map" in values:
            why = f"is a {model_type}, whose code came with it (auto_map), and no such code runs unless you name it"
            options = f"{Setting('model', 'FILE.py:build')} {Setting('weights', 'FOLDER')}"
            raise UsageError(name, why, f"Try: {options}, see docs/models.md#remote-code")
        release = f"transformers {transformers.__version__}"
        why = f"has the model_type {model_type!r}, which {release} does not have"
        advice = f"Try: the job's transformers, or {Setting('model')} with another config.json"
        raise UsageError(config_name, why, advice)
    try:
        config = parse_config(values)
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
    reason = None
    if config.is_encoder_decoder:
        reason = "an encoder and a decoder"
    elif kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = "transformers has no causal LM of this type"
    elif kind in MODEL_FOR_MASKED_LM_MAPPING and not is_decoder:
        reason = "an encoder, whose tokens see those behind them"
    if reason is not None:
        why = f"is a {config.model_type}, not a causal LM ({reason})"
        advice = f"Try: {Setting('model')} with a decoder-only language model, or its captures"
        raise UsageError(name, why, advice)


def cut_layers(config: PretrainedConfig, num_layers: int | None) -> PretrainedConfig:
    """Leave the config its first layers. Raises UsageError if it has fewer."""
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
