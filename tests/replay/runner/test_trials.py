"""A wrong forward is run again under hypotheses: real tiny jobs with a fault, and which trial gives their numbers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actor_init.inputs.packing import ActorInputs
from capture import capture_files, recording
from capture.file_format.capture_file import read_call
from replay.command_line.cli import main as replay_main
from replay.runner.run_pass import prepare_actor_inputs
from replay.runner.trials import (
    find_pass_to_try,
    find_passes_to_confirm,
    may_have_other_weights,
)
from replay.tolerances.job_bounds import GRADIENT, LOSS
from replay.verdict.causes.cause import CauseName
from replay.verdict.judge import PassEvidence
from replay.verdict.recorded_pass import RecordedPass, ReplayedPass, WeightComparison
from tests.broken_jobs import faults
from tests.helpers.made_records import record
from tests.helpers.made_verdicts import make_verdict
from tests.helpers.replaced_parts import replace_layout
from tests.trainers.common import make_batches, make_model

Break = Callable[[Any], None]

# It stands in the first batch once, in the midst of a row.
ZEROED = int(make_batches(1)[0]["input_ids"][1, 5])


def run_under_autocast(mlp: Any, given: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found: torch.Tensor = type(mlp).forward(mlp, given)
    return found.float()


def train(folder: Path, break_model: Break, dtype: torch.dtype = torch.float32, num_passes: int = 2) -> Path:
    """Passes without a step, of a model that is broken after its weights were saved."""
    model: Any = make_model(folder, saves=False).to(dtype).train()
    model.save_pretrained(folder / "model")
    break_model(model)
    with recording(model, folder / "captures", reproduce=True):
        for batch in make_batches(num_passes):
            model(**batch).loss.backward()
    return folder


def replay(job: Path, logs: Path, *typed: str) -> dict[str, Any]:
    """Return run.json's verdict."""
    command = ["--model", str(job / "model"), "--log-folder", str(logs)]
    command += [] if "--inputs" in typed else ["--inputs", str(job / "captures")]
    assert replay_main([*command, "--loss", "sft", "--backend", "ddp", *typed]) in (0, 1)
    [run] = logs.glob("*/run.json")
    verdict: dict[str, Any] = json.loads(run.read_text())["verdict"]
    return verdict


