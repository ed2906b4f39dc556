"""What a replay says it measured is what was put in: known seconds and known memory, found in the right phase."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actor_init.schedule_and_norm import compute_total_norm
from replay.command_line.cli import main
from replay.objective.objective import compute_negated_mean
from replay.runlog.records import PassRecord
from replay.runner.meter import HostInstrument
from tests.helpers.made_time import at_the_meter
from tests.helpers.read_logs import read_log
from tests.helpers.replaced_parts import replace_stand_in_loss

SECONDS = 0.5
MEGABYTES = 300

pytestmark = pytest.mark.usefixtures("one_world")


def measure_replay(home: Path, monkeypatch: pytest.MonkeyPatch, loss: Callable[..., Tensor]) -> list[PassRecord]:
    replace_stand_in_loss(monkeypatch, loss)
    arguments = [
        "--dtype",
        "fp32",
        "--pick-inputs",
        "13,15,29",
        "--num-layers",
        "1",
        "--loss",
        "stand-in",
        "--log-folder",
        str(home),
    ]
    assert main([*arguments, "--log-folder", str(home)]) == 0
    (folder,) = home.iterdir()
    _, [_warm_up, *records] = read_log(folder)
    return records


def make_forward_loss(work: Callable[[], None]) -> Callable[..., Tensor]:
    def loss(log_probs_BA: Tensor, inputs: Any) -> Tensor:
        work()
        return compute_negated_mean(log_probs_BA, inputs)

    return loss


def make_backward_loss(work: Callable[[], None]) -> Callable[..., Tensor]:
    def loss(log_probs_BA: Tensor, inputs: Any) -> Tensor:
        log_probs_BA.register_hook(lambda _: work())
        return compute_negated_mean(log_probs_BA, inputs)

    return loss


def allocate() -> None:
    # Ones are written, so the memory becomes resident; it is freed on return.
    torch.ones(MEGABYTES * 2**20, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("place", "phase", "other"),
    [(make_forward_loss, "forward", "backward"), (make_backward_loss, "backward", "forward")],
)
def test_seconds_are_found_in_their_phase(
    place: Any, phase: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that stands still but for the work, and on a GPU, too, the host's."""
    clock = at_the_meter(monkeypatch, lambda _: HostInstrument())

    def work() -> None:
        clock.now += SECONDS

    for record in measure_replay(tmp_path, monkeypatch, place(work)):
        assert (record.cost.phases[phase].seconds, record.cost.phases[other].seconds) == (SECONDS, 0.0)
        assert record.cost.seconds == SECONDS


@pytest.mark.parametrize(
    ("place", "phase", "other"),
    [(make_forward_loss, "forward", "backward"), (make_backward_loss, "backward", "forward")],
)
def test_memory_is_found_in_its_phase(
    place: Any, phase: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for record in measure_replay(tmp_path, monkeypatch, place(allocate)):
        excess = record.cost.phases[phase].peak_allocated_bytes - record.cost.phases[other].peak_allocated_bytes
        # What else differs between the phases of a tiny model is less than the other fifth.
        assert excess >= 0.8 * MEGABYTES * 2**20


def test_the_norm_of_a_large_gradient_is_that_of_fp64() -> None:
    drawn = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0)) * 1e-4
    small = torch.full((3,), 0.5)
    wanted = torch.cat([drawn, small]).double().norm()
    torch.testing.assert_close(compute_total_norm([drawn, small]).double(), wanted, rtol=1e-9, atol=0)
    assert abs(drawn.norm() / drawn.double().norm() - 1) > 1e-5  # why it is not torch's own: that would be enough


def test_garbage_is_collected_in_passes_and_behind_a_run_that_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    measure_replay(tmp_path / "logs", monkeypatch, make_forward_loss(lambda: seen.append(gc.isenabled())))
    # The collections of a process that runs many go on to leave out what was imported.
    assert gc.get_freeze_count() > 100_000
    assert seen == [True, True, True]
    assert main(["--inputs", str(tmp_path / "nowhere")]) == 2
    assert gc.isenabled()
