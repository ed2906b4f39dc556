"""A setting excuses numbers that differ only if a causal LM of that config makes them a matter of chance."""

from typing import Any

import pytest
from transformers import AutoConfig

from actor_init.dropout_settings import find_acting_dropouts
from actor_init.model import to_plain_config

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("family", "settings", "acting"),
    [
        # summary_first_dropout is 0.1 here, and belongs to another head.
        ("gpt2", {"resid_pdrop": 0.0}, ["attn_pdrop", "embd_pdrop"]),
        ("gpt2", {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}, []),
        ("llama", {"attention_dropout": 0.1, "classifier_dropout": 0.2}, ["attention_dropout"]),
        ("opt", {"dropout": 0.0, "layerdrop": 0.1, "ffn_dim": 48, "word_embed_proj_dim": 32}, ["layerdrop"]),
        ("mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise"]),
        # Its layers read this one from the config in each forward.
        ("falcon", {"hidden_dropout": 0.1}, ["hidden_dropout"]),
        ("qwen2", {}, []),
    ],
)
def test_the_model_is_asked_which_settings_act(family: str, settings: dict[str, Any], acting: list[str]) -> None:
    config = to_plain_config(AutoConfig.for_model(family, **SMALL | settings))
    assert find_acting_dropouts(config) == acting


def test_all_settings_count_of_a_model_that_is_not_known() -> None:
    assert find_acting_dropouts({"model_type": "nobody_s", "dropout": 0.1, "hidden_size": 3}) == ["dropout"]
    assert find_acting_dropouts({"attention_dropout": 0.1, "resid_pdrop": 0.0}) == ["attention_dropout"]
