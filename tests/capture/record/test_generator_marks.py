from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from capture.file_format.capture_file import read_call
from capture.file_format.listing import capture_files
from capture.record.generator_marks import (
    CPU,
    count_drawn_numbers,
    mark_recorded_states,
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
