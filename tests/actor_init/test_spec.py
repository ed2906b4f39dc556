"""An actor's options have their defaults, and give what is computed from them."""

import math
from pathlib import Path
from typing import Any

import pytest

from actor_init.spec import ActorSpec, Attention, Dtype, Kernels, ParallelSpec, Routing


@pytest.mark.parametrize(
    ("typed", "lengths"),
    [
        (None, {1: 1, 129: 129}),
        ("128", {1: 128, 128: 128, 129: 256, 257: 384}),
        ("512,1024,2048", {1: 512, 512: 512, 513: 1024, 2048: 2048, 2049: None}),
        # The least that is long enough, in whatever order they were typed.
        ("2048,512,1024", {1: 512, 513: 1024, 1025: 2048, 2049: None}),
    ],
)
def test_a_row_is_padded_to_the_least_length_that_is_long_enough(
    typed: str | None, lengths: dict[int, int | None]
) -> None:
    spec = ActorSpec(pad_tokens=typed)
    assert {num_tokens: spec.find_padded_length(num_tokens) for num_tokens in lengths} == lengths


def test_defaults_are_for_what_was_not_typed_alone() -> None:
    given: dict[str, Any] = {
        "dtype": Dtype.FP16,
        "packing": False,
        "attention": Attention.EAGER.value,
        "kernels": Kernels.FUSED,
        "routing": Routing.RECORDED,
        "grad_accumulation": 3,
    }
    filled = ActorSpec().with_defaults(**given)
    assert {name: getattr(filled, name) for name in given} == given
    typed: dict[str, Any] = {
        "dtype": Dtype.FP32,
        "packing": True,
        "attention": Attention.SDPA.value,
        "kernels": Kernels.MODEL,
        "routing": Routing.LIVE,
        "grad_accumulation": 2,
    }
    kept = ActorSpec(**typed).with_defaults(**given)
    assert {name: getattr(kept, name) for name in typed} == typed
    plain = ActorSpec().with_defaults()
    assert (plain.dtype, plain.packing, plain.grad_accumulation, plain.optimizer) == (Dtype.BF16, True, 1, "adamw")


def test_a_user_s_model_is_neither_packed_nor_given_a_kernel() -> None:
    spec = ActorSpec(model="mine.py:build").with_defaults(packing=True, attention=Attention.SDPA.value)
    assert (spec.packing, spec.packs, spec.attention) == (False, False, Attention.AUTO)
    assert spec.custom_model == (Path("mine.py"), "build")


def test_a_limit_of_infinity_is_none_and_one_of_zero_is_kept() -> None:
    assert ActorSpec(max_norm=math.inf).with_defaults().max_norm is None
    assert ActorSpec(max_norm=0.0).with_defaults().max_norm == 0.0
    assert ActorSpec(max_norm=0.5).with_defaults().max_norm == 0.5


@pytest.mark.parametrize(
    ("values", "stage"),
    [
        ({}, 1),
        ({"optimizer": "none"}, 0),
        ({"zero_stage": 0}, 0),
        ({"zero_stage": 3, "optimizer": "none"}, 3),
        ({"backend": "fsdp2"}, 3),
        ({"backend": "fsdp2", "zero_stage": 2}, 2),
        ({"backend": "ddp"}, 0),
    ],
)
def test_what_is_sharded_is_what_was_typed_and_else_the_backend_s_default(values: dict[str, Any], stage: int) -> None:
    assert ActorSpec(**values).resolved_zero_stage == stage


@pytest.mark.parametrize(
    ("values", "lacks"),
    [
        ({}, False),
        ({"model": "mine.py:build"}, True),
        ({"model": "mine.py:build", "random_weights": True}, False),
        ({"model": "mine.py:build", "weights": Path("model.pt")}, False),
    ],
)
def test_weights_are_lacking_where_a_user_s_model_has_none(values: dict[str, Any], lacks: bool) -> None:
    assert ActorSpec(**values).lacks_weights is lacks


def test_a_user_s_optimizer_is_given_what_was_typed_and_others_their_defaults() -> None:
    assert ActorSpec(optimizer="mine.py:build", beta2=0.0).optimizer_settings == {"lr": 1e-6, "beta2": 0.0}
    assert ActorSpec(optimizer="mine.py:build", learning_rate=0.0).optimizer_settings == {"lr": 0.0}
    adamw = ActorSpec(beta2=0.0).optimizer_settings
    assert adamw == ActorSpec(optimizer="adamw", beta2=0.0).optimizer_settings
    assert adamw["betas"] == (0.9, 0.0)


def test_ranks_share_a_replica_in_ways_that_go_together() -> None:
    assert ParallelSpec(ring=2, ring_head_stride=1).ring_head_stride == 1
    assert ParallelSpec(tp=2, sequence_parallel=True).sequence_parallel
