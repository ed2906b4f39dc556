"""`import capture.auto`: nothing without its variable; with it, what `capture run` records."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from capture import capture_files, read_micro_batch
from capture.auto import VARIABLE, record_into
from replay.processes.launch import without_launcher
from tests.capture.test_run import LAUNCHING, MODEL, ROOT, capture_run
from tests.warm import warm_bin

JOB = MODEL.replace("import sys\n", "import sys\nimport capture.auto\n")
TRAINING = "Tiny()(ids)\n"


def run_job(folder: Path, script: str, *, into: str = "kept", cold: bool = False) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(JOB + script)
    environment = {**without_launcher(os.environ), "PYTHONPATH": str(ROOT), VARIABLE: into}
    python = sys.executable if cold else str(warm_bin() / "python")
    return subprocess.run(
        [python, "job.py", "--lr", "1"], cwd=folder, env=environment, capture_output=True, text=True, timeout=1800
    )


def test_without_the_variable_nothing_is_imported_and_nothing_changed() -> None:
    probe = (
        "import os, subprocess, sys; modules, variables = set(sys.modules), dict(os.environ); "
        "started, hook = subprocess.Popen.__init__, sys.excepthook; import capture.auto; "
        "names = [name for name in set(sys.modules) - modules if name.split('.')[0] not in sys.stdlib_module_names]; "
        "print(sorted(names), os.environ == variables, subprocess.Popen.__init__ is started, sys.excepthook is hook)"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['capture', 'capture.auto'] True True True\n"


def test_with_the_variable_the_job_is_recorded_as_capture_run_would(tmp_path: Path) -> None:
    script = "import os\nos.chdir('..')\n" + TRAINING
    done = run_job(tmp_path, script)
    assert done.returncode == 0
    assert done.stderr == f"capture: 1 pass of Tiny, in {tmp_path / 'kept'}\n"
    capture_run(tmp_path, script, "--to", "typed", "job.py")
    batches = [read_micro_batch(*capture_files(tmp_path / folder)) for folder in ("kept", "typed")]
    assert [batch.sequences_BS.tolist() for batch in batches] == [[[1] * 4] * 2] * 2
    kept, typed = (batch.origin for batch in batches)
    assert (kept.rank, kept.step) == (typed.rank, typed.step) == (0, 0)


def test_the_job_s_error_is_its_own_and_the_last_line_is_ours(tmp_path: Path) -> None:
    done = run_job(tmp_path, TRAINING + "raise ValueError('broke')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-2:] == ["ValueError: broke", f"capture: 1 pass of Tiny, in {tmp_path / 'kept'}"]


def test_where_no_model_is_trained_the_last_line_says_so(tmp_path: Path) -> None:
    done = run_job(tmp_path, "")
    assert done.returncode == 0
    assert done.stderr.startswith("capture: nothing recorded: no causal LM (a module")
    assert not (tmp_path / "kept").exists()


def test_under_capture_run_the_line_does_nothing(tmp_path: Path) -> None:
    script = "import capture.auto\n" + TRAINING
    done = capture_run(tmp_path, script, "--to", "typed", "job.py", MICRO_REPLAY_CAPTURE="kept")
    assert done.stderr.count("capture: ") == 1
    assert len(capture_files(tmp_path / "typed")) == 1
    assert not (tmp_path / "kept").exists()


@pytest.mark.slow
@pytest.mark.parametrize("way", LAUNCHING)
def test_ranks_that_the_job_starts_are_recorded_once_each(way: str, tmp_path: Path) -> None:
    lines = LAUNCHING[way].split("\n")
    done = run_job(tmp_path, "\n".join(line[8:] for line in lines), cold=way == "spawn")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("capture: ") == 1
    assert [read_micro_batch(path).origin.rank for path in capture_files(tmp_path / "kept")] == [0, 1], done.stderr


@pytest.mark.parametrize(
    ("typed", "reason"), [("", "MICRO_REPLAY_CAPTURE is empty"), ("file", "MICRO_REPLAY_CAPTURE=file is no folder")]
)
def test_a_bad_value_is_one_line_and_the_job_goes_on(
    typed: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    record_into(typed)
    advice = "Give a folder, as in MICRO_REPLAY_CAPTURE=inputs/my-run"
    assert capsys.readouterr().err == f"capture: nothing is recorded, the job goes on: {reason}. {advice}\n"


@pytest.mark.parametrize(("rank", "num_lines"), [("0", 1), ("1", 0)])
def test_a_recorder_that_cannot_begin_is_one_line_of_rank_0(
    rank: str,
    num_lines: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(folder: Path) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr("capture.run.record_this_process", fail)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv(VARIABLE, "as it was")
    record_into(str(tmp_path / "kept"))
    line = "capture: nothing is recorded, the job goes on: RuntimeError: not today\n"
    assert capsys.readouterr().err == line * num_lines
