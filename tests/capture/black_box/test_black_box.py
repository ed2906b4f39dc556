"""What the black box writes of what a recording tells it, with a recording that holds nothing."""

import math
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import capture.black_box.black_box
import capture.black_box.flight_recorder
from capture.black_box.black_box import MAX_INCIDENTS_PER_KIND, MAX_SIGNALS_PER_KIND, BlackBox, SlowStepWatch
from capture.black_box.flight_recorder import SharedFolder, Spool
from capture.black_box.incidents import Incident, make_incident, read_incidents, write_incidents
from capture.black_box.position_page import LastPosition, read_position
from capture.black_box.salvage import salvage
from capture.black_box.signal_handlers import SignalReport
from capture.file_format.capture_file import EncodedCall
from capture.record.observer import JobPosition, TrainingPhase
from capture.record.retention import check_retention
from tests.helpers.made_captures import make_call


class Held:
    """A recording in whose memory nothing is held, and whose writer does at once what it is given."""

    rank, world_size, opened = 0, 2, "2026-03-02T09:00:00.000000+00:00"

    def __init__(self, folder: Path) -> None:
        self.position = JobPosition()
        self.rank_and_folder = 0, folder
        self.files: list[Path] = []
        self.num_commits = 0

    def flush(self, *, max_seconds: float) -> bool:
        return True

    def run_in_writer(self, action: Callable[[], None]) -> None:
        action()

    def write_held(self) -> list[Path]:
        files, self.files = self.files, []
        return files

    def commit(self) -> None:
        self.num_commits += 1


@pytest.fixture
def recording(tmp_path: Path, shared_memory: Path) -> Held:
    (tmp_path / "run").mkdir()
    return Held(tmp_path / "run")


@pytest.fixture
def box(recording: Held) -> Iterator[BlackBox]:
    box = BlackBox(recording.rank_and_folder[1], check_retention(flight_recorder=2))
    box.on_open(recording)
    yield box
    box.on_end(failed=False)
    box.on_close()


def list_incidents(recording: Held) -> list[Incident]:
    return [incident for record in read_incidents(recording.rank_and_folder[1]) for incident in record.incidents]


def test_a_copy_that_was_lost_is_told_with_the_next_incident_alone(box: BlackBox, recording: Held) -> None:
    box.on_lost_copy()
    box.on_lost_copy()
    for forward in range(2):
        box.on_outputs(forward, {"loss": math.nan})
    box.on_lost_copy()
    box.on_outputs(2, {"grad_norm": math.inf})
    assert [incident.num_not_copied for incident in list_incidents(recording)] == [2, 0, 1]


def test_each_incident_names_the_files_that_were_written_for_it_and_they_are_committed(
    box: BlackBox, recording: Held
) -> None:
    recording.files = [Path("a.pkl"), Path("b.pkl")]
    box.on_outputs(4, {"loss": -math.inf})
    box.on_outputs(5, {"loss": math.nan})
    first, second = list_incidents(recording)
    assert (first.files, first.forward, first.message) == (["a.pkl", "b.pkl"], 4, "loss is -inf")
    assert (second.files, second.forward, second.message) == ([], 5, "loss is nan")
    assert recording.num_commits == 2


def test_a_number_that_is_told_again_is_one_incident_and_another_number_of_the_pass_is_another(
    box: BlackBox, recording: Held
) -> None:
    told: list[tuple[int, dict[str, Any]]] = [
        (3, {"loss": math.nan}),
        (3, {"loss": math.nan}),
        (3, {"grad_norm": math.nan}),
        (4, {"loss": 1.0, "grad_norm": 0.0}),
        (4, {"noted_loss": math.inf, "log_probs_row_sums": [math.nan]}),
        (5, {"loss": math.nan, "grad_norm": math.nan}),
    ]
    for forward, outputs in told:
        box.on_outputs(forward, outputs)
    assert [(incident.forward, incident.where) for incident in list_incidents(recording)] == [
        (3, "loss"),
        (3, "grad_norm"),
        (4, "loss"),
        (5, "loss"),
        (5, "grad_norm"),
    ]