@pytest.mark.parametrize(
    ("break_model", "trial", "cause"),
    [
        (faults.shifted_twice, "shifted twice", CauseName.OTHER_TOKENS),
        # It moves the first loss by 0.001 alone, so another loss may come as near by chance: the second pass decides.
        (faults.label_smoothing, "smoothed by 0.1", CauseName.OBJECTIVE),
        (faults.visible(faults.sees_next_token), "the next token is seen", CauseName.MASK),
        (faults.output_changed("lm_head", faults.through_bf16), "logits in bf16", CauseName.DTYPE),
        (faults.one_layer_sees_all, "last layer not causal", CauseName.MASK),
        (
            faults.output_changed("model.layers.0", faults.through_bf16),
            "model.layers.0 returns bf16",
            CauseName.DTYPE,
        ),
        (
            faults.input_changed("model.layers.1.mlp.down_proj", faults.rounded_to(10)),
            "model.layers.1.mlp.down_proj is given TF32",
            CauseName.DTYPE,
        ),
        (
            faults.forward_replaced("model.layers.1.mlp", run_under_autocast),
            "model.layers.1.mlp computes in bf16",
            CauseName.DTYPE,
        ),
        (faults.positions_changed(lambda p: p % 5), "positions: begin again", CauseName.POSITIONS),
        (faults.positions_changed(lambda p: 20 - p), "positions: reversed", CauseName.POSITIONS),
        (
            faults.weight_changed("model.embed_tokens.weight", faults.row_zeroed(ZEROED)),
            f"embedding of token {ZEROED} zeroed",
            CauseName.OTHER_WEIGHTS,
        ),
    ],
)
def test_the_trial_that_gives_the_jobs_numbers_is_the_cause(
    break_model: Break,
    trial: str,
    cause: CauseName,
    tmp_path: Path,
    one_world: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    verdict = replay(train(tmp_path, break_model), tmp_path / "logs")

    assert [result["name"] for result in verdict["trials"]["results"] if result["agrees"]] == [trial]
    assert (verdict["causes"][0]["name"], verdict["causes"][0]["sureness"]) == (cause, "is")
    ran = f"{len(verdict['trials']['results'])} trials of pass 1, in {verdict['trials']['num_forwards']} forwards"
    assert f"also ran   {ran}" in capsys.readouterr().out


def test_frequencies_that_the_job_never_computed_go_before_positions_that_give_the_same_numbers(
    tmp_path: Path, one_world: None
) -> None:
    """As of a model that is built on the meta device and filled by to_empty(): no checkpoint has its frequencies."""

    def empty_frequencies(model: Any) -> None:
        model.model.rotary_emb.inv_freq.zero_()

    verdict = replay(train(tmp_path, empty_frequencies), tmp_path / "logs")
    agreeing = {result["name"] for result in verdict["trials"]["results"] if result["agrees"]}
    assert agreeing == {"positions: all 0", "buffers of zeros"}
    cause = verdict["causes"][0]
    assert (cause["name"], cause["sureness"]) == (CauseName.POSITIONS, "is")
    assert cause["sentence"].startswith("the buffer model.rotary_emb.inv_freq is all zeros in the job, ")


def test_a_loss_of_the_loops_own_is_known_by_the_gradient_of_its_logits(tmp_path: Path, one_world: None) -> None:
    """Nobody noted it, so that no loss is there to be compared."""
    model: Any = make_model(tmp_path, saves=False).train()
    model.save_pretrained(tmp_path / "model")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, tmp_path / "captures", reproduce=True):
        for batch in make_batches(2):
            labels_BS = batch.pop("labels")
            logits_NV = model(**batch).logits[:, :-1].flatten(0, 1)
            torch.nn.functional.cross_entropy(logits_NV / 0.8, labels_BS[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

    verdict = replay(tmp_path, tmp_path / "logs", "--loss", "stand-in")

    assert (verdict["causes"][0]["name"], verdict["causes"][0]["sureness"]) == (CauseName.OBJECTIVE, "is")
    assert "divided by 0.8, a temperature" in verdict["causes"][0]["sentence"]


def test_where_a_loss_may_agree_by_chance_further_passes_decide(tmp_path: Path, one_world: None) -> None:
    """In bf16 several losses are within the bound of one pass's loss."""
    job = train(tmp_path, faults.labels_of_prompts_too, torch.bfloat16, 4)

    verdict = replay(job, tmp_path / "logs")

    assert (verdict["causes"][0]["name"], verdict["causes"][0]["sureness"]) == (CauseName.OTHER_TOKENS, "is")
    assert "it is over all 18 tokens of the rows" in verdict["causes"][0]["sentence"]
    assert verdict["trials"]["confirmed_by"]


def test_of_a_recording_with_losses_alone_losses_and_masks_are_tried(tmp_path: Path, one_world: None) -> None:
    """As an importer writes it: nothing tells whether the forward is right."""
    job, bare = train(tmp_path, faults.shifted_twice), tmp_path / "bare"
    bare.mkdir()
    for path in capture_files(job / "captures"):
        call = read_call(path)
        outputs = {name: value for name, value in call.outputs.items() if not name.startswith("token_log_probs")}
        replace(call, outputs=outputs).write(bare)

    verdict = replay(job, tmp_path / "logs", "--inputs", str(bare))

    names = [result["name"] for result in verdict["trials"]["results"]]
    assert {"shifted twice", "not causal", "positions: from 1"} <= set(names)
    assert (verdict["causes"][0]["name"], verdict["causes"][0]["sureness"]) == (CauseName.OTHER_TOKENS, "is")


def test_a_fault_that_no_hypothesis_has_is_no_trials_cause(tmp_path: Path, one_world: None) -> None:
    verdict = replay(train(tmp_path, faults.attribute_set("scaling", 0.25)), tmp_path / "logs")

    assert verdict["outcome"] == "DIFFERS"
    results = verdict["trials"]["results"]
    assert len(results) > 5
    assert not any(result["agrees"] for result in results)


def test_a_replay_that_errs_itself_is_told_from_a_broken_job(
    tmp_path: Path, one_world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its packed rows have wrong positions; the rows as the job had them give the job's numbers."""

    def prepare_wrongly(*arguments: Any) -> ActorInputs:
        inputs = prepare_actor_inputs(*arguments)
        return replace(inputs, position_ids=inputs.position_ids * 2)

    job = train(tmp_path, lambda model: None)
    replace_layout(monkeypatch, prepare_wrongly)

    verdict = replay(job, tmp_path / "logs")

    assert (verdict["causes"][0]["name"], verdict["causes"][0]["sureness"]) == (CauseName.KERNEL, "probably")
    assert "the replay itself (sdpa, packed) computes other numbers" in verdict["causes"][0]["sentence"]


def test_a_sound_job_runs_no_trial(tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = replay(train(tmp_path, lambda model: None), tmp_path / "logs")

    assert (verdict["outcome"], verdict["trials"]) == ("REPRODUCED", None)
    assert "also ran" not in capsys.readouterr().out


# Which pass is run again


def make_passes(count: int) -> list[PassEvidence]:
    return [PassEvidence(record(index, grad_norm=1.0), None, ReplayedPass()) for index in range(count)]


def test_the_first_wrong_forward_is_run_again() -> None:
    assert find_pass_to_try(make_verdict((0, "", None), (1, LOSS, None), (2, LOSS, None)), [], steps=False) == 1


def test_a_gradient_that_is_wrong_first_needs_no_trial() -> None:
    assert find_pass_to_try(make_verdict((0, GRADIENT, 0), (1, LOSS, None)), [], steps=False) is None


def test_the_forward_comes_before_the_gradient_of_its_window() -> None:
    assert find_pass_to_try(make_verdict((0, GRADIENT, 0), (0, LOSS, None)), [], steps=False) == 0


def test_nothing_is_wrong() -> None:
    assert find_pass_to_try(make_verdict((0, "", None)), [], steps=False) is None


def test_after_a_step_of_the_replay_its_weights_are_not_there_any_more() -> None:
    verdict = make_verdict((0, "", None), (1, LOSS, None))

    assert find_pass_to_try(verdict, make_passes(2), steps=True) is None
    assert find_pass_to_try(verdict, make_passes(2), steps=False) == 1
    assert find_pass_to_try(make_verdict((0, LOSS, None)), make_passes(2), steps=True) == 0


def test_further_passes_of_the_same_weights_whose_loss_is_wrong_too() -> None:
    verdict = make_verdict(
        (0, LOSS, None), (1, "", None), (2, LOSS, None), (3, LOSS, None), (4, LOSS, None), (5, LOSS, None)
    )

    assert find_passes_to_confirm(verdict, make_passes(6), 0, steps=False) == [2, 3, 4]
    # Each pass of these ends a window, so under --step the weights are other ones from the second pass on.
    assert find_passes_to_confirm(verdict, make_passes(6), 0, steps=True) == []


def test_a_pass_behind_a_step_of_the_job_is_tried_only_on_weights_that_are_its_own() -> None:
    same = WeightComparison(compared=("a",), num_parameters=1)
    empty = RecordedPass(
        rank=0,
        forward_number=0,
        world_size=1,
        trains=True,
        claims=(),
        weight_comparison=same,
        num_frozen=0,
        dtypes=(),
        num_steps_before=3,
    )
    doubted = replace(empty, num_steps_before=4, weight_comparison=replace(same, doubt="the job had an adapter"))
    still = replace(empty, num_steps_before=4)
    recordings = [empty, doubted, still]
    passes = [PassEvidence(record(index), recorded, ReplayedPass()) for index, recorded in enumerate(recordings)]

    # The first pass may be doubted: the model folder is of its weights, as far as is known.
    first = [PassEvidence(record(0), replace(doubted, num_steps_before=3), ReplayedPass())]

    assert [may_have_other_weights(passes, index) for index in range(3)] == [False, True, False]
    assert not may_have_other_weights(first, 0)
