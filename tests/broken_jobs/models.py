"""Tiny models of several architectures, none of whose vectors is all zeros or ones."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCABULARY = 96

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY, "use_cache": False}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES},
    "llama-tied": {"model_type": "llama", **_SIZES, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **_SIZES},
    "qwen3": {"model_type": "qwen3", **_SIZES, "head_dim": 8},
    "gemma": {"model_type": "gemma", **_SIZES, "head_dim": 8, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **_SIZES, "sliding_window": 4},
    "mixtral": {"model_type": "mixtral", **_SIZES, "num_local_experts": 4, "sliding_window": None},
    "gpt2": {"model_type": "gpt2", **_GPT2, **_NO_DROPOUT, **_IDS, "initializer_range": 0.2},
}


def make_model(name: str, changes: Mapping[str, Any]) -> PreTrainedModel:
    """In fp32, the same in every process."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name, changes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def config_of(name: str, changes: Mapping[str, Any]) -> PretrainedConfig:
    return AutoConfig.for_model(**{**MODELS[name], **changes})


def with_other_config(model: PreTrainedModel, changes: Mapping[str, Any]) -> PreTrainedModel:
    """A model of the same weights, which reads them by another config."""
    values = {**model.config.to_dict(), **changes}
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), dtype=torch.float32)
    other.load_state_dict(model.state_dict(), strict=False)
    return other