def test_each_kind_of_incident_has_a_limit_of_its_own(box: BlackBox, recording: Held) -> None:
    num_signals = MAX_SIGNALS_PER_KIND + 3
    for forward in range(MAX_INCIDENTS_PER_KIND + 2):
        box.on_outputs(forward, {"loss": math.nan})
    box.on_outputs(99, {"grad_norm": math.nan})
    for _ in range(num_signals):
        box.on_signal(signal.SIGUSR1, SignalReport())
    kinds = [(incident.what, incident.where) for incident in list_incidents(recording)]
    assert kinds.count(("not finite", "loss")) == MAX_INCIDENTS_PER_KIND
    assert kinds.count(("not finite", "grad_norm")) == 1
    assert kinds.count(("signal", "SIGUSR1")) == MAX_SIGNALS_PER_KIND
    # Those that were not written are counted, of all kinds together; the end of the recording writes the count.
    box.on_end(failed=False)
    [record] = read_incidents(recording.rank_and_folder[1])
    assert record.num_others == 2 + 3


def test_the_end_of_a_process_that_was_asked_for_is_no_incident(box: BlackBox, recording: Held) -> None:
    box.on_error(SystemExit(3), "loop")
    box.handles_signals = True
    # Its signal was reported.
    box.on_error(KeyboardInterrupt(), "loop")
    assert list_incidents(recording) == []
    box.handles_signals = False
    box.on_error(KeyboardInterrupt(), "loop")
    box.handles_signals = True
    error = ValueError("broken")
    for where in ("forward", "loop"):
        box.on_error(error, where)
    assert [(incident.what, incident.where, incident.message) for incident in list_incidents(recording)] == [
        ("exception", "loop", "KeyboardInterrupt: "),
        ("exception", "forward", "ValueError: broken"),
    ]


@pytest.mark.parametrize("forward", [-1, 0, 3])
def test_an_incident_names_the_forward_that_began_last_if_there_was_one(
    forward: int, box: BlackBox, recording: Held
) -> None:
    recording.position.forward = forward
    recording.position.last_backward = forward - 1
    box.on_signal(signal.SIGUSR1, SignalReport())
    box.on_error(ValueError("broken"), "loop")
    for incident in list_incidents(recording):
        assert incident.forward == (forward if forward >= 0 else None)
        assert incident.last_backward == (forward - 1 if forward >= 1 else None)
        assert (incident.world_size, incident.opened) == (2, Held.opened)
    assert len(list_incidents(recording)) == 2


@pytest.mark.parametrize(("settings", "num_kept"), [({"flight_recorder": 2}, 1), ({"reproduce": True}, 0)])
def test_passes_are_kept_in_shared_memory_with_a_flight_recorder_alone(
    settings: dict[str, Any], num_kept: int, recording: Held, tmp_path: Path, shared_memory: Path
) -> None:
    box = BlackBox(tmp_path / "run", check_retention(**settings))
    box.on_open(recording)
    box.on_hold(encode(0))
    box.on_hold(encode(1))
    box.on_release(encode(0))
    box.on_idle()
    [directory] = shared_memory.iterdir()
    assert len(list(directory.glob("*.pkl"))) == num_kept
    box.on_release(encode(1))
    assert list(directory.glob("*.pkl")) == []
    box.on_end(failed=True)
    box.on_close()


