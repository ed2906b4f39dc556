"""Child processes: a failed one ends the others, a deaf one is killed, a signal to the launcher reaches the ranks."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from replay.processes.supervisor import ChildGroup, Process, start_process, wait_for_any
from tests.helpers.commands import LIMIT, ROOT
from tests.helpers.made_time import HOUR, an_hour_a_line
from tests.helpers.process_table import processes_left

FOR_EVER = "import signal\nwhile True: signal.pause()"
DEAF = f"""
import os, signal
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'heard\\n'))
os.write(1, b'here\\n')
{FOR_EVER}
"""


def python(code: str) -> Callable[[], Process]:
    return partial(start_process, [sys.executable, "-c", code], os.environ)


def codes(group: ChildGroup) -> list[int]:
    ended = [process.wait() if isinstance(process, subprocess.Popen) else None for process in group.processes]
    return [code for code in ended if code is not None]


def test_a_group_has_ended_well_when_all_have(tmp_path: Path) -> None:
    """The first ends once the second, which alone can write to it, has ended."""
    os.mkfifo(tmp_path / "second")
    path = str(tmp_path / "second")
    group = ChildGroup.start([python(f"open({path!r}).read()"), python(f"import os; os.open({path!r}, os.O_WRONLY)")])
    assert group.wait() == 0
    assert codes(group) == [0, 0]


def test_where_one_fails_the_group_is_over_and_the_others_are_ended() -> None:
    group = ChildGroup.start([python(FOR_EVER), python("raise SystemExit(3)")])
    assert group.wait() == 3
    group.end(grace=LIMIT)
    assert codes(group) == [-signal.SIGTERM, 3]
    # So the exit code has to be asked for before the others are ended.
    assert group.exit_code == -signal.SIGTERM


def test_after_its_time_a_group_is_over_and_what_does_not_hear_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output"
    an_hour_a_line(output, monkeypatch)
    with output.open("wb") as file:
        begin = partial(start_process, [sys.executable, "-c", DEAF], os.environ, output=file)
        group = ChildGroup.start([begin], limit=0.9 * HOUR)
    assert group.wait() is None
    assert output.read_text() == "here\n"
    group.end(grace=0.9 * HOUR)
    assert output.read_text() == "here\nheard\n"
    assert codes(group) == [-signal.SIGKILL]


def test_what_a_child_has_started_is_ended_with_it(tmp_path: Path) -> None:
    said = tmp_path / "said"
    os.mkfifo(said)
    inner = f"open({str(said)!r}, 'w').write('here')\n{FOR_EVER}"
    group = ChildGroup.start([python(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {inner!r}])")])
    # Reading returns once the other end has written and closed it.
    assert said.read_text() == "here"
    group.end(grace=LIMIT)
    assert processes_left(str(said), LIMIT) == []


def test_where_one_cannot_be_started_those_before_it_are_ended() -> None:
    begun: list[Process] = []

    def first() -> Process:
        begun.append(python(FOR_EVER)())
        return begun[0]

    def second() -> Process:
        raise OSError("no such program")

    with pytest.raises(OSError, match="no such program"):
        ChildGroup.start([first, second])
    [process] = begun
    assert isinstance(process, subprocess.Popen)
    assert process.wait(LIMIT) in (-signal.SIGTERM, -signal.SIGKILL)


def test_the_first_group_that_is_over_is_waited_for() -> None:
    long, short = ChildGroup.start([python(FOR_EVER)]), ChildGroup.start([python("")])
    wait_for_any([long, short])
    assert (long.is_over, short.is_over) == (False, True)
    long.end(grace=LIMIT)


# as torchrun


def launch_ranks(tmp_path: Path, program: str) -> subprocess.Popen[bytes]:
    """Two ranks of `program`, started as `replay --tp 2` starts its own."""
    path = tmp_path / "rank.py"
    path.write_text(program)
    code = (
        "import os, sys; from replay.processes.launch import start_processes\n"
        f"code = start_processes(2, [{str(path)!r}]); print('code', code, flush=True); os._exit(0)"
    )
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)


def test_ranks_are_told_who_they_are_and_the_exit_code_is_that_of_the_one_that_failed(tmp_path: Path) -> None:
    lines = [
        "import os, signal, sys",
        "own = [os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')]",
        "os.write(1, f'{own}\\n'.encode())",
        "if own[0] == '1': sys.exit(7)",
        "signal.pause()",
    ]
    output, _ = launch_ranks(tmp_path, "\n".join(lines)).communicate(timeout=LIMIT)
    said = output.decode().splitlines()
    assert said[-1] == "code 7"
    assert "['1', '1', '2', '2']" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_outlives_a_signal_that_comes_as_it_starts(tmp_path: Path, rank: int) -> None:
    """The signal comes once the rank's process is there, and before anybody has been given it."""
    path = tmp_path / "rank.py"
    path.write_text(FOR_EVER)
    lines = [
        "import os, signal",
        "from replay.processes import launch",
        "started, start_process = [], launch.start_process",
        "def start(*arguments):",
        "    started.append(start_process(*arguments))",
        f"    if len(started) == {rank + 1}: signal.raise_signal(signal.SIGTERM)",
        "    return started[-1]",
        "launch.start_process = start",
        f"code = launch.start_processes(2, [{str(path)!r}])",
        "left = [process for process in started if process.poll() is None]",
        "for process in left: process.kill()",
        "print(code, len(started), len(left), flush=True)",
        "os._exit(0)",
    ]
    output = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, stdout=subprocess.PIPE, check=True
    ).stdout
    assert output.split() == [str(128 + signal.SIGTERM).encode(), b"2", b"0"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_goes_on_to_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    lines = [
        "import os, signal",
        # A signal that came right before signal.pause() would not end it.
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}])",
        "os.write(1, b'here\\n')",
        f"heard = signal.sigwait([{int(number)}])",
        "os.write(1, f'heard {int(heard)}\\n'.encode())",
        "os._exit(1)",
    ]
    with launch_ranks(tmp_path, "\n".join(lines)) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"here\n"] * 2
        process.send_signal(number)
        said = process.stdout.read().decode().splitlines()
    assert said == [f"heard {int(number)}"] * 2 + [f"code {128 + number}"]
