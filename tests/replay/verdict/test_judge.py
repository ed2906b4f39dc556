"""Whether a replay did what the job did: real jobs recorded and replayed, and the rules one by one on plain data."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from capture import capture_files, recording
from capture.file_format.capture_file import CapturedCall, read_call
from replay.command_line.cli import main as replay_main
from replay.runlog.reader import PastRun
from replay.tolerances.job_bounds import (
    ACTION_TOKENS,
    GRAD_NORM,
    GRADIENT,
    GRADIENT_QUANTITIES,
    LOG_PROBS,
    LOSS,
    TOKEN_LOG_PROBS,
    TOKENS_RMS,
    NoiseFloor,
    compute_bound,
    name_signature_floor,
)
from replay.verdict.findings import VerdictSettings, judge_number
from replay.verdict.judge import PassEvidence, judge
from replay.verdict.outcomes import Outcome, Verdict
from replay.verdict.recorded_pass import Claim, DifferingElement, RecordedPass, ReplayedPass, WeightComparison
from replay.verdict.text import format_verdict
from tests.helpers.made_records import record
from tests.trainers.common import make_batches, make_model

FP32 = ["--dtype", "fp32", "--backend", "fsdp2"]


class Actor(nn.Module):
    """Action log-probs of a model inside, as RLHF trainers compute them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> Tensor:
        logits_BSV = self.model(input_ids=sequences, attention_mask=attention_mask).logits[:, :-1]
        log_probs_BS = logits_BSV.log_softmax(-1).gather(-1, sequences[:, 1:, None])[..., 0]
        log_probs_BA: Tensor = log_probs_BS[:, -action_mask.shape[1] :] * action_mask
        return log_probs_BA


def train(
    folder: Path,
    *,
    learning_rate: float = 0.0,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    device: str = "cpu",
    **settings: Any,
) -> Path:
    """Three steps of a plain loop; the weights that it began with are in `folder/model`."""
    model: Any = make_model(folder, saves=False).to(device, dtype).train()
    model.config.attention_dropout = dropout
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    model.save_pretrained(folder / "model")
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    with recording(model, folder / "captures", **settings) as recorder:
        for batch in make_batches():
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            loss.backward()
            recorder.note(grad_norm=nn.utils.clip_grad_norm_(model.parameters(), 1.0), loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    return folder


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("job"), reproduce=True)


def replay_captures(job: Path, logs: Path, *typed: str, captures: Path | None = None) -> tuple[int, Any, Path]:
    """Exit code, run.json's verdict, and the log's folder."""
    command = ["--inputs", str(captures or job / "captures"), "--log-folder", str(logs), "--loss", "sft"]
    command += [] if "--model" in typed else ["--model", str(job / "model")]
    code = replay_main([*command, *typed])
    [run] = logs.glob("*/run.json")
    return code, json.loads(run.read_text())["verdict"], run.parent


def change_capture(job: Path, folder: Path, change: Callable[[CapturedCall], CapturedCall], number: int = 1) -> Path:
    """The job's captures with one of them changed."""
    folder.mkdir()
    for index, path in enumerate(capture_files(job / "captures")):
        call = read_call(path)
        (change(call) if index == number else call).write(folder)
    return folder


