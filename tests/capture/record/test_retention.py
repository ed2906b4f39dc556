"""What is kept: by rule, within limits, in the flight recorder, and when there was an incident."""

import contextlib
import json
import math
import os
import random
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import capture.black_box.black_box
import capture.black_box.flight_recorder
import capture.black_box.incidents
from capture import CaptureError, Recorder, capture_files, read_micro_batch, recording
from capture.black_box.black_box import SlowStepWatch
from capture.black_box.flight_recorder import find_dead_spools
from capture.black_box.incidents import read_incidents, scrub
from capture.file_format.capture_file import read_call
from capture.file_format.manifest import check_folder
from capture.record.random_states import restore_random_states
from capture.record.rank_writer import MANIFEST_BYTES_PER_FILE
from capture.record.retention import RetentionSettings, check_retention
from tests.helpers.small_jobs import TinyModel, steps_in

IDS_BS = torch.tensor([[0, 5, 9, 7], [3, 3, 0, 0]])


def assert_all_counted(recorder: Recorder) -> None:
    ends = recorder.num_written + recorder.num_dropped + recorder.num_skipped + recorder.num_not_kept
    assert recorder.num_seen == ends
    assert recorder.failure is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, list(range(12))),
        ({"every": 5}, [0, 5, 10]),
        ({"forwards": "3:6"}, [3, 4, 5]),
        ({"forwards": "9:"}, [9, 10, 11]),
        ({"forwards": ":2"}, [0, 1]),
        ({"forwards": range(3, 5)}, [3, 4]),
        ({"forwards": (3, 5)}, [3, 4]),
        ({"forwards": "2:9", "every": 3}, [2, 5, 8]),
        ({"passes": "train"}, list(range(0, 12, 2))),
        ({"passes": "rollout"}, list(range(1, 12, 2))),
        ({"passes": "train", "every": 2}, [0, 4, 8]),
        ({"ranks": "0,3"}, list(range(12))),
        ({"ranks": [1]}, []),
        ({"max_files": 3}, [0, 1, 2]),
        ({"max_files": 3, "keep": "last"}, [9, 10, 11]),
        ({"max_files": 2, "keep": "last", "every": 3}, [6, 9]),
        ({"reproduce": True}, list(range(12))),
        ({"flight_recorder": 3}, []),
    ],
)
def test_the_rules_say_which_passes_become_files(settings: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    model = TinyModel()
    with recording(model, tmp_path, **settings) as recorder:
        for step in range(12):
            with torch.set_grad_enabled(step % 2 == 0):
                model(IDS_BS)
    assert steps_in(tmp_path) == expected
    assert_all_counted(recorder)
    checked = check_folder(tmp_path)
    assert (checked.is_whole, checked.uncommitted, len(checked.good)) == (True, [], len(expected))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every must be an integer of 1 or more, not 0"),
        ({"max_files": 1.5}, "max_files must be an integer"),
        ({"flight_recorder": -1}, "flight_recorder must be"),
        ({"forwards": "100"}, "forwards must be FIRST:END, such as 100:200"),
        ({"forwards": "a:b"}, "forwards must be FIRST:END"),
        ({"forwards": range(0, 9, 2)}, "forwards must be FIRST:END"),
        ({"forwards": "5:5"}, "holds none"),
        ({"ranks": "0,x"}, "ranks must be numbers, such as 0,3"),
        ({"ranks": []}, "ranks must be numbers of 0 or more"),
        ({"passes": "eval"}, "passes must be one of all, train, rollout, not 'eval'"),
        ({"keep": "best"}, "keep must be one of first, last"),
        ({"keep": "last"}, "keep='last' needs a limit"),
        ({"slow_step": 1.0}, "slow_step must be more than 1"),
        ({"slow_step": "0s"}, "or seconds, as in 60s, not '0s'"),
        ({"slow_step": "soon"}, "slow_step must be more than 1, as in 3.0 for three times the median, or seconds"),
        ({"slow_step": "infs"}, "slow_step must be"),
    ],
)
def test_settings_that_are_none_are_refused_with_what_is_allowed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_retention(**settings)


def test_a_setting_that_is_none_is_refused(tmp_path: Path) -> None:
    unknown: dict[str, Any] = {"rings": 2}
    with pytest.raises(TypeError, match="no setting `rings`"):
        recording(TinyModel(), tmp_path, **unknown)
    with pytest.raises(TypeError, match="no setting `rings`"):
        check_retention(**unknown)


