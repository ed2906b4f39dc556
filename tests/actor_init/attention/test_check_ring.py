"""A model may be cut into slices if its tokens meet in the attention that a ring kernel replaces, and nowhere else."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from actor_init.attention.kernels import register
from actor_init.attention.ring_attention import check_ring
from actor_init.spec import UsageError
from tests.helpers.families import tiny_config, tiny_model

CPU = torch.device("cpu")


def open_model(config: PretrainedConfig) -> Any:
    register()
    return tiny_model(config, "ring_gathered")


def check(model: Callable[..., Any], config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> None:
    check_ring(model, config, dtype, CPU)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mistral", "qwen3_moe"])
def test_a_model_whose_tokens_meet_in_its_attention_is_taken(family: str) -> None:
    config = tiny_config(family)
    check(open_model(config), config)


def add_past(share: float) -> Callable[..., Any]:
    """A Llama, in which each token also gets a share of what the tokens before it have, as from a recurrent state."""
    model = open_model(tiny_config("llama"))

    def call(**arguments: Any) -> Any:
        logits = model(**arguments).logits
        return SimpleNamespace(logits=logits + share * logits.cumsum(dim=1))

    return call


def test_a_token_that_another_one_changes_elsewhere_is_seen_beyond_rounding() -> None:
    config = tiny_config("llama")
    for share, dtype in ((1e-3, torch.float32), (0.1, torch.bfloat16)):
        with pytest.raises(UsageError, match=r"meet outside of the attention .* Try: ring=1"):
            check(add_past(share), config, dtype)
    # This is within what bf16 rounds, and fp32 does not.
    check(add_past(1e-3), config, torch.bfloat16)
    check(add_past(0.0), config)


def test_a_window_that_the_kernel_is_not_told_of_is_seen_though_one_layer_alone_has_it() -> None:
    """A Llama does not tell its kernel of a window; its config stands for that of a model with a mask of its own."""
    llama = open_model(tiny_config("llama"))
    for layer_types in (["full_attention", "sliding_attention"], ["sliding_attention"] * 2):
        with pytest.raises(UsageError, match="its sliding window is in a mask of its own"):
            check(llama, tiny_config("qwen2", layer_types=layer_types))
    check(llama, tiny_config("qwen2", layer_types=["full_attention"] * 2))
    with pytest.raises(UsageError, match="its sliding window is in a mask of its own"):
        check(llama, tiny_config("mistral"))
    check(llama, tiny_config("mistral", sliding_window=None))


def test_chunked_attention_has_no_ring() -> None:
    config = tiny_config("llama4_text")
    assert "chunked_attention" in config.layer_types
    with pytest.raises(UsageError, match="its chunked attention has no ring kernel"):
        check(open_model(tiny_config("llama")), config)


def test_what_the_kernel_is_given_besides_is_named() -> None:
    config = tiny_config("llama")
    model = open_model(config)
    with pytest.raises(UsageError, match="its attention needs bias and slopes, which no ring kernel takes"):
        check(lambda **arguments: model(**arguments, slopes=torch.ones(2), bias=torch.ones(2)), config)


def test_a_model_that_never_calls_the_kernel_or_fails_with_it_is_refused_with_the_reason() -> None:
    config = tiny_config("llama")
    plain: Any = tiny_model(config, "eager")
    embedding = plain.model.embed_tokens
    with pytest.raises(UsageError, match="its layers have no attention that can be replaced"):
        check(lambda **arguments: SimpleNamespace(logits=plain.lm_head(embedding(arguments["input_ids"]))), config)

    def fail(message: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            raise TypeError(message)

        return call

    with pytest.raises(UsageError, match="its layers do not tell their attention of the slice"):
        check(fail("kernel() missing 1 required keyword-only argument: 'ring'"), config)
    with pytest.raises(UsageError, match=r"its layers cannot run on a slice \(TypeError: no\)"):
        check(fail("no\nand more"), config)
