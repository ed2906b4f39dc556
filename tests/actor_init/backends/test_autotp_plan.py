"""What AutoTP splits is known before it does, and the norm over its ranks counts each gradient once.

The slow tests of `test_deepspeed_autotp.py` replay with it.
"""

from typing import Any

import pytest
import torch
from torch import nn

from actor_init.backends.deepspeed_autotp import (
    check_autotp,
    compute_norm_over_tp,
    list_split_linears,
    mark_split_gradients,
)
from actor_init.spec import ParallelSpec, UsageError
from actor_init.world import World
from tests.actor_init.parallel.test_tp_plan import model_of
from tests.helpers.thread_ranks import run_with_groups

IN_LAYER = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]


@pytest.mark.parametrize("tied", [False, True])
def test_each_linear_of_the_plan_is_split_but_for_a_head_that_is_the_embedding(tied: bool) -> None:
    model = model_of("llama", tie_word_embeddings=tied)
    if tied:
        model.tie_weights()
    names = {id(module): name for name, module in model.named_modules()}
    in_second = [names[id(module)] for module in list_split_linears(model, "model.layers.1")]
    assert in_second == [f"model.layers.1.{name}" for name in IN_LAYER]
    everywhere = [names[id(module)] for module in list_split_linears(model, "")]
    assert len(everywhere) == 2 * len(IN_LAYER) + (not tied)
    assert ("lm_head" in everywhere) is not tied


def name_style(model: Any, pattern: str, style: str | None) -> None:
    """Give a pattern of the model's plan another style; None: none."""
    plan = {key: value for key, value in model.tp_plan.items() if key != pattern}
    model.tp_plan = plan if style is None else {**plan, pattern: style}


def test_a_model_whose_plan_is_whole_is_split() -> None:
    check_autotp(model_of("llama"), 2)
    check_autotp(model_of("qwen3"), 2)


@pytest.mark.parametrize(
    ("pattern", "style", "why"),
    [
        ("model.layers.*.self_attn.q_proj", "packed_colwise", "it does not know the style packed_colwise"),
        ("model.layers.*.self_attn.q_proj", None, "what becomes of model.layers.0.self_attn.q_proj.weight"),
        ("model.layers.*.self_attn.q_norm", None, "what becomes of model.layers.0.self_attn.q_norm.weight"),
        ("model.layers.*.self_attn.q_norm", "colwise", "model.layers.0.self_attn.q_norm is a Qwen3RMSNorm"),
        ("model.layers.*.self_attn", "replicated_with_grad_allreduce", "has other parameters"),
    ],
)
def test_a_plan_with_a_gap_is_refused_for_several_ranks_alone(pattern: str, style: str | None, why: str) -> None:
    model = model_of("qwen3")
    name_style(model, pattern, style)
    check_autotp(model, 1)
    with pytest.raises(UsageError, match=why):
        check_autotp(model, 2)


def make_part(rank: int) -> nn.ParameterList:
    """A rank's parameters with gradients: two that are split, of which it has its own parts, and two that it shares."""
    sizes = (3, 4, 5, 6)
    parameters = nn.ParameterList([torch.zeros(size) for size in sizes])
    for number, parameter in enumerate(parameters):
        is_split = number < 2
        parameter.grad = torch.full_like(parameter, 1.0 + number + 10 * rank * is_split)
        if is_split:
            parameter.tensor_model_parallel = True
    return parameters


def test_all_parts_of_split_gradients_are_in_the_norm_and_whole_ones_once() -> None:
    def compute(world: World) -> tuple[float, list[bool]]:
        part = make_part(world.rank)
        mark_split_gradients(part)
        norm = float(compute_norm_over_tp(part, world.mesh.get_group("tp")))
        return norm, [hasattr(parameter.grad, "tensor_model_parallel") for parameter in part]

    squares = sum(3 * (1 + 10 * rank) ** 2 + 4 * (2 + 10 * rank) ** 2 for rank in range(3)) + 5 * 3**2 + 6 * 4**2
    for norm, marks in run_with_groups(compute, 3, ParallelSpec(tp=3)):
        assert norm == pytest.approx(squares**0.5)
        assert marks == [True, True, False, False]
