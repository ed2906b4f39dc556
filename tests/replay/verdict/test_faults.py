"""The verdict on jobs with a planted fault, and on sound ones beside them: it neither reassures nor accuses wrongly."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from capture import recording
from capture.record.gradient_signer import GradientSigner
from replay.command_line.cli import main as replay_main
from replay.tolerances.job_bounds import (
    GRAD_NORM,
    GRADIENT,
    GRADIENT_NORMS,
    GRADIENT_RMS,
    HIDING_BOUND,
    TOKENS_RMS,
)
from replay.verdict.recorded_pass import WEIGHTING
from tests.broken_jobs.models import make_model
from tests.trainers.common import make_batches

DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
SGD_STEPS = ("--step", "--optimizer", "sgd", "--learning-rate")


def become_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Let what is recorded next be of this rank of two, in the one recording of a job."""
    monkeypatch.setattr("capture.record.recorder.read_rank_and_world_size", lambda: (rank, 2))
    began = "2026-11-25T12:00:00.000000+00:00"
    monkeypatch.setattr("capture.record.recorder.choose_recording_id", lambda *_, **__: began)


def model_loss(outputs: Any, labels: Tensor) -> Tensor:
    loss: Tensor = outputs.loss
    return loss


def own_loss(outputs: Any, labels: Tensor) -> Tensor:
    """The model's loss, computed once more from its logits, as trainers with a loss of their own do."""
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def smoothed_loss(outputs: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), label_smoothing=0.2)


