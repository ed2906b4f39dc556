from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from capture.file_format.capture_file import read_call
from capture.file_format.listing import capture_files
from capture.record.generator_marks import (
    CPU,
    NUM_QUIET,
    CpuStateFollower,
    PassKind,
    count_drawn_numbers,
    mark_recorded_states,
    mark_state,
    take_generator_snapshot,
)
from capture.record.job_facts import ModelDevices
from capture.recordings import recording


def draw_mask() -> None:
    nn.functional.dropout(torch.ones(4), 0.5)


def test_states_with_one_mark_drew_the_same_numbers() -> None:
    marks = []
    for num_masks in (1, 1, 2):
        torch.manual_seed(3)
        for _ in range(num_masks):
            draw_mask()
        marks.append(take_generator_snapshot().to_marks()[CPU])
    assert marks[0] == marks[1] != marks[2]


def test_numbers_are_counted_from_the_states_before() -> None:
    torch.manual_seed(3)
    before = bytes(torch.get_rng_state().tolist())
    torch.randint(0, 9, (5,))
    after = take_generator_snapshot().to_marks()
    assert count_drawn_numbers({"torch": {"cpu": before}}, after) == 5
    assert count_drawn_numbers({}, after) is None


class Dropping(nn.Module):
    """Drops out by chance, within a checkpoint: its backward draws the masks once more."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        dropped: torch.Tensor = checkpoint(self._drop, hidden, use_reentrant=False)
        return dropped.sum()

    def _drop(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(hidden, 0.5, self.training)


def test_a_capture_tells_where_the_generators_stood_after_its_forward_and_which_parts_trained(tmp_path: Path) -> None:
    model = Dropping()
    ends = []
    with recording(model, tmp_path, reproduce=True):
        for trains in (True, True, False):
            loss = model.train(trains)(input_ids=torch.arange(8).view(2, 4))
            ends.append(take_generator_snapshot().to_marks()[CPU])
            loss.backward()
    calls = [read_call(path) for path in capture_files(tmp_path)]
    assert [call.random_after[CPU] for call in calls] == ends
    moved = [mark_recorded_states(call.random)[CPU] != call.random_after[CPU] for call in calls]
    assert moved == [True, True, False]
    assert [call.training for call in calls] == [{"model": trains, "parts": []} for trains in (True, True, False)]


def test_the_device_of_a_pass_is_the_models_where_its_arguments_are_on_the_cpu() -> None:
    """As where DDP moves them."""
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
    on_cpu = {"input_ids": torch.ones(1, 2)}
    assert ModelDevices(model).find(on_cpu).device == torch.device("cpu")
    devices = ModelDevices(model)
    devices._accelerators = [torch.device("cuda", 0)]
    assert (devices.find(on_cpu).device, devices.are_several) == (torch.device("cuda", 0), False)
    devices._accelerators.append(torch.device("cuda", 1))
    assert devices.are_several


@pytest.mark.parametrize(
    ("draws", "num_begins_read", "wrong"),
    [
        ("nothing", NUM_QUIET, []),
        ("between passes", 2 * NUM_QUIET - 1, []),
        ("in forwards that train", 2 * NUM_QUIET, []),
        ("in forwards that train, behind others", NUM_QUIET + 6, []),
        # The forward that is the first of its kind to draw cannot be told from draws before it.
        ("in a forward", 2 * NUM_QUIET - 3, [NUM_QUIET + 2]),
    ],
)
def test_a_pass_has_the_state_of_the_cpus_generator_that_it_began_with_also_if_only_its_end_is_read(
    draws: str, num_begins_read: int, wrong: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_begin, real_get_state, num_read = CpuStateFollower.begin, torch.default_generator.get_state, 0

    def begin_on_gpu(follower: CpuStateFollower, kind: PassKind, may_wait: bool) -> torch.Tensor | None:
        return real_begin(follower, kind, may_wait=True)

    def get_state() -> torch.Tensor:
        nonlocal num_read
        num_read += 1
        return real_get_state()

    monkeypatch.setattr(CpuStateFollower, "begin", begin_on_gpu)
    monkeypatch.setattr(torch, "default_generator", SimpleNamespace(get_state=get_state))
    model = nn.Sequential(nn.Embedding(8, 4), nn.Dropout(0.5))
    before = []
    with recording(model, tmp_path, reproduce=True, arguments={"input": "input_ids"}):
        for number in range(2 * NUM_QUIET):
            if draws == "between passes":
                torch.rand(1)
            is_late = number >= NUM_QUIET + 2
            trains = draws == "in forwards that train" or (draws == "in forwards that train, behind others" and is_late)
            model.train(trains)
            model[1].train(trains or (draws == "in a forward" and number == NUM_QUIET + 2))
            before.append(mark_state(bytes(real_get_state().tolist())))
            model(torch.tensor([[1, 2]]))
    calls = [read_call(path) for path in capture_files(tmp_path)]
    recorded = [mark_recorded_states(call.random)[CPU] for call in calls]
    differs = [number for number, pair in enumerate(zip(recorded, before, strict=True)) if pair[0] != pair[1]]
    assert differs == wrong
    # Nothing is said of what a forward drew whose state may have changed in it or before it.
    unsaid = [number for number, call in enumerate(calls) if not call.random_after]
    assert unsaid == (wrong or ([NUM_QUIET] if draws == "between passes" else []))
    # Each end is read.
    assert num_read == 2 * NUM_QUIET + num_begins_read


def test_a_draw_in_a_pass_of_one_kind_has_passes_of_all_kinds_read_at_both_ends_again() -> None:
    follower, kinds = CpuStateFollower(), [(True, True), (False, False)]
    quiet, moved = torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)

    def run_pass(kind: PassKind, state_before: torch.Tensor, state_after: torch.Tensor) -> tuple[bool, bool]:
        """Return whether the state had to be read at the beginning, and whether the recorded one was wrong."""
        known = follower.begin(kind, may_wait=True)
        follower.note_begin(state_before if known is None else known)
        return known is None, follower.end(state_after) is not None

    for _ in range(NUM_QUIET):
        assert [run_pass(kind, quiet, quiet) for kind in kinds] == [(True, False)] * 2
    assert [run_pass(kind, quiet, quiet) for kind in kinds] == [(False, False)] * 2
    # Whether the forward drew or what came before it is not known.
    assert run_pass(kinds[0], quiet, moved) == (False, True)
    assert [run_pass(kind, moved, moved) for kind in kinds] == [(True, False)] * 2
    # On a CPU nothing waits for a device, and each state is read.
    assert follower.begin(kinds[0], may_wait=False) is None
    follower.note_begin(quiet)
    assert follower.end(moved) is None
