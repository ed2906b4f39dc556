"""The loss of a mixture's routers is computed where the job's loss held it, and a wrong coefficient is found."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import MixtralConfig, MixtralForCausalLM

from actor_init.routes import PassRoutes, steer_routers
from capture import recording
from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import Origin
from replay.command_line.cli import main
from replay.objective.router_loss import (
    RouterLossTerm,
    TrainingLoopLoss,
    asks_for_router_loss,
    computes_router_loss,
    find_router_loss,
)
from tests.helpers.families import RELEASE, tiny_config, tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "router_aux_loss_coef": 0.5,
    "sliding_window": None,
}


@pytest.mark.parametrize(
    ("in_config", "in_call", "is_computed"),
    [
        (True, None, True),
        (False, None, False),
        # What the call says goes before the config.
        (True, False, False),
        (False, True, True),
    ],
)
def test_a_call_says_before_the_config_whether_the_routers_loss_is_computed(
    in_config: bool, in_call: bool | None, is_computed: bool
) -> None:
    config = MixtralConfig(**SIZES, output_router_logits=in_config)
    facts = {} if in_call is None else {"output_router_logits": in_call}
    ids_BS = torch.ones(1, 4, dtype=torch.int64)
    known: dict[str, Any] = {"call_facts": facts, "left_out": {}, "origin": Origin(source=""), "trains": True}
    labelled = CapturedCall(tensors={"input_ids": ids_BS, "labels": ids_BS}, **known)
    unlabelled = CapturedCall(tensors={"input_ids": ids_BS}, **known)
    assert computes_router_loss(labelled, config) is computes_router_loss(unlabelled, config) is is_computed
    # Without labels there is no loss that it could be added to.
    assert (asks_for_router_loss(labelled, config), asks_for_router_loss(unlabelled, config)) == (is_computed, False)


def record_job(
    home: Path, *, in_config: bool = True, coefficient: float | None = None, **in_call: Any
) -> MixtralForCausalLM:
    """Record one pass; `coefficient` is what the job multiplies the routers' loss by, whatever its config says."""
    torch.manual_seed(0)
    model: Any = MixtralForCausalLM(MixtralConfig(**SIZES, output_router_logits=in_config))
    model.config.save_pretrained(home / "model")
    save_file(model.state_dict(), home / "model" / "model.safetensors")  # not under the names of older releases
    if coefficient is not None:
        model.router_aux_loss_coef = coefficient
    ids_BS = torch.randint(64, (2, 12))
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[0, 8:] = 0
    labels_BS = ids_BS.masked_fill(mask_BS == 0, -100)
    with recording(model, home / "captures", reproduce=True):
        model(input_ids=ids_BS, attention_mask=mask_BS, labels=labels_BS, **in_call).loss.backward()
    return cast(MixtralForCausalLM, model)


def record_own_loss(home: Path, *, adds: bool, notes: bool) -> None:
    """Record a step of a loop that computes the cross entropy itself, and may add the routers' loss, and note all."""
    torch.manual_seed(0)
    model: Any = MixtralForCausalLM(MixtralConfig(**SIZES, output_router_logits=True))
    model.config.save_pretrained(home / "model")
    save_file(model.state_dict(), home / "model" / "model.safetensors")
    ids_BS = torch.randint(64, (2, 12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, home / "captures", reproduce=True) as recorder:
        output = model(input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS))
        loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())
        if adds:
            loss = loss + 0.5 * output.aux_loss
        if notes:
            recorder.note(loss=loss)
        loss.backward()
        optimizer.step()


