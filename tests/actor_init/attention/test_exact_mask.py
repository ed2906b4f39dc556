"""A model sees what a table says, in every layer, and only within the context."""

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from actor_init.attention.exact_mask import MaskTable, see_exactly

LENGTH = 7
PLACE_S = torch.arange(LENGTH)
CAUSAL_BSS = (PLACE_S[None, :] <= PLACE_S[:, None])[None]


def make_model(kernel: str, **settings: object) -> AutoModelForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.5}
    config = AutoConfig.for_model("mistral", **sizes, **heads, use_cache=False, **{"sliding_window": None, **settings})
    return AutoModelForCausalLM.from_config(config, attn_implementation=kernel)


def compute_logits(
    model: AutoModelForCausalLM, table: MaskTable | None = None, mask_BS: Tensor | None = None
) -> Tensor:
    ids_BS = torch.arange(3, 3 + LENGTH)[None]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), see_exactly(table):
        logits: Tensor = model(input_ids=ids_BS, attention_mask=mask_BS).logits
    return logits


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", ["sdpa", "eager", "flex_attention"])
def test_the_usual_table_changes_nothing_and_another_does(kernel: str) -> None:
    model = make_model(kernel)
    usual = compute_logits(model)

    torch.testing.assert_close(compute_logits(model, MaskTable(visible_BSS=CAUSAL_BSS)), usual)
    seen_all = compute_logits(model, MaskTable(visible_BSS=torch.ones_like(CAUSAL_BSS)))
    assert float((seen_all - usual).abs().max()) > 0.01
    torch.testing.assert_close(compute_logits(model), usual)


def test_a_table_stands_for_the_padding_mask_too() -> None:
    model, mask_BS = make_model("sdpa"), (PLACE_S >= 2)[None].long()
    padded = compute_logits(model, mask_BS=mask_BS)
    visible_BSS = CAUSAL_BSS & mask_BS[:, None].bool() | torch.eye(LENGTH, dtype=torch.bool)

    by_table = compute_logits(model, MaskTable(visible_BSS=visible_BSS), mask_BS)

    torch.testing.assert_close(by_table[:, 2:], padded[:, 2:])
    seen = compute_logits(model, MaskTable(visible_BSS=CAUSAL_BSS), mask_BS)
    torch.testing.assert_close(seen, compute_logits(model))


@pytest.mark.parametrize(
    ("change", "window"),
    [({}, 3), ({"ignores_window": True}, None), ({"window_change": 1}, 4), ({"window_change": -1}, 2)],
)
def test_a_sliding_window_stays_or_changes(change: dict[str, int], window: int | None) -> None:
    model = make_model("sdpa", sliding_window=3)

    found = compute_logits(model, MaskTable(visible_BSS=CAUSAL_BSS, **change))  # type: ignore[arg-type]

    torch.testing.assert_close(found, compute_logits(make_model("sdpa", sliding_window=window)))
