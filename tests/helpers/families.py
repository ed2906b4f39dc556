"""Tiny causal LMs of every decoder-only family in transformers, with each kind of layer that the family mixes.

A config takes from `COMMON` what its class has, and the rest from `OWN`. Windows and chunks are short, so that a
document of 20 tokens is longer.
"""

import inspect
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Of transformers, as (5, 23): families and what they can do differ between releases.
RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
VOCABULARY = 128
WINDOW = 6
COMMON: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
HYBRID = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4}
SLIDING_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR_FULL = {"layer_types": ["linear_attention", "full_attention"]}
INDEXED = {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 16}
OWN: dict[str, dict[str, Any]] = {
    "afmoe": SLIDING_FULL | {"num_dense_layers": 1},
    "axk1": MLA,
    "axk2": MLA | INDEXED,
    "bailing_hybrid": MLA | LINEAR_FULL | {"head_dim": 8},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "cohere2": SLIDING_FULL,
    "cohere2_moe": SLIDING_FULL,
    "cohere_compass_text": SLIDING_FULL | {"rope_parameters": {"sliding_attention": ROPE, "full_attention": None}},
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48},
    },
    "deepseek_v2": MLA | {"first_k_dense_replace": 1},
    "deepseek_v3": MLA | {"first_k_dense_replace": 1},
    "deepseek_v32": MLA | INDEXED | {"first_k_dense_replace": 1},
    "deepseek_v4": {"layer_types": ["heavily_compressed_attention", "sliding_attention"]},
    "dots1": SLIDING_FULL,
    "dots3_note_text": MLA | INDEXED | SLIDING_FULL | {"shared_experts_intermediate_size": 24},
    "exaone4": SLIDING_FULL,
    "exaone_moe": SLIDING_FULL,
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "gemma3_text": SLIDING_FULL,
    "gemma3n_text": SLIDING_FULL | {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.5, 0.0]},
    "gemma4_text": SLIDING_FULL | {"hidden_size_per_layer_input": 8, "global_head_dim": 8},
    "gemma4_unified_text": SLIDING_FULL,
    "glm4_moe_lite": MLA,
    "glm_moe_dsa": MLA | INDEXED,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": MAMBA | LINEAR_FULL,
    "hy_v4": MLA | INDEXED,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0, "mamba_d_state": 8},
    "kimi_linear": MLA | LINEAR_FULL | {"linear_head_dim": 8, "linear_num_heads": 4},
    "kolibri1": SLIDING_FULL,
    "laguna": SLIDING_FULL,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"]},
    "longcat_flash": MLA | {"expert_ffn_hidden_size": 24, "moe_topk": 2, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    "mellum": SLIDING_FULL,
    "minicpm3": MLA,
    "ministral": SLIDING_FULL,
    "modernbert-decoder": SLIDING_FULL | {"pad_token_id": 0},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2},
    "olmo3": SLIDING_FULL,
    "qwen2_moe": {"shared_expert_intermediate_size": 24},
    "qwen3_5_moe_text": LINEAR_FULL | {"shared_expert_intermediate_size": 24},
    "qwen3_5_text": LINEAR_FULL,
    "qwen3_next": LINEAR_FULL | {"shared_expert_intermediate_size": 24},
    "qwen4_exp_text": LINEAR_FULL
    | {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
    | {"indexer_compress_ratio": 2, "hc_lowrank": 8, "shared_expert_intermediate_size": 24},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": WINDOW},
    "youtu": MLA,
    "zamba": HYBRID,
    "zamba2": HYBRID | {"n_mamba_heads": 8, "mamba_d_state": 8},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"], "router_hidden_size": 8},
}  # fmt: skip
# encoders, encoder-decoders, and models that need more than token ids
NO_DECODERS = """
    bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert cpmant data2vec-text
    electra ernie fuyu gemma3 gemma3n gemma4 gemma4_unified gemma4_assistant gemma4_unified_assistant git got_ocr2
    marian mbart megatron-bert mllama moshi moss_transcribe_diarize musicgen musicgen_melody mvp pegasus plbart
    prophetnet rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta xlm-roberta-xl
    xlnet xmod reformer blt dots3_note emu3 phi4_multimodal beam
"""
SAME_AS = "gpt-sw3 internlm3 iquestcoder llama4 qwen3_5 qwen3_5_moe qwen4_exp"  # as another one here


def families() -> list[str]:
    """Return the model types of the installed transformers that have a tiny config here."""
    left_out = {*NO_DECODERS.split(), *SAME_AS.split()}
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in left_out]


def tiny_config(family: str, **more: Any) -> PretrainedConfig:
    """Return a config of two layers, or as many as it takes to have each kind, 32 wide."""
    kind = type(AutoConfig.for_model(family))
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", {})}
    values = {name: value for name, value in COMMON.items() if name in known} | OWN.get(family, {}) | more
    config = kind(**values)
    assert isinstance(config, PretrainedConfig)
    return config


def tiny_model(config: PretrainedConfig, attention: str = "eager", seed: int = 0) -> PreTrainedModel:
    """Return an fp32 model whose norms, biases and other vectors are not what they are initialised with."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    assert isinstance(model, PreTrainedModel)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter += 0.1 * torch.randn_like(parameter)
            elif parameter.std() < 0.1:
                parameter.normal_(std=0.15)
    return model
