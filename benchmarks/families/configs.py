"""Tiny configs of the causal LM families that the installed transformers has, each with all that marks its family.

A window, chunk or state is shorter than the longest document, so that a wrong one shows; each width is a multiple of
the ranks that share it.
"""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.helpers.families import NO_DECODERS, SAME_AS

VOCABULARY = 96
WINDOW = 4
# The last four have no tiny config here, or read other things than tokens; BEAM has one.
OTHERS = {*NO_DECODERS.split(), *SAME_AS.split(), "cohere_compass_text", "dbrx", "dots3_note_text", "qwen4_exp_text"}
OTHERS -= {"beam"}
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_seq_len": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "num_dense_layers": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "rotary_dim": 8,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
    "state_size": 8,
    "chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "tie_word_embeddings": False,
}
# what makes a model's numbers differ from call to call
RANDOM = ("drop", "jitter", "noise")
MLA: Mapping[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
INDEXED: Mapping[str, Any] = {**MLA, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
GEMMA4: Mapping[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "per_layer_config": {},
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
MAMBA: Mapping[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3"), MLA),
    "longcat_flash": {**MLA, "num_layers": 1, "num_hidden_layers": 2, "zero_expert_num": 2, "ffn_hidden_size": 48},
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), INDEXED),
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "bailing_hybrid": {**MLA, "n_group": 1, "topk_group": 1, "num_expert_group": 1, "linear_num_heads": 4},
    "biogpt": {"tie_word_embeddings": True},
    "ctrl": {"dff": 48},
    "deepseek_v4": {"num_key_value_heads": 1, "qk_rope_head_dim": 4, "o_groups": 2, "o_lora_rank": 8},
    "dots3_note_text": {"per_layer_config": {}},
    "falcon": {"head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
    },
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), GEMMA4),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": WINDOW, "num_heads": 4},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 16,
    },
    "jamba": {
        "layer_types": None,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {**MLA, "linear_num_heads": 4, "linear_head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"intermediate_size": 64},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1},
    "modernbert-decoder": {
        "layer_types": ["full_attention", "sliding_attention"],
        "pad_token_id": 0,
        "local_attention": WINDOW,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "moe_shared_expert_intermediate_size": 16,
    },
    "recurrent_gemma": {"layer_types": None, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": WINDOW},
    "xlstm": {
        "chunk_size": 1,
        "v_head_dim": None,
        "qk_head_dim": None,
        "num_heads": 4,
        "num_blocks": 2,
        "mode": "train",
    },
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_key_value_heads": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_key_value_heads": 4,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "adapter_rank": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def families() -> list[str]:
    """Return the families by model_type, in transformers' order."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in OTHERS]


def tiny_config(family: str) -> PretrainedConfig:
    """Return a config of two layers, of which no number is random."""
    kind = CONFIG_MAPPING[family]
    default = kind()
    given = FAMILIES.get(family, {})
    known = default.to_dict().keys() | default.attribute_map.keys()
    values = {name: value for name, value in SIZES.items() if name in known}
    for name, value in default.to_dict().items():
        if any(word in name for word in RANDOM) and isinstance(value, float):
            values[name] = 0.0
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or []))
    if len(kinds) > 1:
        values |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    values |= given
    return kind(**{name: value for name, value in values.items() if value is not None or name == "pad_token_id"})