def test_a_job_replayed_from_its_weights_is_reproduced(
    job: Path, tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, verdict, log = replay_captures(job, tmp_path, *FP32, "--verdict", "strict")
    assert (code, verdict["outcome"], verdict["counts"]) == (0, "REPRODUCED", {"REPRODUCED": 3})
    found = {finding["name"]: finding for finding in verdict["worst"]}
    assert found.keys() == {LOSS, TOKEN_LOG_PROBS, *GRADIENT_QUANTITIES}
    assert 0 <= found[LOSS]["difference"] < found[LOSS]["bound"] == 1e-5  # fp32 sums in another order
    said = capsys.readouterr().out
    assert "recorded   as the job's in 21 of its 21 parameters, sampled" in said
    assert "verdict    REPRODUCED\nevidence   " in said
    assert "coverage   3 of 3 passes and 3 of 3 steps judged" in said
    assert PastRun.read(log).records[0].result.row_action_tokens == [5, 7]  # what `replay compare` reads


def test_the_sample_is_reproduced_with_its_steps(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its job trained weights that are random by name, on two ranks."""
    assert replay_main(["--max-inputs", "8", *FP32, "--verdict", "strict", "--log-folder", str(tmp_path)]) == 0
    [run] = tmp_path.glob("*/run.json")
    verdict = json.loads(run.read_text())["verdict"]
    assert [judged_pass["outcome"] for judged_pass in verdict["passes"]] == ["REPRODUCED"] * 8
    assert verdict["outcome"] == "REPRODUCED"
    assert "coverage   8 of 8 passes and 4 of 4 steps judged\n" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed"])
def test_a_job_with_dropout_is_reproduced_where_its_masks_can_be_drawn_again(
    backend: str, device: str, tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    job = train(tmp_path / "job", dropout=0.3, device=device, reproduce=True)
    typed = ["--dtype", "fp32", "--backend", backend, "--attention", "sdpa"]
    _, verdict, _ = replay_captures(job, tmp_path / "same", *typed, "--gradient-checkpointing")
    assert verdict["counts"] == {"REPRODUCED": 3}
    assert "dropout    attention_dropout, from the job's random states" in capsys.readouterr().out
    _, verdict, _ = replay_captures(
        job, tmp_path / "packed", *typed, "--packing"
    )  # rows of another length draw other masks
    assert verdict["outcome"] == "CANNOT TELL"
    assert verdict["reason"] == (
        "the replay draws other dropout masks than the job: rows are packed here, and other rows in the job. "
        "Try: --no-packing"
    )
    bare = change_capture(job, tmp_path / "bare", lambda call: replace(call, random={}), number=0)
    _, verdict, _ = replay_captures(job, tmp_path / "none", *typed, "--no-packing", "--max-inputs", "1", captures=bare)
    assert (verdict["outcome"], "by chance" in verdict["reason"]) == ("CANNOT TELL", True)
    assert "dropout    attention_dropout, by chance: no random states were recorded" in capsys.readouterr().out


@pytest.mark.parametrize("job_dtype", [torch.float32, torch.bfloat16])
def test_bf16_is_held_to_its_own_bound(job_dtype: torch.dtype, tmp_path: Path, one_world: None) -> None:
    job = train(tmp_path / "job", dtype=job_dtype, reproduce=True)
    _, verdict, _ = replay_captures(job, tmp_path / "logs", "--dtype", "bf16")
    assert verdict["outcome"] == "REPRODUCED"
    assert verdict["dtypes"] == [str(job_dtype).partition(".")[2], "bfloat16"]
    assert verdict["environment"].keys() == ({"dtype"} if job_dtype is torch.float32 else set())
    assert {finding["name"] for finding in verdict["worst"]} == {
        LOSS,
        TOKEN_LOG_PROBS,
        TOKENS_RMS,
        *GRADIENT_QUANTITIES,
    }
    floors = {name for name in verdict["floors"] if not name.startswith(name_signature_floor(""))}
    assert floors == {LOSS, LOG_PROBS, TOKEN_LOG_PROBS, TOKENS_RMS, GRAD_NORM, GRADIENT}
    assert name_signature_floor("model.layers.*.self_attn.q_proj.weight") in verdict["floors"]
    assert all(1e-3 < finding["bound"] < 0.7 for finding in verdict["worst"])


def test_in_bf16_a_token_that_is_off_by_five_times_the_floor_is_found(tmp_path: Path, one_world: None) -> None:
    job = train(tmp_path / "job", dtype=torch.bfloat16, reproduce=True)
    _, verdict, _ = replay_captures(job, tmp_path / "logs")
    floor = verdict["floors"][TOKEN_LOG_PROBS]["value"]

    def plant_fault(call: CapturedCall) -> CapturedCall:
        values = call.output_numbers("token_log_probs") or []
        values[-1] += 6 * floor * max(1.0, abs(values[-1]))  # 5, and what rounding may take away from it
        return replace(call, outputs={**call.outputs, "token_log_probs": values})

    _, verdict, _ = replay_captures(
        job, tmp_path / "more", captures=change_capture(job, tmp_path / "planted", plant_fault)
    )
    assert (verdict["outcome"], verdict["first"]["index"]) == ("DIFFERS", 1)
    assert TOKEN_LOG_PROBS in [
        finding["name"] for finding in verdict["first"]["findings"] if finding["status"] == "differs"
    ]


def test_a_second_opinion_is_of_a_replay_in_fp32(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    job = train(tmp_path / "job", reproduce=True)
    _, verdict, _ = replay_captures(job, tmp_path / "logs", "--dtype", "bf16", "--second-opinion")
    assert verdict["outcome"] == "REPRODUCED"
    said = capsys.readouterr().out
    assert "in fp32    REPRODUCED\n" in said


@pytest.mark.parametrize("typed", [["--random-weights"], ["--model", "stale"]])
def test_other_weights_are_named_before_the_first_pass(
    typed: list[str], job: Path, tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    name, counts = "model.embed_tokens.weight", "21 of 21"
    if "stale" in typed:
        name, counts = "model.layers.1.mlp.up_proj.weight", "1 of 21"
        weights = load_file(job / "model" / "model.safetensors")
        weights[name] += 1e-6  # of one step, earlier
        (tmp_path / "stale").mkdir()
        save_file(weights, tmp_path / "stale" / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "stale" / "config.json").write_bytes((job / "model" / "config.json").read_bytes())
        typed = ["--model", str(tmp_path / "stale")]
    code, verdict, _ = replay_captures(job, tmp_path / "logs", *FP32, *typed, "--verdict", "strict")
    assert (code, verdict["outcome"], verdict["reason"]) == (0, "CANNOT TELL", "other weights")
    assert verdict["weights"]["first"]["name"] == name
    header, _, summary = capsys.readouterr().out.partition("pass 1 of 3")
    said = f"other than the job's: {counts} sampled parameters differ, first {name}, element"
    assert f"recorded   {said}" in header
    assert f"weights    {said}" in summary


@pytest.mark.parametrize(("rule", "expected"), [("report", 0), ("strict", 1)])
def test_a_loss_that_is_not_the_jobs_differs(
    rule: str, expected: int, job: Path, tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(call: CapturedCall) -> CapturedCall:
        loss = call.outputs["loss"]
        assert isinstance(loss, float)
        return replace(call, outputs={**call.outputs, "loss": loss * 1.001})

    captures = change_capture(job, tmp_path / "wrong", wrong)
    code, verdict, _ = replay_captures(job, tmp_path / "logs", *FP32, "--verdict", rule, captures=captures)
    assert (code, verdict["outcome"], verdict["counts"]) == (expected, "DIFFERS", {"REPRODUCED": 2, "DIFFERS": 1})
    source = capture_files(captures)[1].name
    [loss] = [finding for finding in verdict["first"]["findings"] if finding["name"] == LOSS]
    assert (verdict["first"]["index"], verdict["first"]["source"]) == (1, source)
    assert loss["difference"] == pytest.approx(1e-3, rel=0.01)
    assert loss["bound"] == 1e-5
    assert "verdict    DIFFERS: loss of pass 2, rank0 #1: " in capsys.readouterr().out


NOTHING_RECORDED = (
    "nothing was recorded of the job's numbers, or they were redacted. Record with reproduce=True, or a flight recorder"
)


@pytest.mark.parametrize(
    ("kept", "typed", "reason"),
    [
        ({}, [], NOTHING_RECORDED),
        ({"reproduce": True}, ["--loss", "stand-in"], None),  # no action mask: the same labels
    ],
)
def test_what_was_not_recorded_cannot_be_told(
    kept: dict[str, Any], typed: list[str], reason: str | None, tmp_path: Path, one_world: None
) -> None:
    _, verdict, _ = replay_captures(
        train(tmp_path / "job", **kept), tmp_path / "logs", *FP32, *typed, "--max-inputs", "1"
    )
    assert verdict["outcome"] == ("REPRODUCED" if reason is None else "CANNOT TELL")
    assert verdict["reason"] == reason


def test_a_replay_that_steps_as_the_job_did_is_judged_in_every_pass(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the job's optimizer and clipping; with another learning rate it says so before the first pass."""
    job = train(tmp_path / "job", learning_rate=0.1, reproduce=True)
    as_the_job = ["--step", "--optimizer", "sgd", "--max-norm", "1.0", "--learning-rate"]
    code, verdict, _ = replay_captures(job, tmp_path / "same", *FP32, *as_the_job, "0.1", "--verdict", "strict")
    assert (code, verdict["counts"], verdict["window_counts"]) == (0, {"REPRODUCED": 3}, {"REPRODUCED": 3})
    assert "optimizer  as the job's" in capsys.readouterr().out
    code, verdict, _ = replay_captures(job, tmp_path / "other", *FP32, *as_the_job, "0.2", "--verdict", "strict")
    assert (code, verdict["outcome"]) == (1, "UNSETTLED")
    header, _, _ = capsys.readouterr().out.partition("pass 1 of 3")
    assert "optimizer  other than the job's: learning rate 0.1 in the job, 0.2 here" in header


OTHER_STEPS = ["--step", "--optimizer", "adamw", "--learning-rate", "0.1"]


@pytest.mark.parametrize("typed", [["--no-step"], OTHER_STEPS])
def test_of_a_job_that_trains_on_the_passes_with_the_same_weights_are_judged(
    typed: list[str], tmp_path: Path, one_world: None
) -> None:
    """The replay's first weights are the job's first; then the one steps, or both do, each its own way."""
    job = train(tmp_path / "job", learning_rate=0.1, reproduce=True)
    _, verdict, _ = replay_captures(job, tmp_path / "logs", *FP32, *typed)
    steps = typed == OTHER_STEPS
    expected = (
        ("UNSETTLED", {"REPRODUCED": 1, "UNSETTLED": 2})
        if steps
        else ("REPRODUCED", {"REPRODUCED": 1, "CANNOT TELL": 2})
    )
    assert (verdict["outcome"], verdict["counts"]) == expected
    reasons = {judged_pass["reason"] for judged_pass in verdict["passes"][1:]}
    assert all("SGD in the job, AdamW here" in reason for reason in reasons) if steps else reasons == {"other weights"}


@pytest.mark.parametrize("typed", [[], ["--step"], ["--step", "auto"]])
def test_a_replay_takes_the_jobs_steps_as_the_job_took_them(typed: list[str], tmp_path: Path, one_world: None) -> None:
    """Another class than the default, its rate, and nothing typed of either."""
    job = train(tmp_path / "job", learning_rate=0.1, reproduce=True)
    _, verdict, log = replay_captures(job, tmp_path / "logs", *FP32, *typed)
    assert (verdict["outcome"], verdict["counts"], verdict["window_counts"]) == (
        "REPRODUCED",
        {"REPRODUCED": 3},
        {"REPRODUCED": 3},
    )
    # A step that nobody asked for is no part of a pass.
    has_phase = ["step" in record.cost.phases for record in PastRun.read(log).records]
    assert has_phase == [typed == ["--step"]] * 3


@pytest.mark.parametrize(("temperature", "outcome"), [(1.0, "REPRODUCED"), (1.01, "DIFFERS")])
def test_action_log_probs_are_compared_row_by_row(
    temperature: float, outcome: str, tmp_path: Path, one_world: None
) -> None:
    """The model is inside another, so its names are longer; the replay does not know the temperature."""
    model = make_model(tmp_path)
    actor = Actor(model)
    model.lm_head.register_forward_hook(lambda module, args, logits: logits / temperature)
    with recording(actor, tmp_path / "captures", reproduce=True):
        for batch in make_batches():
            actor(batch["input_ids"], batch["attention_mask"], batch["labels"][:, -4:] != -100)
    _, verdict, _ = replay_captures(tmp_path, tmp_path / "logs", *FP32, "--loss", "stand-in")
    assert verdict["outcome"] == outcome
    assert {finding["name"] for finding in verdict["worst"]} == {LOG_PROBS, ACTION_TOKENS}
    assert len(verdict["weights"]["compared"]) == 21


# the rules, on plain data

SAME = WeightComparison(compared=("a", "b", "c"), num_parameters=3)
OTHER = replace(SAME, differing=("a",), first=DifferingElement(name="a", index=0, recorded=1.0, replayed=2.0))
UNKNOWN = WeightComparison(doubt="the capture holds no samples of the weights")
SETTING = VerdictSettings(dtype="float32", num_layers=2, num_data_ranks=1, grad_accumulation=1)
RIGHT, WRONG, VAGUE = (
    Claim(name=LOSS, values=[1.5], num_tokens=[80]),
    Claim(name=LOSS, values=[1.6], num_tokens=[80]),
    Claim(name=LOSS, values=[1.6], doubt="another objective"),
)


def make_recorded(*claims: Claim, forward: int = 0, **changes: Any) -> RecordedPass:
    values: dict[str, Any] = {"rank": 0, "world_size": 1, "trains": True, "weight_comparison": SAME, "num_frozen": 0}
    return RecordedPass(**{**values, "forward_number": forward, "claims": claims, "dtypes": ["float32"], **changes})


def judge_passes(*passes: RecordedPass, setting: VerdictSettings = SETTING, **changes: Any) -> Verdict:
    """Each pass beside a replay's loss of 1.5 over 80 tokens, and a gradient norm of 4."""
    values = {"row_action_tokens": [30, 50], "grad_norm": 4.0, "row_log_probs": [-30.0, -100.0], **changes}
    return judge(
        [
            PassEvidence(record(index, **values), recorded_pass, ReplayedPass())
            for index, recorded_pass in enumerate(passes)
        ],
        setting,
    )


@pytest.mark.parametrize(
    ("passes", "outcome", "reason"),
    [
        ([make_recorded(RIGHT)], Outcome.REPRODUCED, None),
        ([make_recorded(WRONG)], Outcome.DIFFERS, None),
        ([make_recorded(RIGHT), make_recorded(WRONG, forward=1)], Outcome.DIFFERS, None),
        ([make_recorded(WRONG, weight_comparison=OTHER)], Outcome.CANNOT_TELL, "other weights"),
        ([make_recorded(RIGHT, weight_comparison=OTHER)], Outcome.CANNOT_TELL, "other weights"),
        ([make_recorded(RIGHT, weight_comparison=UNKNOWN)], Outcome.REPRODUCED, None),
        (
            [make_recorded(WRONG, weight_comparison=UNKNOWN)],
            Outcome.UNSETTLED,
            "loss is off by 0.063, but the capture holds no",
        ),
        ([make_recorded(VAGUE)], Outcome.UNSETTLED, "another objective"),
        ([make_recorded(RIGHT, VAGUE)], Outcome.UNSETTLED, "another objective"),
        ([make_recorded(RIGHT, VAGUE), make_recorded(WRONG, forward=1)], Outcome.DIFFERS, None),
        ([make_recorded(replace(VAGUE, values=[1.5]))], Outcome.CANNOT_TELL, "another objective"),  # by chance, perhaps
        ([make_recorded(RIGHT, replace(VAGUE, values=[1.5]))], Outcome.REPRODUCED, None),
        (
            [make_recorded(replace(WRONG, num_tokens=[79]))],
            Outcome.UNSETTLED,
            "loss is of 79 tokens, the replay's of 80",
        ),
        ([make_recorded(replace(WRONG, values=[math.nan]))], Outcome.DIFFERS, None),
        ([make_recorded()], Outcome.CANNOT_TELL, "nothing was recorded"),
        ([], Outcome.CANNOT_TELL, "no pass was replayed"),
    ],
)
def test_the_rules(passes: Sequence[RecordedPass], outcome: Outcome, reason: str | None) -> None:
    verdict = judge_passes(*passes)
    assert verdict.outcome is outcome
    assert (verdict.reason or "") == (reason or "") or str(reason) in str(verdict.reason)
    assert format_verdict(verdict)[0][1].startswith(f"{outcome} (" if outcome is Outcome.REPRODUCED else f"{outcome}: ")


def test_no_number_of_a_pass_with_other_weights_is_told_as_open() -> None:
    """They mean nothing, and the pass is told as open; the same number of a pass with the job's weights is told."""
    first = make_recorded(RIGHT, num_steps_before=0)
    for weights, names in ((OTHER, []), (SAME, [LOSS])):
        later = make_recorded(VAGUE, forward=1, num_steps_before=1, weight_comparison=weights)
        verdict = judge_passes(first, later)
        assert [finding.name for finding in verdict.open] == names
        lines = dict(format_verdict(verdict))
        assert lines.get("not judged") == (f"{LOSS}: 1.6 in the job, 1.5 here: another objective" if names else None)
        assert lines.get("open") == (None if names else "pass 2: other weights")


@pytest.mark.parametrize(
    ("differing", "claim", "outcome", "outcome_before"),
    [
        (("a",), RIGHT, Outcome.REPRODUCED, Outcome.REPRODUCED),  # looked at again
        (("a",), WRONG, Outcome.DIFFERS, Outcome.DIFFERS),
        (("c",), RIGHT, Outcome.CANNOT_TELL, Outcome.REPRODUCED),  # still another one; not yet, perhaps
        (("c",), WRONG, Outcome.CANNOT_TELL, Outcome.UNSETTLED),
        (("a", "c"), RIGHT, Outcome.REPRODUCED, Outcome.REPRODUCED),  # moved since
        (("a", "c"), WRONG, Outcome.UNSETTLED, Outcome.UNSETTLED),  # but perhaps not to what the replay has
    ],
)
def test_a_pass_answers_for_parameters_that_it_has_no_sample_of(
    differing: tuple[str, ...], claim: Claim, outcome: Outcome, outcome_before: Outcome
) -> None:
    other = replace(OTHER, compared=("a", "b", "c"), differing=differing)
    own = WeightComparison(compared=("a", "b"), num_parameters=3)
    for step, expected in ((1, outcome), (0, outcome_before)):
        found = judge_passes(
            make_recorded(claim, weight_comparison=own, forward=step),
            make_recorded(claim, weight_comparison=other, forward=1 - step),
        )
        assert found.passes[0].outcome is expected
        assert found.weights is not None
        assert found.weights.first is not None


def test_a_model_with_dropout_differs_by_chance() -> None:
    verdict = judge_passes(make_recorded(WRONG), setting=replace(SETTING, dropout=["attention_dropout"]))
    assert (verdict.outcome, "by chance" in str(verdict.reason)) == (Outcome.CANNOT_TELL, True)
    rollout = make_recorded(WRONG, trains=False)
    assert judge_passes(rollout, setting=replace(SETTING, dropout=["attention_dropout"])).outcome is Outcome.DIFFERS


@pytest.mark.parametrize(
    ("norms", "place"),
    [([4.0], "the window of pass 1"), ([None, 4.0], "the window of passes 1 to 2")],
)
def test_a_window_of_a_job_that_counted_no_steps_is_named_by_its_passes(norms: list[float | None], place: str) -> None:
    wrong_norm = Claim(name=GRAD_NORM, values=[8.0])
    passes = [
        PassEvidence(
            record(index, grad_norm=norm, row_action_tokens=[30, 50], row_log_probs=[-30.0, -100.0]),
            make_recorded(RIGHT, *([] if norm is None else [wrong_norm]), forward=index),
            ReplayedPass(),
        )
        for index, norm in enumerate(norms)
    ]
    verdict = judge(passes, replace(SETTING, grad_accumulation=len(norms)))
    [window] = verdict.windows
    assert (window.first_index, window.index, window.optimizer_step) == (0, len(norms) - 1, None)
    line = format_verdict(replace(verdict, outcome=Outcome.DIFFERS, first=window))[0][1]
    assert line.startswith(f"DIFFERS: gradient norm of {place}: 8 in the job, 4 here"), line
    unjudged = replace(verdict, outcome=Outcome.REPRODUCED, windows=[replace(window, outcome=Outcome.CANNOT_TELL)])
    assert dict(format_verdict(unjudged))["open"].startswith(f"{place}: ")


@pytest.mark.parametrize(("unasked", "outcome"), [(False, Outcome.UNSETTLED), (True, Outcome.CANNOT_TELL)])
def test_a_doubt_by_dropout_makes_no_verdict_worse_after_steps_that_nobody_asked_for(
    unasked: bool, outcome: Outcome
) -> None:
    setting = replace(SETTING, dropout=["attention_dropout"], steps_unasked=unasked)
    verdict = judge_passes(make_recorded(RIGHT), make_recorded(WRONG, forward=1), setting=setting, num_steps=1)
    assert [judged.outcome for judged in verdict.passes] == [Outcome.REPRODUCED, outcome]
    assert "in other passes its masks are the job's" in str(verdict.passes[1].reason)


@pytest.mark.parametrize(("unasked", "outcome"), [(False, Outcome.UNSETTLED), (True, Outcome.REPRODUCED)])
def test_a_gradient_that_is_left_open_makes_no_verdict_worse_after_steps_that_nobody_asked_for(
    unasked: bool, outcome: Outcome
) -> None:
    """The norm may be of two passes. With weights of another step, as without these steps, nobody would ask for it."""
    passes = make_recorded(RIGHT), make_recorded(RIGHT, NORM, forward=1)
    verdict = judge_passes(*passes, setting=replace(SETTING, steps_unasked=unasked), num_steps=1)
    assert verdict.outcome is outcome
    assert [judged.outcome for judged in verdict.windows] == [Outcome.CANNOT_TELL if unasked else Outcome.UNSETTLED]


def test_where_masks_are_the_jobs_nothing_differs_by_chance() -> None:
    """A pass whose numbers are the job's has its masks, and so its gradient, unless the loss was scaled."""
    dropout = replace(SETTING, dropout=["attention_dropout"])
    verdict = judge_passes(make_recorded(RIGHT), make_recorded(WRONG, forward=1), setting=dropout)
    assert (verdict.outcome, verdict.counts) == (Outcome.UNSETTLED, {Outcome.REPRODUCED: 1, Outcome.UNSETTLED: 1})
    assert "in other passes its masks are the job's" in str(verdict.reason)
    assert (
        judge_passes(make_recorded(RIGHT, trains=False), make_recorded(WRONG, forward=1), setting=dropout).outcome
        is Outcome.REPRODUCED
    )
    right_norm, wrong_norm = (Claim(name=GRAD_NORM, values=[value]) for value in (4.0, 8.0))
    for norm, outcome in ((right_norm, Outcome.REPRODUCED), (wrong_norm, Outcome.DIFFERS)):
        passes = make_recorded(RIGHT, right_norm), make_recorded(RIGHT, norm, forward=1)
        assert judge_passes(*passes, setting=dropout).outcome is outcome
    by_chance = make_recorded(WRONG, wrong_norm), make_recorded(WRONG, wrong_norm, forward=1)
    assert judge_passes(*by_chance, setting=dropout).outcome is Outcome.CANNOT_TELL


def test_a_row_of_few_tokens_has_a_wider_bound_and_is_named() -> None:
    rows = Claim(name=LOG_PROBS, values=[-30.0, -100.1], num_tokens=[30, 50])
    verdict = judge_passes(make_recorded(rows))
    assert verdict.first is not None
    [finding] = verdict.first.findings
    assert finding.where == "row 1"
    assert finding.recorded == pytest.approx(-2.002)
    assert judge_passes(make_recorded(rows, dtypes=["bfloat16"])).outcome is Outcome.REPRODUCED
    assert compute_bound(LOG_PROBS, ["bfloat16"], 32, 1) > 20 * compute_bound(LOG_PROBS, ["bfloat16"], 32, 4000)


NORM = Claim(name=GRAD_NORM, values=[5.0])


@pytest.mark.parametrize(
    ("first", "changes", "outcome"),
    [
        (make_recorded(RIGHT, NORM), {}, Outcome.DIFFERS),  # the second pass; what one pass alone tells is not enough
        (make_recorded(RIGHT), {}, Outcome.UNSETTLED),  # the norm may be of two passes
        (
            make_recorded(RIGHT, NORM),
            {"forward_number": 2},
            Outcome.UNSETTLED,
        ),  # of two passes, of which every second was recorded
        (make_recorded(RIGHT, NORM), {"num_frozen": 2}, Outcome.UNSETTLED),
        (
            make_recorded(RIGHT),
            {"world_size": 2},
            Outcome.UNSETTLED,
        ),  # of two ranks' gradients, and no other was judged
        (make_recorded(RIGHT, NORM), {"claims": [VAGUE, NORM]}, Outcome.UNSETTLED),
    ],
)
def test_a_gradient_norm_counts_where_the_window_is_the_jobs(
    first: RecordedPass, changes: dict[str, Any], outcome: Outcome
) -> None:
    second = replace(make_recorded(RIGHT, NORM, forward=1), **changes)
    assert judge_passes(first, second).outcome is outcome


@pytest.mark.parametrize(("floor", "status"), [(2.0, "not judged"), (1e-7, "differs")])
def test_of_a_gradient_that_is_zero_in_the_job_a_norm_of_rounding_differs_in_nothing(floor: float, status: str) -> None:
    """GRPO's advantages are all 0 where each answer has the same reward: here the KL's gradient is then rounding."""
    floors = {1: {GRAD_NORM: NoiseFloor(value=floor, num_values=4)}}
    zero = Claim(name=GRAD_NORM, values=[0.0])
    passes = make_recorded(RIGHT, zero), make_recorded(RIGHT, zero, forward=1)
    verdict = judge_passes(*passes, setting=replace(SETTING, step_floors=floors), grad_norm=3e-7)
    [finding] = verdict.windows[1].findings
    assert finding.status == status


def test_ranks_of_a_sharded_job_put_their_samples_together() -> None:
    """Each has a part of the parameters; one that differs on any rank is every rank's in that step."""
    half = WeightComparison(compared=("b",), num_parameters=3, is_sharded=True)
    none = WeightComparison(num_parameters=3, is_sharded=True)
    wrong = replace(OTHER, is_sharded=True, compared=("a",))
    assert judge_passes(
        make_recorded(WRONG, weight_comparison=half), make_recorded(WRONG, weight_comparison=none, rank=1)
    ).counts == {Outcome.DIFFERS: 2}
    other = judge_passes(
        make_recorded(RIGHT, weight_comparison=half),
        make_recorded(RIGHT, weight_comparison=wrong, rank=1),
        make_recorded(RIGHT, forward=1),
    )
    assert other.counts == {Outcome.CANNOT_TELL: 2, Outcome.REPRODUCED: 1}
    assert judge_passes(make_recorded(WRONG, weight_comparison=none)).outcome is Outcome.UNSETTLED


def test_peers_of_one_input_count_once_and_the_farthest_decides() -> None:
    recorded_pass = make_recorded(RIGHT)
    pair = [
        PassEvidence(
            record(0, rank=rank, data_rank=0, loss=loss, row_action_tokens=[80]), recorded_pass, ReplayedPass()
        )
        for rank, loss in ((0, 1.5), (1, 1.6))
    ]
    verdict = judge(pair, SETTING)
    assert (verdict.counts, verdict.first and verdict.first.rank) == ({Outcome.DIFFERS: 1}, 1)


def test_what_differs_in_the_environment_is_listed_beside() -> None:
    settings = {"torch": "2.11.0", "device": "NVIDIA H200", "NCCL_ALGO": "Ring"}
    here = {"torch": "2.13.0", "device": "NVIDIA H200", "dtype": "float32"}
    verdict = judge_passes(make_recorded(RIGHT, environment=settings), setting=replace(SETTING, environment=here))
    assert verdict.environment == {"torch": ("2.11.0", "2.13.0")}
    assert ("environment differs", "torch 2.13.0 (2.11.0 in the job)") in format_verdict(verdict)
    # Of several dtypes the coarsest counts; of several values that passes had all are named.
    mixed = make_recorded(RIGHT, environment=settings, dtypes=["bfloat16", "float32"])
    other = make_recorded(RIGHT, forward=1, environment={"torch": "2.12.0"}, dtypes=["bfloat16", "float32"])
    verdict = judge_passes(mixed, other, setting=replace(SETTING, environment=here))
    assert verdict.environment == {"torch": ("2.11.0, 2.12.0", "2.13.0"), "dtype": ("bfloat16", "float32")}
    assert verdict.dtypes == ("bfloat16", "float32")


def test_a_finding_at_its_bound_agrees() -> None:
    assert judge_number(LOSS, 1.0, 1.1, difference=0.1, bound=0.1).agrees
    assert not judge_number(LOSS, 1.0, 1.1, difference=0.1, bound=0.09).agrees


@pytest.mark.parametrize(("dtype", "is_said"), [("float16", True), ("float32", False)])
def test_a_replay_that_overflows_in_fp16_accuses_no_job(dtype: str, is_said: bool) -> None:
    """The loss scale of a replay is not the job's, and what is inf here may have been finite there."""
    recorded = make_recorded(Claim(name=GRAD_NORM, values=[4.0]), dtypes=[dtype])
    verdict = judge_passes(recorded, setting=replace(SETTING, dtype=dtype), grad_norm=math.inf)
    assert verdict.outcome is Outcome.UNSETTLED
    assert (verdict.reason == "it overflowed here in fp16, at the replay's own loss scale") is is_said
    # Where the job overflowed, too, the replay does what the job did.
    both = make_recorded(RIGHT, Claim(name=GRAD_NORM, values=[math.inf]), dtypes=[dtype])
    passes = [both, replace(both, forward_number=1)]
    assert judge_passes(*passes, setting=replace(SETTING, dtype=dtype), grad_norm=math.inf).open == []
