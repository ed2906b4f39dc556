"""What one rank alone cannot run is refused on all, before anything is written."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actor_init.spec import UsageError
from capture.file_format.capture_file import read_call, write_call
from replay.options.resolved import ChosenBy
from replay.options.spec import ReplaySpec
from replay.resolution.selection import Selection
from replay.resolution.windows import InputRound, JobPass
from replay.runner.run import select_for_loss
from tests.helpers.made_captures import write_pass
from tests.helpers.thread_ranks import CPU, call_on_ranks
from tests.helpers.typed import spec_of

SELECTION = Selection(inputs=[], num_left_out_passes=0, num_left_over=0, damaged=[], dealing="")


def test_inputs_that_one_rank_lacks_are_refused_on_all() -> None:
    def select_on(world: Any) -> Any:
        def select_inputs(spec: ReplaySpec) -> Selection:
            if world.rank == 1:
                raise UsageError("--inputs is no folder")
            return SELECTION

        return select_for_loss(ReplaySpec(), world, select_inputs)

    results = call_on_ranks(select_on, [CPU, CPU], limit=60)
    says = "on rank 1: --inputs is no folder"
    assert [(type(result), str(result)) for result in results] == [(UsageError, says)] * 2


def write_passes(folder: Path, has_labels: Sequence[bool]) -> list[Path]:
    """Write the first pass of each rank, with labels or without."""
    paths = []
    for rank, labels in enumerate(has_labels):
        path = write_pass(folder, rank=rank)
        call = read_call(path)
        if labels:
            ids_BS = call.tensors["sequences"]
            tensors = {"input_ids": ids_BS, "attention_mask": torch.ones_like(ids_BS), "labels": ids_BS}
            path.unlink()
            path = write_call(folder, tensors, {}, trains=True, origin=call.origin)
        paths.append(path)
    return paths


@pytest.mark.parametrize(
    ("labels", "objective", "typed", "by", "loss", "losses_counted"),
    [
        ([False, False], "policy", [], ChosenBy.JOB, "policy", ["auto"]),
        ([True, False], "policy", [], ChosenBy.JOB, "policy", ["auto", "policy"]),
        ([False, True], "policy", [], ChosenBy.JOB, "policy", ["auto", "policy"]),
        ([True, True], "policy", ["--loss", "policy"], ChosenBy.TYPED, "policy", ["policy"]),
        ([True, True], None, [], ChosenBy.JOB, "sft", ["auto"]),
    ],
)
def test_inputs_are_selected_again_on_all_ranks_or_on_none(
    labels: list[bool],
    objective: str | None,
    typed: list[str],
    by: ChosenBy,
    loss: str,
    losses_counted: list[str],
    tmp_path: Path,
) -> None:
    """Labels were counted before it was known that the job's loss is not theirs. A rank's first pass may have none."""
    paths = write_passes(tmp_path, labels)
    job_pass = JobPass(
        rank=0, forward=0, world_size=2, num_steps_before=0, step=None, loss_per_mean=1.0, objective=objective
    )
    rounds = [InputRound(trains=True, num_tokens=[1, 1], has_gradients=False, job_passes=[job_pass])]

    def select_on(world: Any) -> tuple[str, ChosenBy, list[str]]:
        counted: list[str] = []

        def select_inputs(spec: ReplaySpec) -> Selection:
            counted.append(spec.measure.loss)
            return replace(SELECTION, inputs=[paths[world.rank]], rounds=rounds)

        _, _, chosen = select_for_loss(spec_of(typed), world, select_inputs)
        return chosen.value, chosen.by, counted

    assert call_on_ranks(select_on, [CPU, CPU], limit=60) == [(loss, by, losses_counted)] * 2
