"""Whose tensor parallel plan is taken, and what is refused for want of a complete one."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from actor_init.parallel.tensor_parallel import check_divisible, check_sequence
from actor_init.parallel.tp_plan import BUILTIN_SPLITS, Split, find_plan
from actor_init.spec import TpPlan, UsageError
from tests.helpers.sharded import SIZES

FAMILIES = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"]


def model_of(model_type: str, **values: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **values}))
    assert isinstance(model, PreTrainedModel)
    return model


def without(model: PreTrainedModel, *endings: str) -> PreTrainedModel:
    """`model`, whose own plan no longer has the patterns with these endings."""
    model.tp_plan = {pattern: style for pattern, style in model.tp_plan.items() if not pattern.endswith(endings)}
    return model


@pytest.mark.parametrize("model_type", FAMILIES)
def test_our_plan_and_the_model_s_own_split_the_same(model_type: str) -> None:
    model = model_of(model_type)
    own, builtin = find_plan(model, TpPlan.MODEL), find_plan(model, TpPlan.BUILTIN)
    assert own.splits == builtin.splits
    assert len(own.splits) == 2 * (9 if model_type in ("qwen3", "gemma3_text") else 7)
    assert own.origin == f"transformers' for {type(model).__name__}"
    assert builtin.origin == f"builtin for {model_type}"
    assert find_plan(model, TpPlan.AUTO) == own


@pytest.mark.parametrize("missing", ["o_proj", "q_norm", "lm_head"])
def test_an_incomplete_plan_of_the_model_gives_way_to_ours(missing: str) -> None:
    model = without(model_of("qwen3"), missing)
    assert find_plan(model, TpPlan.AUTO) == find_plan(model, TpPlan.BUILTIN)
    with pytest.raises(UsageError, match=rf"leaves out .*{missing}.*Try: tp_plan='builtin'"):
        find_plan(model, TpPlan.MODEL)


@pytest.mark.parametrize("wanted", [TpPlan.AUTO, TpPlan.BUILTIN])
def test_a_model_built_like_llama_gets_the_fallback_which_says_so(wanted: TpPlan) -> None:
    plan = find_plan(model_of("stablelm"), wanted)
    assert plan.origin == "Llama-style fallback, not made for stablelm"
    assert {name.split(".", 3)[3]: split for name, split in plan.splits.items()} == {
        name: split for name, split in BUILTIN_SPLITS.items() if split is not Split.PER_HEAD
    }


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("gpt2", r"leaves out transformer.h.0.attn.c_attn \(Conv1D\)"),
        ("gpt_bigcode", r"leaves out transformer.h.0.attn.c_attn \(Linear\)"),
        ("qwen3_moe", r"leaves out model.layers.0.mlp.experts"),
        ("olmo2", r"takes model.layers.0.self_attn.q_norm \(Olmo2RMSNorm\) for one of 8 elements a head"),
    ],
)
@pytest.mark.parametrize("wanted", [TpPlan.MODEL, TpPlan.BUILTIN])
def test_a_plan_that_does_not_fit_is_refused_where_it_was_asked_for(
    model_type: str, expected: str, wanted: TpPlan
) -> None:
    with pytest.raises(UsageError, match="Try: tp_plan='auto'") as refusal:
        find_plan(model_of(model_type), wanted)
    if wanted is not TpPlan.MODEL:
        refusal.match(expected)


@pytest.mark.parametrize(
    ("model_type", "sizes", "expected"),
    [
        ("gpt2", {}, {"attn.c_attn": Split.GATHERED, "attn.c_proj": Split.GATHERED}),
        (
            "qwen3_moe",
            {},
            {"self_attn.o_proj": Split.ROWS, "self_attn.q_norm": Split.PER_HEAD, "mlp.experts": Split.EXPERTS},
        ),
        ("olmo2", {}, {"self_attn.q_proj": Split.GATHERED, "mlp.up_proj": Split.COLUMNS, "mlp.down_proj": Split.ROWS}),
        ("phi3", {}, {"self_attn.qkv_proj": Split.GATHERED, "mlp.gate_up_proj": Split.GATHERED}),
        ("llama4_text", {}, {"self_attn.q_proj": Split.COLUMNS, "feed_forward.experts": Split.EXPERT_ROWS}),
        # Heads, or a width, that two ranks cannot share.
        ("qwen3_moe", {"num_key_value_heads": 1}, {"self_attn.q_proj": Split.GATHERED, "mlp.experts": Split.EXPERTS}),
        ("qwen3_moe", {"num_attention_heads": 3, "num_key_value_heads": 3}, {"self_attn.o_proj": Split.GATHERED}),
        ("olmo2", {"intermediate_size": 49}, {"mlp.up_proj": Split.GATHERED, "mlp.down_proj": Split.GATHERED}),
    ],
)
def test_what_no_plan_fits_is_split_by_parts(
    model_type: str, sizes: dict[str, int], expected: dict[str, Split]
) -> None:
    plan = find_plan(model_of(model_type, **sizes), TpPlan.AUTO, 2)
    first = {name.split(".", 3)[3]: split for name, split in plan.splits.items() if ".0." in name}
    assert first.items() >= expected.items(), first
    assert plan.origin.startswith("mixed for ")


def test_a_style_that_is_not_known_is_named() -> None:
    with pytest.raises(UsageError, match=r"gives model\.layers\.0\.self_attn\.q_proj the style colwise_gather_output"):
        find_plan(model_of("olmo2"), TpPlan.MODEL)


def test_a_head_that_is_no_linear_is_refused() -> None:
    model = model_of("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(UsageError, match="needs an Embedding and a Linear head, not Embedding and Sequential"):
        find_plan(model, TpPlan.AUTO)


@pytest.mark.parametrize(
    ("sizes", "tp", "ways_out"),
    [({}, 4, "1, 2"), ({"num_key_value_heads": 1}, 2, "1"), ({"intermediate_size": 49}, 2, "1")],
)
def test_sizes_that_tp_does_not_divide_are_refused(sizes: dict[str, int], tp: int, ways_out: str) -> None:
    with pytest.raises(UsageError, match=f"Try: tp with one of {ways_out}$"):
        check_divisible(model_of("llama", **sizes).config, tp)


def test_a_norm_inside_attention_is_no_part_of_the_residual_stream() -> None:
    model = model_of("llama")
    model.model.layers[1].self_attn.sub_norm = nn.LayerNorm(SIZES["hidden_size"])
    with pytest.raises(UsageError, match=r"needs a plan that splits all of a layer.*Try: sequence_parallel=False"):
        check_sequence(model, find_plan(model, TpPlan.AUTO), packing=True)


def test_several_rows_along_the_sequence_need_a_torch_that_gathers_them_in_one_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama")
    plan = find_plan(model, TpPlan.AUTO)
    monkeypatch.setattr("torch.__version__", "2.12.1")
    check_sequence(model, plan, packing=True)
    with pytest.raises(UsageError, match=r"needs torch 2.13, and this is 2.12.1. Try: packing=True"):
        check_sequence(model, plan, packing=False)
    monkeypatch.setattr("torch.__version__", "2.13.0+cpu")
    check_sequence(model, plan, packing=False)