def test_a_step_lasts_from_one_forward_to_the_next_and_a_slow_one_is_told_once(
    recording: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    watch = partial(SlowStepWatch, clock=lambda: now[0])
    monkeypatch.setattr(capture.black_box.black_box, "SlowStepWatch", watch)
    box = BlackBox(tmp_path / "run", check_retention(slow_step="60s"))
    box.on_open(recording)
    phases: tuple[TrainingPhase, ...] = ("in forward", "after forward", "in backward", "in the optimizer's step")
    for forward, seconds in enumerate((5.0, 14.0, 16.0, 5.0)):
        for phase in phases:
            recording.position = JobPosition(forward=forward, phase=phase)
            box.on_position_change()
            now[0] += seconds
    assert [
        (incident.what, incident.where, incident.forward, incident.message) for incident in list_incidents(recording)
    ] == [("slow step", "step", 2, "64 s and more; the limit is 60 s")]
    assert box.seconds_left() == 40.0
    now[0] += 50.0
    assert box.seconds_left() == 0.0
    for _ in range(2):
        box.on_deadline()
    assert [incident.forward for incident in list_incidents(recording)] == [2, 3]
    assert box.seconds_left() is None
    box.on_end(failed=False)
    box.on_close()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/older/trace_"}, "/older/trace_"),
        ({"TORCH_FR_DUMP_TEMP_FILE": "/newer/trace_"}, "/newer/trace_"),
        # torch looks at the newer name first.
        (
            {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/older/trace_", "TORCH_FR_DUMP_TEMP_FILE": "/newer/trace_"},
            "/newer/trace_",
        ),
    ],
)
def test_the_position_tells_where_nccls_flight_recorder_writes(
    variables: dict[str, str],
    expected: str | None,
    recording: Held,
    shared_memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    box = BlackBox(recording.rank_and_folder[1], check_retention())
    box.on_open(recording)
    page = read_page(shared_memory)
    assert (page.trace_file, page.main_thread) == (expected, threading.main_thread().ident)
    box.on_end(failed=False)
    box.on_close()


def read_page(shared_memory: Path) -> LastPosition:
    [directory] = shared_memory.iterdir()
    position = read_position(directory)
    assert position is not None
    return position


def test_the_position_outlives_the_process_and_says_whether_its_end_was_reported(
    box: BlackBox, recording: Held, shared_memory: Path
) -> None:
    page = read_page(shared_memory)
    assert (page.forward, page.last_backward, page.phase) == (None, None, "before any forward")
    assert (page.rank, page.world_size, page.opened, page.was_reported) == (0, 2, Held.opened, False)
    recording.position = JobPosition(forward=3, last_backward=2, phase="in forward")
    box.on_position_change()
    page = read_page(shared_memory)
    assert (page.forward, page.last_backward, page.phase) == (3, 2, "in forward")
    # The job goes on after a number that is not finite, and after SIGUSR1.
    box.on_outputs(3, {"loss": math.nan})
    box.on_signal(signal.SIGUSR1, SignalReport())
    assert not read_page(shared_memory).was_reported
    box.on_error(ValueError("broken"), "loop")
    assert read_page(shared_memory).was_reported
    recording.position.phase = "after forward"
    box.on_position_change()
    assert read_page(shared_memory).was_reported
    # The job has gone on all the same: what ends it now is something else.
    recording.position.phase, recording.position.forward = "in forward", 4
    box.on_position_change()
    assert not read_page(shared_memory).was_reported
    box.on_signal(signal.SIGTERM, SignalReport())
    assert read_page(shared_memory).was_reported
    box.on_end(failed=False)
    assert list(shared_memory.iterdir()) == []
    assert [(incident.what, incident.forward) for incident in list_incidents(recording)] == [
        ("not finite", 3),
        ("signal", 3),
        ("exception", 3),
        ("signal", 4),
    ]


def test_incidents_are_read_in_the_order_in_which_they_began_on_any_rank(tmp_path: Path) -> None:
    """By the earliest time of a record, whichever folder it lies in, and not by the file's name or its last time."""
    minutes: dict[tuple[int, str], list[int]] = {(0, "a"): [5, 30], (10, "a"): [7], (2, "a"): [3, 9], (2, "b"): [2, 40]}
    for (rank, stamp), times in minutes.items():
        incidents = [
            replace(make_incident("signal", "SIGUSR1", minute), time=f"2026-03-02T09:{minute:02d}:00")
            for minute in times
        ]
        folder = tmp_path if rank == 0 else tmp_path / f"rank{rank}"
        write_incidents(folder, incidents, num_others=rank, rank=rank, stamp=stamp)
    write_incidents(tmp_path, [], num_others=0, rank=5, stamp="a")
    records = read_incidents(tmp_path)
    assert [(record.rank, [incident.forward for incident in record.incidents]) for record in records] == [
        (5, []),
        (2, [2, 40]),
        (2, [3, 9]),
        (0, [5, 30]),
        (10, [7]),
    ]
    assert [record.num_others for record in records] == [0, 2, 2, 0, 10]


def encode(step: int, *, num_noted: int = 0) -> EncodedCall:
    ids_BS = torch.arange(64).view(2, 32) * 1009
    return make_call(ids_BS, step=step, outputs={"log_probs_values": [0.5] * num_noted}).encode()


@pytest.fixture
def shared(tmp_path: Path, shared_memory: Path) -> Iterator[SharedFolder]:
    folder = SharedFolder(tmp_path / "run", 0)
    yield folder
    folder.close()


def test_a_full_spool_deletes_its_oldest_pass_and_a_pass_that_is_put_again_counts_once(
    shared: SharedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(map(len, encode(0).pickle_parts()))
    monkeypatch.setattr(capture.black_box.flight_recorder, "MAX_SPOOL_BYTES", 3 * size + 20)
    spool = Spool(shared)

    def list_steps() -> list[int]:
        return sorted(int(path.stem.rpartition("_")[2]) for path in shared.directory.iterdir())

    for step in (0, 0, 0, 1, 1, 2):
        spool.put(encode(step))
    assert list_steps() == [0, 1, 2]
    # What was put again last is the newest.
    spool.put(encode(0))
    spool.put(encode(3))
    assert list_steps() == [0, 2, 3]
    spool.remove(encode(2))
    spool.remove(encode(2))
    spool.put(encode(4))
    assert list_steps() == [0, 3, 4]
    # A pass that has grown makes room as a new one does, and is there as it is now.
    grown = encode(4, num_noted=size // 10)
    spool.put(grown)
    assert list_steps() == [3, 4]
    assert (shared.directory / grown.name).read_bytes() == b"".join(grown.pickle_parts())
    # One that is larger than all of it takes nobody's place, and is not there as it was before.
    for step in (5, 4):
        spool.put(encode(step, num_noted=4 * size))
    assert list_steps() == [3]
    spool.close()
    assert list_steps() == []


def leave_as_a_dead_process(shared_memory: Path) -> Path:
    """Copy the spool to where an earlier process with this process's number would have left it."""
    [spool] = shared_memory.iterdir()
    return Path(shutil.copytree(spool, shared_memory / (spool.name[:-8] + "00000000")))


@pytest.mark.parametrize("has_position", [True, False])
def test_what_a_dead_process_left_is_written_with_its_position_or_its_last_pass(
    has_position: bool, box: BlackBox, recording: Held, tmp_path: Path, shared_memory: Path
) -> None:
    recording.position = JobPosition(forward=7, last_backward=6, phase="after forward")
    box.on_position_change()
    for step in (3, 5):
        box.on_hold(encode(step))
    box.on_idle()
    copy = leave_as_a_dead_process(shared_memory)
    if not has_position:
        (copy / "position").unlink()
    assert salvage(tmp_path / "run", check_retention()) == 2
    [incident] = list_incidents(recording)
    assert (incident.what, incident.where, len(incident.files)) == ("died", "without a word", 2)
    assert incident.forward == (7 if has_position else 5)
    assert (incident.last_backward, incident.world_size) == ((6, 2) if has_position else (None, None))
    assert not copy.exists()
    assert salvage(tmp_path / "run", check_retention()) == 0


def test_what_cannot_be_written_stays_in_memory_for_a_user_who_may(
    box: BlackBox, tmp_path: Path, shared_memory: Path
) -> None:
    box.on_hold(encode(3))
    box.on_idle()
    copy = leave_as_a_dead_process(shared_memory)
    # As on a full disk.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            salvage(tmp_path / "run", check_retention())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in copy.iterdir() if path.suffix == ".pkl"] == [encode(3).name]
    assert salvage(tmp_path / "run", check_retention()) == 1
    assert not copy.exists()