def train(
    folder: Path,
    model: Any,
    *,
    fault: Callable[[Any], object] | None = None,
    autocast: bool = False,
    accumulation: int = 1,
    num_steps: int = 2,
    learning_rate: float = 0.0,
    max_norm: float | None = 1e6,
    loss_of: Callable[[Any, Tensor], Tensor] = model_loss,
    rank: int = 0,
) -> Path:
    """Train by SGD under a recording. The weights that the job began with are in `folder/model`.

    fault     is given the model once its weights were saved
    max_norm  None: gradients are not clipped, so that no norm is recorded
    """
    if rank == 0:
        model.save_pretrained(folder / "model")
    model.train()
    if fault is not None:
        fault(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    batches = make_batches(num_steps * accumulation, of_rank=rank)
    with recording(model, folder / "captures", reproduce=True):
        for number, batch in enumerate(batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model(**batch), batch["labels"]) / accumulation
            loss.backward()
            if number % accumulation < accumulation - 1:
                continue
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return folder


def verdict_on(job: Path, logs: Path, *typed: str) -> Any:
    """Return run.json's verdict on a replay of the job from its own weights."""
    command = ["--inputs", str(job / "captures"), "--model", str(job / "model"), "--log-folder", str(logs)]
    assert replay_main([*command, "--loss", "sft", "--backend", "fsdp2", *typed]) == 0
    [run] = logs.glob("*/run.json")
    return json.loads(run.read_text())["verdict"]


def headline(printed: str) -> str:
    [line] = [line for line in printed.splitlines() if line.startswith("verdict ")]
    return line.removeprefix("verdict").strip()


def detached(name: str) -> Callable[[Any], object]:
    return lambda model: model.get_submodule(name).register_forward_hook(lambda _, __, output: output.detach())


def gradient_times(name: str, factor: float) -> Callable[[Any], object]:
    return lambda model: model.get_parameter(name).register_hook(lambda gradient: gradient * factor)


def findings(verdict: Any, kind: str, name: str) -> list[Any]:
    return [finding for judged in verdict[kind] for finding in judged["findings"] if finding["name"] == name]


@pytest.mark.parametrize("fault", [None, "transformer.h.1.attn.c_attn"])
def test_in_bf16_rounding_is_not_measured_between_other_dropout_masks(
    fault: str | None, tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between other masks everything is as far apart as a part that has no gradient."""
    breaks = None if fault is None else detached(fault)
    job = train(tmp_path / "job", make_model("gpt2", DROPOUT), fault=breaks, autocast=True, accumulation=2)
    typed = ("--window", "mean-of-means", "--no-packing", "--max-inputs", "4")
    verdict = verdict_on(job, tmp_path / "logs", *typed)
    assert all(floor["value"] < 0.05 for name, floor in verdict["floors"].items() if name != GRADIENT)
    if fault is None:
        assert (verdict["outcome"], verdict["counts"]) == ("REPRODUCED", {"REPRODUCED": 4})
        assert verdict["window_counts"] == {"REPRODUCED": 2}
    else:
        assert (verdict["outcome"], verdict["window_counts"]) == ("DIFFERS", {"DIFFERS": 2})
        said = headline(capsys.readouterr().out)
        assert said.startswith("DIFFERS: gradient (transformer.h.1.ln_1.weight, transformer.h.1.ln_1.bias, ")
        assert f"{fault}.weight, {fault}.bias, which have no gradient in the job) of the job's step 1" in said


def test_floors_of_other_masks_are_not_used(
    tmp_path: Path, one_world: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on CUDA, where kernels draw the masks of attention each in its own way: here the rows are reversed."""
    from replay.runner import rounding_floor

    make_rounding_variant = rounding_floor.make_rounding_variant
    monkeypatch.setattr(
        rounding_floor,
        "make_rounding_variant",
        lambda spec, passes, world, **known: make_rounding_variant(
            spec, passes, world, **known | {"has_dropout": False}
        ),
    )
    job = train(tmp_path / "job", make_model("gpt2", DROPOUT), autocast=True)
    verdict = verdict_on(job, tmp_path / "logs", "--no-packing")
    assert verdict["floors"] == {}
    assert verdict["outcome"] == "REPRODUCED"
    assert "rounding   not measured: another attention kernel draws other dropout masks" in capsys.readouterr().out


DEEP = {"num_hidden_layers": 12, "initializer_range": 0.1}


@pytest.mark.parametrize("max_norm", [1e6, None])
def test_a_bound_that_a_vanished_gradient_would_meet_judges_nothing(
    max_norm: float | None,
    tmp_path: Path,
    one_world: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As with recordings that have no signatures."""
    monkeypatch.setattr(GradientSigner, "begin_step", lambda signer, device_type=None, **_: False)
    job = train(tmp_path / "job", make_model("llama", DEEP), autocast=True, max_norm=max_norm)
    verdict = verdict_on(job, tmp_path / "logs")
    hidden = findings(verdict, "windows", GRADIENT)
    assert all(finding["bound"] > HIDING_BOUND and finding["status"] == "not judged" for finding in hidden)
    assert (verdict["outcome"], verdict["counts"]) == ("REPRODUCED", {"REPRODUCED": 2})
    assert verdict["window_counts"] == ({"CANNOT TELL": 2} if max_norm is None else {"REPRODUCED": 2})
    assert GRADIENT not in {finding["name"] for finding in verdict["worst"]}
    said = capsys.readouterr().out
    assert f"not judged {GRADIENT} (" in said
    assert "rounding hides it (bound " in said


def test_signatures_are_judged_where_rounding_hides_single_elements(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    job = train(tmp_path / "job", make_model("llama", DEEP), autocast=True, max_norm=None)
    verdict = verdict_on(job, tmp_path / "logs")
    assert (verdict["outcome"], verdict["window_counts"]) == ("REPRODUCED", {"REPRODUCED": 2})
    for quantity in (GRADIENT_NORMS, GRADIENT_RMS):
        judged = findings(verdict, "windows", quantity)
        assert all(finding["status"] == "agrees" and finding["bound"] < HIDING_BOUND / 2 for finding in judged)
    assert findings(verdict, "windows", GRADIENT) == []
    assert "not judged" not in capsys.readouterr().out


@pytest.mark.parametrize("change", ["x 1.2", "negated", "transposed"])
def test_in_bf16_a_changed_gradient_is_found_at_the_first_step(change: str, tmp_path: Path, one_world: None) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "x 1.2": lambda gradient: 1.2 * gradient,
        "negated": lambda gradient: -gradient,
        "transposed": lambda gradient: gradient.T.contiguous(),
    }

    def plant_fault(model: nn.Module) -> None:
        model.get_parameter(name).register_hook(changes[change])

    job = train(tmp_path / "job", make_model("llama", {}), fault=plant_fault, autocast=True, max_norm=None)
    verdict = verdict_on(job, tmp_path / "logs", "--max-inputs", "1")
    assert (verdict["outcome"], verdict["first"]["optimizer_step"]) == ("DIFFERS", 0)
    wrong = {finding["name"]: finding["where"] for finding in verdict["first"]["findings"]
             if finding["status"] == "differs"}  # fmt: skip
    assert wrong[GRADIENT_NORMS if change == "x 1.2" else GRADIENT_RMS] == name


def test_a_missing_gradient_differs_whatever_the_bound(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "model.layers.11.self_attn.q_proj"
    job = train(tmp_path / "job", make_model("llama", DEEP), fault=detached(name), autocast=True, max_norm=None)
    verdict = verdict_on(job, tmp_path / "logs")
    assert verdict["outcome"] == "DIFFERS"
    assert headline(capsys.readouterr().out).startswith(
        f"DIFFERS: gradient ({name}.weight, which has no gradient in the job) of the job's step 1, which ends with "
        "pass 1: none in the job, root mean square 0.0"
    )


def test_no_other_weighting_explains_a_missing_gradient(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job averages the means of passes, and the replay all tokens."""
    fault = detached("model.layers.1.self_attn.q_proj")
    job = train(tmp_path / "job", make_model("llama", {}), fault=fault, accumulation=3)
    verdict = verdict_on(job, tmp_path / "logs", "--dtype", "fp32", "--window", "tokens")
    assert findings(verdict, "windows", WEIGHTING)
    assert headline(capsys.readouterr().out).startswith("DIFFERS: gradient (model.layers.1.self_attn.q_proj.weight, ")


def test_a_dropout_model_that_trained_in_eval_mode_is_named_whatever_the_rows(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eval mode was left on, so that the job drew no mask; later passes have other weights."""
    job = train(
        tmp_path / "job", make_model("gpt2", DROPOUT), fault=lambda model: model.eval(), num_steps=4, learning_rate=0.1
    )
    for number, typed in enumerate(([], ["--no-packing"])):
        verdict = verdict_on(job, tmp_path / str(number), "--dtype", "fp32", *typed)
        assert verdict["outcome"] == "DIFFERS"
        assert "the job's forward, in eval mode, drew no random numbers" in headline(capsys.readouterr().out)
        status, *others = (finding["status"] for finding in verdict["passes"][0]["findings"])
        assert (status, set(others)) == ("differs", {"not judged"})


def test_a_step_whose_gradient_was_not_judged_makes_no_later_pass_differ(tmp_path: Path, one_world: None) -> None:
    """The job smooths its loss, and its model returns another one: the replay steps elsewhere."""
    job = train(tmp_path / "job", make_model("llama", {}), learning_rate=0.5, num_steps=3, loss_of=smoothed_loss)
    verdict = verdict_on(job, tmp_path / "logs", "--dtype", "fp32", *SGD_STEPS, "0.5", "--max-norm", "1e6")
    assert [judged["outcome"] for judged in verdict["passes"]] == ["REPRODUCED", "UNSETTLED", "UNSETTLED"]
    assert "the gradient of the job's step 1 could not be judged" in verdict["passes"][1]["reason"]


def test_the_first_fault_in_the_jobs_time_is_the_headline(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    job = train(tmp_path / "job", make_model("llama", {}), fault=gradient_times(name, 10), learning_rate=0.5)
    verdict = verdict_on(job, tmp_path / "logs", "--dtype", "fp32", *SGD_STEPS, "0.5", "--max-norm", "1e6")
    assert [judged["outcome"] for judged in verdict["passes"]] == ["REPRODUCED", "DIFFERS"]
    said = headline(capsys.readouterr().out)
    assert said.startswith(f"DIFFERS: gradient norm by parameter ({name}) ")
    assert "of the job's step 1, which ends with pass 1" in said
    assert "; also gradient samples, root mean square (" in said


MIXTURE = {"output_router_logits": False}


def test_a_mixture_with_the_jobs_routes_is_judged_as_a_dense_model(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    job = train(tmp_path / "job", make_model("mixtral", MIXTURE), autocast=True, num_steps=4)
    verdict = verdict_on(job, tmp_path / "logs")
    assert {judged["outcome"] for judged in [*verdict["passes"], *verdict["windows"]]} == {"REPRODUCED"}
    said = capsys.readouterr().out
    assert "routing recorded" in said
    assert "of tokens would choose others here, most in layer " in said
    assert "tie" not in said


@pytest.mark.parametrize("sabotaged", [False, True])
def test_a_mixture_whose_tokens_change_experts_at_a_tie_is_unsettled(
    sabotaged: bool, tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job is sound. In bf16 its router's scores are rounded otherwise than the replay's."""
    fault = detached("model.layers.1.self_attn.o_proj") if sabotaged else None
    job = train(tmp_path / "job", make_model("mixtral", MIXTURE), fault=fault, autocast=True, num_steps=4)
    verdict = verdict_on(job, tmp_path / "logs", "--routing", "live")
    outcomes = {judged["outcome"] for judged in [*verdict["passes"], *verdict["windows"]]}
    said = headline(capsys.readouterr().out)
    if sabotaged:
        assert "which have no gradient in the job" in said
    else:
        assert outcomes <= {"REPRODUCED", "UNSETTLED"}
        assert "tokens at a tie may take another expert" in said


def test_other_weights_of_one_rank_are_not_blamed_on_another(
    tmp_path: Path, one_world: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks whose models began apart, each with whole weights."""
    for rank in (0, 1):
        become_rank(monkeypatch, rank)
        model = make_model("llama", {})
        with torch.no_grad():
            model.get_parameter("model.layers.2.mlp.up_proj.weight").add_(0.01 * rank)
        train(tmp_path / "job", model, rank=rank)
    verdict = verdict_on(tmp_path / "job", tmp_path / "logs", "--dtype", "fp32")
    outcomes = {(judged["source"].split("_")[2], judged["outcome"]) for judged in verdict["passes"]}
    assert outcomes == {("rank0", "REPRODUCED"), ("rank1", "CANNOT TELL")}
    said = capsys.readouterr().out
    [line] = [line for line in said.splitlines() if line.startswith("weights ")]
    assert "1 of 30 sampled parameters differ, first model.layers.2.mlp.up_proj.weight" in line
    assert line.endswith("here (pass 2, rank1 #0)")
    assert verdict["outcome"] == "UNSETTLED"
    assert headline(said).startswith("UNSETTLED: weights of the ranks of the job's step 1, which ends with pass 2: ")
    # The first line and the cause name the element, and no other line does so again.
    assert said.count("model.layers.2.mlp.up_proj.weight is ") == 2


def test_steps_that_were_not_recorded_make_no_later_pass_differ(tmp_path: Path, one_world: None) -> None:
    """The job stepped twice before its last recorded pass, and the replay once."""
    job = train(tmp_path / "job", make_model("llama", {}), learning_rate=0.5, num_steps=3)
    sorted((job / "captures").glob("*.pkl"))[1].unlink()
    verdict = verdict_on(job, tmp_path / "logs", "--dtype", "fp32", *SGD_STEPS, "0.5", "--max-norm", "1e6")
    assert [judged["outcome"] for judged in verdict["passes"]] == ["REPRODUCED", "UNSETTLED"]
    assert "the job had taken 2 steps before this pass, the replay 1" in verdict["passes"][1]["reason"]


def test_a_left_padded_job_in_bf16_is_not_held_to_the_rounding_of_one_kernel(tmp_path: Path, one_world: None) -> None:
    """Where padding predicts a label, rows in another order alone would say that nothing is rounded."""
    model: Any = make_model("llama", {})
    model.save_pretrained(tmp_path / "model")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, tmp_path / "captures", reproduce=True):
        for batch in make_batches():
            given = {name: values.flip(1) for name, values in batch.items()}
            given["labels"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
            with torch.autocast("cpu", torch.bfloat16):
                model(**given).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    verdict = verdict_on(tmp_path, tmp_path / "logs", *SGD_STEPS, "0.1")
    outcomes = [judged["outcome"] for judged in verdict["passes"]]
    assert outcomes[0] == "REPRODUCED"
    assert "DIFFERS" not in outcomes
    assert not findings(verdict, "passes", TOKENS_RMS)


def test_a_mixture_with_one_kernel_is_not_held_to_a_rule_of_thumb(tmp_path: Path, one_world: None) -> None:
    """gpt-oss has eager attention alone, so that its rounding cannot be measured."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "head_dim": 8}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("gpt_oss", **sizes, **experts, use_cache=False, initializer_range=0.2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    job = train(tmp_path / "job", model, autocast=True, num_steps=4)
    verdict = verdict_on(job, tmp_path / "logs")
    outcomes = {judged["outcome"] for judged in [*verdict["passes"], *verdict["windows"]]}
    assert "DIFFERS" not in outcomes


def test_gradients_that_ranks_did_not_average_are_said_to_be_each_ranks_own(
    tmp_path: Path, one_world: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under DDP's no_sync: two ranks step on the gradients of their own batches."""
    for rank in (0, 1):
        become_rank(monkeypatch, rank)
        train(tmp_path / "job", make_model("llama", {}), rank=rank)
    verdict_on(tmp_path / "job", tmp_path / "logs", "--dtype", "fp32")
    said = "note       ranks: the job's ranks had different gradients, which were not averaged, in step 1: "
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("fault", "outcome"), [(None, "REPRODUCED"), ("model.layers.1.self_attn.q_proj", "DIFFERS")])
def test_of_a_job_with_a_loss_of_its_own_the_parameters_are_named(
    fault: str | None, outcome: str, tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it differentiates is not what its model returns. Gradients that agree show that the two are one loss."""
    breaks = None if fault is None else detached(fault)
    job = train(tmp_path / "job", make_model("llama", {}), fault=breaks, loss_of=own_loss)
    verdict = verdict_on(job, tmp_path / "logs", "--dtype", "fp32")
    said = headline(capsys.readouterr().out)
    assert verdict["outcome"] == outcome
    assert "another loss" not in said
    if fault is not None:
        assert f"gradient ({fault}.weight, which has no gradient in the job)" in said


def test_a_loss_that_is_another_one_in_every_gradient_is_said_to_be(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    job = train(tmp_path / "job", make_model("llama", {}), loss_of=smoothed_loss)
    assert verdict_on(job, tmp_path / "logs", "--dtype", "fp32")["outcome"] == "UNSETTLED"
    assert "the job differentiated another loss than the one that its model returned" in headline(
        capsys.readouterr().out
    )


def test_advice_is_not_what_was_typed(tmp_path: Path, one_world: None) -> None:
    job = train(tmp_path / "job", make_model("llama", {}), accumulation=2, num_steps=3)
    typed = ("--dtype", "fp32", "--grad-accumulation", "2", "--shuffle-inputs")
    verdict = verdict_on(job, tmp_path / "logs", *typed)
    reasons: Sequence[str] = [finding["doubt"] for finding in findings(verdict, "windows", GRAD_NORM)]
    looping = [reason for reason in reasons if reason and "--grad-accumulation 2" in reason]
    named = [reason for reason in reasons if reason and "and this gradient is of 2: of forward " in reason]
    assert not looping
    assert named


@pytest.mark.parametrize("is_in_job_alone", [False, True])
def test_a_gradient_that_overflows_in_the_job_and_here_is_reproduced(
    is_in_job_alone: bool, tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def overflow(model: Any) -> None:
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(1e30)
            model.model.norm.weight.mul_(1e20)

    model: Any = make_model("llama", {})
    if is_in_job_alone:
        model.model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    else:
        overflow(model)
    train(tmp_path / "job", model, max_norm=1.0)
    verdict = verdict_on(tmp_path / "job", tmp_path / "logs", "--dtype", "fp32")
    [norm] = findings(verdict, "windows", GRAD_NORM)
    assert not math.isfinite(float(norm["recorded"]))
    assert math.isfinite(float(norm["replayed"])) is is_in_job_alone
    assert verdict["outcome"] == ("DIFFERS" if is_in_job_alone else "REPRODUCED"), capsys.readouterr().out


@pytest.mark.parametrize(("scale_by", "outcome"), [("GradScaler", "REPRODUCED"), ("hand", "UNSETTLED")])
def test_a_scale_of_the_jobs_own_loss_is_none_of_its_gradients(
    scale_by: str, outcome: str, tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model("llama", {})
    model.save_pretrained(tmp_path / "job" / "model")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with recording(model, tmp_path / "job" / "captures", reproduce=True):
        for batch in make_batches(2):
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
            if scale_by == "GradScaler":
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
            else:
                (loss * 1024).backward()
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.div_(1024)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if scale_by == "GradScaler":
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
    command = ["--inputs", str(tmp_path / "job" / "captures"), "--model", str(tmp_path / "job" / "model")]
    assert replay_main([*command, "--log-folder", str(tmp_path / "logs")]) == 0
    said = capsys.readouterr().out
    assert headline(said).startswith(outcome)
    assert ("a loss scale of its own, perhaps" in said) is (outcome == "UNSETTLED")