def replay_job(home: Path, *typed: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the verdict, and the line of the pass."""
    command = ["--inputs", home / "captures", "--model", home / "model", "--log-folder", home / "logs"]
    main([*map(str, command), "--dtype", "fp32", "--backend", "ddp", "--loss", "sft", *typed])
    [run] = (home / "logs").glob("*/run.json")
    line = (run.parent / "rank0.jsonl").read_text().splitlines()[0]
    return json.loads(run.read_text())["verdict"], json.loads(line)


@pytest.mark.parametrize("typed", [(), ("--no-packing",), ("--pad-tokens", "64"), ("--gradient-checkpointing",)])
def test_the_routers_loss_is_computed_over_the_real_tokens(
    typed: tuple[str, ...], tmp_path: Path, one_world: None
) -> None:
    record_job(tmp_path)
    verdict, line = replay_job(tmp_path, *typed)
    assert verdict["outcome"] == "REPRODUCED"
    [loss] = [finding for finding in verdict["worst"] if finding["name"] == "loss"]
    assert loss["difference"] < 1e-6
    assert line["router_loss"] == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize(
    ("in_config", "in_call", "has_term"),
    [
        (True, {"output_router_logits": False}, False),
        (False, {}, False),
        (False, {"output_router_logits": True}, True),
        (True, {"num_items_in_batch": 30}, True),
    ],
)
def test_the_loss_holds_it_where_the_job_asked_for_it(
    in_config: bool, in_call: dict[str, Any], has_term: bool, tmp_path: Path, one_world: None
) -> None:
    record_job(tmp_path, in_config=in_config, **in_call)
    verdict, line = replay_job(tmp_path)
    assert verdict["outcome"] == "REPRODUCED"
    assert (line["router_loss"] is not None) is has_term


def test_a_wrong_coefficient_differs(tmp_path: Path, one_world: None) -> None:
    record_job(tmp_path, coefficient=0.4)
    verdict, _ = replay_job(tmp_path)
    assert verdict["outcome"] == "DIFFERS"
    differing = {finding["name"] for finding in verdict["first"]["findings"] if finding["status"] == "differs"}
    assert differing == {"loss"}


def test_where_it_cannot_be_computed_the_loss_is_not_said_to_differ(
    tmp_path: Path, one_world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.objective.router_loss._list_recorders", lambda model: [])
    record_job(tmp_path)
    verdict, line = replay_job(tmp_path)
    assert (verdict["outcome"], line["router_loss"]) == ("UNSETTLED", None)
    assert "which the replay does not compute: which logits the model takes is not known" in verdict["reason"]


# Which logits these take is known since they record them as the others do.
LATER_FAMILIES = ["granitemoe", "dbrx"] if RELEASE >= (5, 23) else []


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "gpt_oss", "jetmoe", "phimoe", *LATER_FAMILIES])
def test_the_term_is_what_the_model_adds(family: str) -> None:
    config = tiny_config(family)
    name = "aux_loss_coef" if family == "jetmoe" else "router_aux_loss_coef"
    model = tiny_model(tiny_config(family, **{name: 0.3} if hasattr(config, name) else {})).eval()
    router_loss = find_router_loss(model)
    assert router_loss is not None
    assert router_loss.why_not_computable is None
    ids_BS = torch.tensor([[3, 5, 9, 7, 4], [3, 3, 6, 0, 0]])
    mask_BS = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with torch.no_grad(), steer_routers(model, PassRoutes(logits_index=router_loss.logits_index)) as states:
        output: Any = model(input_ids=ids_BS, attention_mask=mask_BS, output_router_logits=True)
        term = RouterLossTerm(loss=router_loss, is_real_T=mask_BS.flatten() > 0).compute(states)
    assert float(term) == pytest.approx(router_loss.coefficient * float(output.aux_loss), rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "llama4_text"])
def test_a_family_that_adds_none_has_none(family: str) -> None:
    assert find_router_loss(tiny_model(tiny_config(family))) is None


@pytest.mark.parametrize("divisor", [1, 4])
@pytest.mark.parametrize(("is_divided", "share"), [(True, 1.0), (False, 1.0), (True, 0.0), (False, 0.0)])
def test_a_noted_loss_tells_whether_it_holds_the_routers_loss(divisor: int, is_divided: bool, share: float) -> None:
    """The job's loss is computed by torch's own cross entropy, noted before or after it is divided."""
    torch.manual_seed(0)
    logits_NV, targets_N = torch.randn(12, 8), torch.randint(8, (12,))
    term = torch.tensor(0.04)
    job_loss = F.cross_entropy(logits_NV, targets_N) + share * term
    noted = float(job_loss / divisor if is_divided else job_loss)
    log_probs_BA = logits_NV.log_softmax(-1).gather(-1, targets_N[:, None]).view(3, 4).requires_grad_()
    loss = -(log_probs_BA / 12 / divisor).sum()
    found = TrainingLoopLoss(noted_value=noted, bound=1e-5).find_factor(loss, log_probs_BA, term)
    assert float(found) == pytest.approx(share / divisor)


@pytest.mark.parametrize(
    ("value", "bound"),
    [
        # Of another formula, of a coefficient that is not the config's, and of a rounding as large as the term.
        (-0.7, 1e-5),
        (2.02, 1e-5),
        (2.04, 0.02),
        (None, 1e-5),
    ],
)
def test_a_noted_loss_that_fits_neither_tells_nothing(value: float | None, bound: float) -> None:
    log_probs_BA = torch.full((2, 4), -2.0, requires_grad=True)
    found = TrainingLoopLoss(noted_value=value, bound=bound).find_factor(
        -log_probs_BA.mean(), log_probs_BA, torch.tensor(0.04)
    )
    assert found.isnan()


@pytest.mark.parametrize(
    ("adds", "notes", "outcome"),
    [(True, True, "REPRODUCED"), (False, True, "REPRODUCED"), (False, False, "REPRODUCED"), (True, False, "UNSETTLED")],
)
def test_the_routers_loss_of_a_loop_s_own_loss_is_added_where_it_was_noted(
    adds: bool, notes: bool, outcome: str, tmp_path: Path, one_world: None
) -> None:
    """A sound job that notes nothing is not blamed for a routers' loss that nobody told of."""
    record_own_loss(tmp_path, adds=adds, notes=notes)
    verdict, line = replay_job(tmp_path, "--loss", "recorded")
    assert verdict["outcome"] == outcome
    assert (line["router_loss"] is not None) is (adds and notes)