def test_the_flight_recorder_and_reproduction_go_together_unless_said() -> None:
    assert check_retention() == RetentionSettings()
    assert check_retention(flight_recorder=2).reproduce
    assert not check_retention(flight_recorder=2, reproduce=False).reproduce


@pytest.mark.parametrize("keep", ["first", "last"])
def test_a_thousand_steps_never_exceed_the_limits(keep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at whenever a file, under its temporary name too, has been written in full."""
    limits: dict[str, Any] = {"max_files": 20, "max_bytes": 20_000, "keep": keep}
    most = [0, 0]
    real_replace = os.replace

    def look(source: Any, target: Any) -> None:
        sizes = [path.stat().st_size for path in tmp_path.iterdir() if ".pkl" in path.name]
        charged = sum(sizes) + MANIFEST_BYTES_PER_FILE * len(sizes)
        everything = sum(path.stat().st_size for path in tmp_path.iterdir())
        most[:] = max(most[0], len(sizes)), max(most[1], charged, everything)
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    # The second recording is the job's restart.
    for _ in range(2):
        model = TinyModel()
        with recording(model, tmp_path, **limits, max_queued=1000) as recorder:
            for step in range(500):
                model(IDS_BS.repeat(1, 1 + step % 7))
        assert_all_counted(recorder)
    assert most[0] <= limits["max_files"]
    assert most[1] <= limits["max_bytes"]
    assert 5 < len(capture_files(tmp_path)) < limits["max_files"]
    assert steps_in(tmp_path)[0] == (0 if keep == "first" else 500 - len(capture_files(tmp_path)))
    assert check_folder(tmp_path).is_whole


@pytest.mark.parametrize("before", [{}, {"segment": 1500}], ids=["files before", "segments before"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"keep": "last"}, {"segment": 1500}, {"segment": 1500, "keep": "last"}],
    ids=["files", "last files", "segments", "last segments"],
)
def test_what_an_earlier_recording_left_takes_of_the_limit(
    settings: dict[str, Any], before: dict[str, Any], tmp_path: Path
) -> None:
    """Whether it wrote files or segments. The limit leaves 9 kB, and there are passes for far more."""

    def count_bytes() -> int:
        paths = [path for path in tmp_path.rglob("*") if path.suffix in (".pkl", ".seg", ".idx")]
        entries = MANIFEST_BYTES_PER_FILE * sum(path.suffix == ".pkl" for path in paths)
        return sum(path.stat().st_size for path in paths) + entries

    def record(num_passes: int, **settings: Any) -> Recorder:
        model = TinyModel()
        with recording(model, tmp_path, **settings, max_queued=100) as recorder:
            for _ in range(num_passes):
                model(IDS_BS)
        return recorder

    record(10, **before)
    limit = count_bytes() + 9_000
    with pytest.warns(RuntimeWarning, match="has passes of another recording"):
        recorder = record(60, **settings, max_bytes=limit)
    assert count_bytes() <= limit
    assert recorder.num_written > 3
    assert_all_counted(recorder)


def test_a_pass_larger_than_the_limit_gives_up_no_other(tmp_path: Path) -> None:
    model = TinyModel()
    with recording(model, tmp_path, max_bytes=6_000, keep="last") as recorder:
        model(IDS_BS)
        model(torch.randint(16, (64, 512)))
    assert steps_in(tmp_path) == [0]
    assert_all_counted(recorder)


def boom() -> RuntimeError:
    return RuntimeError("the kernel broke")


def test_an_exception_in_forward_writes_the_flight_recorder_with_the_pass_that_failed(tmp_path: Path) -> None:
    model = TinyModel()
    with recording(model, tmp_path, flight_recorder=3) as recorder:
        for _ in range(6):
            model(IDS_BS)
        with pytest.raises(RuntimeError):
            model(IDS_BS, fails_with=boom())
        assert recorder.flush()
        assert steps_in(tmp_path) == [4, 5, 6]
        model(IDS_BS)
    [record] = read_incidents(tmp_path)
    [found] = record.incidents
    assert (found.what, found.where, found.forward) == ("exception", "forward", 6)
    assert found.message == "RuntimeError: the kernel broke"
    assert "raise fails_with" in found.traceback
    assert sorted(found.files) == [path.name for path in capture_files(tmp_path)]
    assert check_folder(tmp_path).uncommitted == []
    assert_all_counted(recorder)


def test_an_exception_of_the_loop_is_told_once(tmp_path: Path) -> None:
    for where, fails_with in (("loop", None), ("forward", boom())):
        model, folder = TinyModel(), tmp_path / where
        with contextlib.suppress(RuntimeError), recording(model, folder, flight_recorder=2):
            for _ in range(3):
                model(IDS_BS)
            model(IDS_BS, fails_with=fails_with)
            raise RuntimeError("backward broke")
        [record] = read_incidents(folder)
        assert [found.where for found in record.incidents] == [where]
        assert steps_in(folder) == [2, 3]


def test_an_exception_that_is_being_handled_is_no_incident(tmp_path: Path) -> None:
    model = TinyModel()
    with recording(model, tmp_path, flight_recorder=2):
        try:
            raise boom()
        except RuntimeError:
            model(IDS_BS)
    assert read_incidents(tmp_path) == []


def test_out_of_memory_is_called_by_its_name(tmp_path: Path) -> None:
    model = TinyModel()
    with recording(model, tmp_path, flight_recorder=2), pytest.raises(torch.OutOfMemoryError):
        model(IDS_BS, fails_with=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert [found.what for found in read_incidents(tmp_path)[0].incidents] == ["out of memory"]
    assert steps_in(tmp_path) == [0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("way", ["output", "loss", "grad_norm"])
def test_a_number_that_is_not_finite_writes_the_flight_recorder(value: float, way: str, tmp_path: Path) -> None:
    model = TinyModel()
    with recording(model, tmp_path, flight_recorder=2) as recorder:
        for _ in range(3):
            model(IDS_BS)
        if way == "output":
            model(IDS_BS, scale=value)
        else:
            model(IDS_BS)
            recorder.note(**{way: torch.tensor(value)})
        assert recorder.flush()
        assert steps_in(tmp_path) == [2, 3]
    [found] = read_incidents(tmp_path)[0].incidents
    assert (found.what, found.where, found.forward) == ("not finite", "loss" if way == "output" else way, 3)


def test_a_job_that_goes_on_after_every_incident_does_not_fill_the_disk(tmp_path: Path) -> None:
    model = TinyModel()
    with recording(model, tmp_path, flight_recorder=2, max_queued=100) as recorder:
        for _ in range(30):
            model(IDS_BS, scale=math.nan)
            recorder.flush()
    [record] = read_incidents(tmp_path)
    assert (len(record.incidents), record.num_others) == (capture.black_box.black_box.MAX_INCIDENTS_PER_KIND, 22)
    assert len(capture_files(tmp_path)) == capture.black_box.black_box.MAX_INCIDENTS_PER_KIND
    assert_all_counted(recorder)


def test_a_step_that_hangs_is_written_while_it_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    real = capture.black_box.incidents.write_incidents

    def write_incidents(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        # On a busy machine another step may be slow too.
        if read_incidents(tmp_path)[0].incidents[-1].forward == 11:
            told.set()

    monkeypatch.setattr(capture.black_box.black_box, "write_incidents", write_incidents)
    model = TinyModel()
    with recording(model, tmp_path, flight_recorder=4, slow_step=50.0):
        for _ in range(12):
            model(IDS_BS)
        assert told.wait(60)
        assert steps_in(tmp_path)[-1] == 11
    found = read_incidents(tmp_path)[0].incidents[-1]
    assert (found.what, found.where, found.forward) == ("slow step", "step", 11)


def test_the_median_of_steps_decides_what_is_slow() -> None:
    now = [0.0]
    watch = SlowStepWatch(3.0, clock=lambda: now[0])
    for step in range(9):
        assert not watch.begin_step(step)
        now[0] += 1.0
    assert watch.seconds_left() == pytest.approx(2.0)
    assert watch.pop_slow_step() is None
    now[0] += 1.9
    assert not watch.begin_step(9)
    now[0] += 3.1
    assert watch.begin_step(10)
    late = watch.pop_slow_step()
    assert late is not None
    assert late[0] == 9
    assert "3 times the median are 3 s" in late[1]
    now[0] += 5
    assert watch.seconds_left() == 0
    assert (watch.pop_slow_step() or (None,))[0] == 10
    assert watch.pop_slow_step() is None
    assert watch.seconds_left() is None


@pytest.mark.parametrize(
    ("typed", "factor", "seconds"), [(3, 3.0, None), ("2.5", 2.5, None), ("60s", None, 60.0), ("0.5s", None, 0.5)]
)
def test_a_slow_step_is_so_many_times_the_median_or_seconds(
    typed: Any, factor: float | None, seconds: float | None
) -> None:
    keep = check_retention(slow_step=typed)
    assert (keep.slow_step, keep.slow_seconds) == (factor, seconds)


def test_a_limit_in_seconds_holds_from_the_first_step() -> None:
    now = [0.0]
    watch = SlowStepWatch(max_seconds=60.0, clock=lambda: now[0])
    assert watch.seconds_left() is None
    assert not watch.begin_step(0)
    now[0] += 59.0
    assert watch.seconds_left() == pytest.approx(1.0)
    assert watch.pop_slow_step() is None
    now[0] += 2.0
    assert watch.pop_slow_step() == (0, "61 s and more; the limit is 60 s")
    assert watch.pop_slow_step() is None


def test_a_generator_that_is_not_numpys_own_is_left_out(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy", minversion="1.24")
    before = numpy.random.get_bit_generator()
    model = TinyModel()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        with recording(model, tmp_path, reproduce=True) as recorder:
            model(IDS_BS), model(IDS_BS)
    finally:
        numpy.random.set_bit_generator(before)
    assert (recorder.failure, recorder.num_written) == (None, 2)
    assert all(set(read_call(path).random) == {"python", "torch"} for path in capture_files(tmp_path))


def test_outputs_settings_and_random_states_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy

    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    model, log_probs_BA = TinyModel(), torch.randn(2, 3).bfloat16()
    with recording(model, tmp_path, reproduce=True) as recorder:
        random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
        random.gauss(), numpy.random.normal()
        loss = model(IDS_BS)
        recorder.note(grad_norm=2.5, log_probs=log_probs_BA)
        drawn = random.random(), random.gauss(), float(numpy.random.normal()), torch.rand(3).tolist()
    [path] = capture_files(tmp_path)
    call = read_call(path)
    assert call.outputs["loss"] == loss.item()
    assert call.outputs["grad_norm"] == 2.5
    assert call.outputs["log_probs_row_sums"] == log_probs_BA.double().sum(1).tolist()
    assert isinstance(call.outputs["log_probs_crc32"], int)
    assert call.environment["NCCL_ALGO"] == "Ring"
    assert "torch.float32_matmul_precision" in call.environment
    restore_random_states(call.random)
    assert drawn == (random.random(), random.gauss(), float(numpy.random.normal()), torch.rand(3).tolist())
    with pytest.raises(ValueError, match="no random states"):
        restore_random_states({})


def test_what_cannot_be_noted_does_not_reach_the_job(tmp_path: Path) -> None:
    model = TinyModel()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with recording(model, tmp_path) as recorder:
            recorder.note(loss=1.0)
            model(IDS_BS)
            recorder.note(loss="high")
            model(IDS_BS)
        recorder.note(loss=math.nan)
    assert len(caught) == 1
    assert isinstance(recorder.failure, ValueError)


def test_nothing_of_the_host_is_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute paths and the environment's secrets, looked for in every byte that was written."""
    secrets = {"HF_TOKEN": "hf_a1b2c3d4", "WANDB_API_KEY": "0123456789abcdef", "DB_PASSWORD": "correct horse"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    model = TinyModel()
    model.config = type("Config", (), {"_name_or_path": "/data/models/llama", "to_dict": lambda _: dict(CONFIG)})()
    message = (
        f"cannot open '{tmp_path}/x.bin' with {secrets['HF_TOKEN']}, see https://example.com/a/b, /usr/lib/libc.so"
    )
    folder = tmp_path / "run"
    with recording(model, folder, flight_recorder=2) as recorder, pytest.raises(RuntimeError):
        model(IDS_BS, fails_with=RuntimeError(message))
    assert recorder.num_written == 1
    written = b"".join(path.read_bytes() for path in folder.iterdir())
    for forbidden in (*secrets.values(), str(tmp_path), "/data", "/usr/lib", str(Path.cwd()), os.uname().nodename):
        assert forbidden.encode() not in written, forbidden
    assert b"https://example.com/a/b" in written
    assert read_micro_batch(capture_files(folder)[0]).origin.model_name == "llama"
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


CONFIG = {"model_type": "tiny", "_name_or_path": "/data/models/llama", "nested": {"file": "/data/x"}}


def test_scrubbing_leaves_the_rest_alone() -> None:
    # Of a long text the end is kept, where an exception says what it is.
    assert scrub("a" * 30_000 + "the end") == "a" * 19_993 + "the end"
    assert scrub("a/b c/d.py 1/2 https://x.org/y/z") == "a/b c/d.py 1/2 https://x.org/y/z"
    assert scrub('File "/opt/v/lib/python3.11/site-packages/torch/nn/x.py"') == 'File "torch/nn/x.py"'
    assert scrub("PATH=/usr/bin:/home/me/bin") == "PATH=bin:bin"


BROKEN = {"format": 1, "rank": 0, "num_others": 0}


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}', json.dumps({**BROKEN, "incidents": [3]})])
def test_a_broken_record_of_incidents_is_refused_by_name(content: str, tmp_path: Path) -> None:
    name = "incidents_rank0_x.json"
    (tmp_path / name).write_text(content)
    with pytest.raises(CaptureError, match=name):
        read_incidents(tmp_path)


def test_two_models_are_captured_at_once(tmp_path: Path) -> None:
    models = [TinyModel(), TinyModel()]
    with (
        recording(models[0], tmp_path / "a", flight_recorder=2) as first,
        recording(models[1], tmp_path / "b") as second,
    ):
        for _ in range(3):
            for model in models:
                model(IDS_BS)
        with pytest.raises(RuntimeError):
            models[0](IDS_BS, fails_with=boom())
    assert (steps_in(tmp_path / "a"), steps_in(tmp_path / "b")) == ([2, 3], [0, 1, 2])
    assert_all_counted(first)
    assert_all_counted(second)


def test_a_training_thread_that_is_not_the_main_thread_records_and_reports(tmp_path: Path) -> None:
    hears: list[bool] = []

    def train() -> None:
        model = TinyModel()
        recorder = recording(model, tmp_path, flight_recorder=2)
        hears.append(recorder.handles_signals)
        try:
            for _ in range(5):
                model(IDS_BS)
            raise boom()
        finally:
            recorders.append(recorder)

    recorders: list[Recorder] = []
    said: list[Any] = []
    threading.excepthook, before = said.append, threading.excepthook
    try:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    finally:
        [recorder] = recorders
        recorder.close()
        assert threading.excepthook == said.append
        threading.excepthook = before
    assert len(said) == 1
    assert hears == [False]
    assert [found.where for found in read_incidents(tmp_path)[0].incidents] == ["another thread"]
    assert steps_in(tmp_path) == [3, 4]


def test_the_next_recording_saves_the_flight_recorder_of_a_process_that_died(
    tmp_path: Path, shared_memory: Path
) -> None:
    model, folder = TinyModel(), tmp_path / "run"
    with recording(model, folder, flight_recorder=3) as recorder:
        for _ in range(5):
            model(IDS_BS)
            recorder.note(grad_norm=0.5)
        recorder.flush()
        [spool] = shared_memory.iterdir()
        assert spool.stat().st_mode & 0o777 == 0o700
        assert len(list(spool.glob("*.pkl"))) == 3
        assert list(find_dead_spools(folder)) == []
        # An earlier process with this process's number would have left it so.
        copy = shared_memory / (spool.name[:-8] + "00000000")
        shutil.copytree(spool, copy)
        torn = max(copy.glob("*.pkl"))
        torn.write_bytes(torn.read_bytes()[:-9])
    assert list(shared_memory.iterdir()) == [copy]
    with recording(model, folder) as recorder:
        model(IDS_BS)
    assert list(shared_memory.iterdir()) == []
    assert steps_in(folder) == [0, 2, 3]
    [found] = read_incidents(folder)[0].incidents
    assert (found.what, found.forward, len(found.files), found.num_not_copied) == ("died", 4, 2, 1)
    assert read_call(folder / found.files[0]).outputs["grad_norm"] == 0.5
    assert check_folder(folder).uncommitted == []
    assert recorder.num_written == 1


def test_without_shared_memory_passes_are_in_memory_alone(tmp_path: Path, shared_memory: Path) -> None:
    model = TinyModel()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with recording(model, tmp_path / "run", flight_recorder=3) as recorder:
            model(IDS_BS)
            recorder.flush()
            shutil.rmtree(shared_memory)
            for _ in range(3):
                model(IDS_BS)
            recorder.note(loss=math.nan)
    assert len(caught) == 1
    assert "The flight recorder is in this process's memory alone" in str(caught[0].message)
    assert steps_in(tmp_path / "run") == [1, 2, 3]
    assert_all_counted(recorder)
