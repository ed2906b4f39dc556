"""Rows padded on the left and given without position ids have the loss that the plain Hugging Face model gives them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from actor_init.action_log_probs import action_log_probs
from actor_init.inputs.packing import prepare_inputs
from actor_init.model import build_on_meta, find_model, materialise
from actor_init.model_positions import add_model_positions, counts_padding, has_column_positions
from actor_init.spec import ActorSpec, Dtype
from capture.file_format.micro_batch import IGNORED_LABEL, MicroBatch, Origin
from replay.objective.objective import compute_negated_mean

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    # With weights of this size another position gives another loss.
    "initializer_range": 0.3,
    "max_position_embeddings": 32,
}
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0}
NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
# Their settings, and whether they look columns up in a table. hunyuan_v1_dense has norms behind the rotation.
FAMILIES: dict[str, tuple[dict[str, Any], bool]] = {
    "gpt2": (GPT2, True),
    "gpt_bigcode": (GPT2, True),
    "gpt_neo": (NEO, True),
    "opt": (LLAMA | {"ffn_dim": 48, "word_embed_proj_dim": 32}, False),
    "biogpt": (LLAMA, True),
    "gptj": (GPT2 | {"rotary_dim": 4}, False),
    "codegen": (GPT2 | {"rotary_dim": 4}, False),
    "llama": (LLAMA, False),
    "ctrl": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "dff": 48, "resid_pdrop": 0.0}, True),
    "xglm": ({"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}, True),
    "hunyuan_v1_dense": (LLAMA | {"head_dim": 8}, True),
}


SEE_EACH_OTHER = [("opt", True), ("biogpt", True), ("xglm", True)]


def make_config(family: str) -> PretrainedConfig:
    return AutoConfig.for_model(family, **SMALL | FAMILIES[family][0])


def make_left_padded() -> MicroBatch:
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(1, 64, (3, 12), generator=generator)
    real_BS = torch.arange(12) >= torch.tensor([[0], [3], [5]])
    # The model would predict the first real token from padding.
    is_first_BS = real_BS & (real_BS.cumsum(dim=1) == 1)
    labels_BS = ids_BS.masked_fill(~real_BS | is_first_BS, IGNORED_LABEL)
    return MicroBatch(
        sequences_BS=ids_BS, attention_mask_BS=real_BS, labels_BS=labels_BS, trains=True, origin=Origin(source="here")
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_class_is_asked_which_positions_it_makes(family: str) -> None:
    assert has_column_positions(make_config(family)) is FAMILIES[family][1]


def test_a_recorded_config_is_asked_too_and_a_users_class_cannot_be() -> None:
    config = make_config("gpt2")
    assert counts_padding(config)
    assert counts_padding(config.to_dict())
    assert not counts_padding(make_config("llama").to_dict())
    assert not counts_padding({"model_type": "of mine", "n_embd": 32})


@pytest.mark.parametrize(
    ("family", "packing"),
    # the masks of OPT, BioGPT and XGLM do not read position ids: with any kernel but varlen packed rows see each other
    [(family, packing) for family in FAMILIES for packing in (False, True) if (family, packing) not in SEE_EACH_OTHER],
)
def test_left_padded_rows_have_the_model_s_own_loss(family: str, packing: bool) -> None:
    spec = ActorSpec(packing=packing, dtype=Dtype.FP32)
    source = find_model(spec, make_config(family).to_dict(), "test")
    batch = make_left_padded()
    losses: list[float] = []
    for _ in range(2):
        model = build_on_meta(source.config, attention="eager", dtype=torch.float32).eval()
        materialise(model, source.weights, CPU)
        with torch.no_grad():
            if not losses:
                answer = model(
                    input_ids=batch.sequences_BS, attention_mask=batch.attention_mask_BS.long(), labels=batch.labels_BS
                )
                losses.append(answer.loss.item())
            else:
                inputs = prepare_inputs(add_model_positions(batch, source.config), packing=packing)
                losses.append(compute_negated_mean(action_log_probs(model, inputs), inputs).item())
    # In fp32, added in other orders.
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_positions_that_were_given_and_a_trainer_s_own_actor_are_left_as_they_are() -> None:
    batch = make_left_padded()
    positions = {"position_ids": batch.attention_mask_BS.long().cumsum(dim=1)}
    with_positions = replace(batch, extra_tensors=positions)
    actor_s = replace(batch, labels_BS=None, action_mask_BA=batch.attention_mask_BS[:, 1:])
    for unchanged in (with_positions, actor_s):
        assert add_model_positions(unchanged, make_config("gpt2")) is unchanged
    # Here the model itself was called, and the mask is the loop's.
    noted = replace(actor_s, has_noted_mask=True)
    for changed in (batch, noted):
        assert (
            add_model_positions(changed, make_config("gpt2")).extra_tensors["position_ids"].tolist()
            == [list(range(12))] * 3
        )
