"""The names of what a pass has, read without torch, are those of the reader that decodes it."""

from pathlib import Path

import pytest
import torch

from capture.file_format.capture_file import read_call
from capture.file_format.listing import list_single_pass_files
from replay.options.recorded_names import NUM_READ, read_first_names
from tests.helpers.planned_jobs import Planned, record_job
from tests.helpers.policy_job import train

ROOT = Path(__file__).resolve().parents[3]


def test_the_names_are_those_of_the_first_training_passes(tmp_path: Path) -> None:
    folder = train(tmp_path, notes=("action_mask", "advantages")) / "captures"
    calls = [call for path in list_single_pass_files(folder) if (call := read_call(path)).trains]
    passes = read_first_names(folder)
    assert 1 < len(passes) <= NUM_READ
    for recorded, call in zip(passes, calls, strict=False):
        assert recorded.tensors == {*call.tensors, *call.notes}
        assert (recorded.source, recorded.left_out) == (call.origin.source, call.left_out)
    assert "advantages" in passes[0].tensors


def test_nothing_is_told_of_what_only_torch_can_read_or_nobody(tmp_path: Path) -> None:
    assert read_first_names(tmp_path / "nowhere") == []
    assert read_first_names(tmp_path) == []
    plan = [Planned()] * 2
    assert read_first_names(record_job(tmp_path / "segments", [plan, plan], segment="1MB")) == []
    whole = record_job(tmp_path / "whole", [plan, plan])
    assert len(read_first_names(whole)) == 2
    [first, *_] = list_single_pass_files(whole)
    first.write_bytes(first.read_bytes()[:-10])
    assert read_first_names(whole) == []


@pytest.mark.filterwarnings("ignore:.*passes of another recording")
def test_of_two_recordings_a_replay_chooses_one(tmp_path: Path) -> None:
    for _ in range(2):
        record_job(tmp_path, [[Planned()] * 2])
    assert read_first_names(tmp_path) == []


def test_a_class_is_built_of_no_file(tmp_path: Path) -> None:
    torch.save({"tensors": {}}, tmp_path / "actor_inputs_rank0_x.pkl")
    assert read_first_names(tmp_path) == []
