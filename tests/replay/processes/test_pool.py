"""Runs in processes of their own: forked from one that has their imports, on GPUs of their own, ended when over."""

import multiprocessing.forkserver
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replay.command_line.cli import parse_command_line
from replay.options.spec import MeasureSpec, ReplaySpec
from replay.processes import forkserver
from replay.processes.child_job import ChildJob
from replay.processes.launch import list_gpus
from replay.processes.pool import GRACE_SECONDS, ProcessResult, Task, run_children
from replay.runlog.reader import PastRun
from tests.helpers.commands import ROOT
from tests.helpers.made_time import Clock, an_hour_a_line
from tests.warm import warm_bin

pytestmark = pytest.mark.usefixtures("fork_server_as_a_users")

WAIT = "time.sleep(0.01)"


class Programs:
    """Puts a program of a test in the place of `replay`, and makes tasks of it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch

    def write(self, *lines: str) -> Path:
        path = self._folder / "program.py"
        words = "first, *more = json.load(open(sys.argv[2]))['spec']['measure']['name'].split()"
        path.write_text("\n".join(["import json, os, sys, time", words, *lines]))
        self._monkeypatch.setattr("replay.processes.pool.PROGRAM", path)
        return path

    def task(self, name: str, *arguments: str, num_processes: int = 1, limit: float = 600.0) -> Task:
        words = " ".join([name, *arguments])
        spec = ReplaySpec(measure=MeasureSpec(name=words, log_folder=self._folder / "logs" / name))
        return Task(
            job=ChildJob(spec=spec),
            num_processes=num_processes,
            output=self._folder / "out" / name,
            limit=limit,
        )


def run_child(task: Task, grace: float = GRACE_SECONDS) -> ProcessResult:
    [(_, child)] = run_children([(None, task)], at_once=1, grace=grace)
    return child


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(tmp_path, monkeypatch)


def test_what_is_imported_already_is_no_state_of_any_run(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "more",
        "__name__",
        "'deepspeed' in sys.modules and 'replay.runner.run' in sys.modules",
        # Made once, in their server.
        "sorted(kind.__name__ for kind in sys.modules['actor_init.as_json']._ADAPTERS)",
        "sys.modules['replay.runlog.writer']._find_version.cache_info().currsize > 0",
        "sys.modules['torch'].distributed.is_initialized()",
        "len(os.listdir('/proc/self/task'))",  # threads
        "os.getsid(0) == os.getpid()",
        "sys.stdin.read()",
        "__import__('multiprocessing').get_start_method(allow_none=True)",
        "os.path.basename(os.getcwd())",
        "[os.environ.get(name) for name in ('OURS', 'DS_ACCELERATOR', 'PYTHONPATH')]",
    ]
    programs.write(f"print([{', '.join(asked)}])")
    for name in ("DS_ACCELERATOR", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    for value in ("before", "after"):
        (tmp_path / value).mkdir()
        monkeypatch.setenv("OURS", value)
        monkeypatch.chdir(tmp_path / value)
        child = run_child(programs.task(value, "--x"))
        assert (child.exit_code, child.error) == (0, "")
        messages = ["RankFailure", "RankPosition", "Sighting"]
        told = [["--x"], "__main__", True, messages, True, False, 1, True, "", None, value, [value, None, None]]
        assert child.output.read_text() == f"{told}\n"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("ends", "exit_code", "error"),
    [
        ("sys.exit(2)", 2, "exit code 2"),
        ("print('replay: rank 0: no such thing', file=sys.stderr); os._exit(1)", 1, "no such thing"),
        ("raise KeyError('x')", 1, "exit code 1"),
        ("os.kill(os.getpid(), 9)", -9, "ended by SIGKILL"),
    ],
)
def test_it_says_how_it_ended(programs: Programs, ends: str, exit_code: int, error: str) -> None:
    programs.write(ends)
    child = run_child(programs.task("x"))
    assert child.exit_code == exit_code
    assert child.error.startswith(error)


def test_where_one_rank_fails_the_others_are_ended_and_the_exit_code_is_its(programs: Programs, tmp_path: Path) -> None:
    """The first rank waits for ever once it has said who it is."""
    programs.write(
        "said = more[0] + '/' + os.environ['RANK']",
        "own = [str(os.getpid()), os.environ['WORLD_SIZE'], os.environ['MASTER_PORT']]",
        "open(said + '.tmp', 'w').write(' '.join(own))",
        "os.rename(said + '.tmp', said)",
        f"while os.environ['RANK'] == '0' or not os.path.exists(more[0] + '/0'): {WAIT}",
        "sys.exit(2)",
    )
    task = programs.task("two", str(tmp_path), num_processes=2)
    child = run_child(task)
    assert child.exit_code == 2
    # The limit is not what ended it.
    assert child.seconds < task.limit
    [[pid, size, port], [_, *same]] = [(tmp_path / name).read_text().split() for name in "01"]
    assert (size, [size, port]) == ("2", same)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_what_does_not_hear_a_sigterm_is_killed(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is up once it has said who it is, and its grace once it has heard."""
    programs.write(
        "import signal",
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'heard\\n'))",
        "os.write(1, f'{os.getpid()}\\n'.encode())",
        f"while True: {WAIT}",
    )
    task = programs.task("deaf")
    an_hour_a_line(task.output, monkeypatch)
    child = run_child(task, grace=task.limit)
    assert child.exit_code is None
    pid, heard = child.output.read_text().split()
    assert heard == "heard"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_as_many_as_are_asked_for_run_at_once_and_a_late_one_is_ended(programs: Programs, tmp_path: Path) -> None:
    """Each of the first three waits for the other two; the fourth, which has to wait for room, never ends."""
    programs.write(
        "open(more[0] + '/' + first, 'w').close()",
        f"while first == '3' or len(set(os.listdir(more[0])) & {{'0', '1', '2'}}) < 3: {WAIT}",
    )
    asked: list[int] = []

    def tasks() -> Iterator[tuple[int, Task]]:
        for number in range(4):
            asked.append(number)
            yield number, programs.task(str(number), str(tmp_path), limit=600.0 if number < 3 else 0.5)

    ended = []
    for number, child in run_children(tasks(), at_once=3):
        ended.append((number, child.exit_code))
        assert len(asked) >= 3
    assert sorted(ended) == [(0, 0), (1, 0), (2, 0), (3, None)]


def test_each_run_sees_gpus_that_the_fewest_others_see(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None ends before all three have begun, or one's GPUs would be free again."""
    out = tmp_path / "out"
    programs.write(
        "print(os.environ['CUDA_VISIBLE_DEVICES'])",
        f"while not all(os.path.exists(f'{out}/{{n}}') and os.path.getsize(f'{out}/{{n}}') for n in 'abc'): {WAIT}",
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7,6")
    tasks = [(name, programs.task(name, num_processes=size)) for name, size in (("a", 1), ("b", 2), ("c", 1))]
    assert [child.exit_code for _, child in run_children(tasks, at_once=3, gpus=list_gpus(3))] == [0, 0, 0]
    assert [sorted(set((out / name).read_text().split())) for name in "abc"] == [["4"], ["5,7"], ["4"]]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert list_gpus(2) == ["0", "1"]


def test_on_a_gpu_are_no_more_processes_than_are_asked_for(programs: Programs, tmp_path: Path) -> None:
    """On two GPUs one process each: the second may end once the first has, and the third needs both GPUs."""
    programs.write(
        f"os.chdir('{tmp_path}')",
        "open(first + '.began', 'w').close()",
        f"while first == 'a' and not os.path.exists('b.began'): {WAIT}",
        f"while first == 'b' and not os.path.exists('go'): {WAIT}",
        "if first == 'c' and not os.path.exists('b.ended'): sys.exit(3)",
        "open(first + '.ended', 'w').close()",
    )
    tasks = [(name, programs.task(name, num_processes=size)) for name, size in (("a", 1), ("b", 1), ("c", 2))]
    ended = []
    for name, child in run_children(tasks, at_once=1, gpus=["0", "1"]):
        ended.append((name, child.exit_code))
        (tmp_path / "go").touch()
    assert ended == [("a", 0), ("b", 0), ("c", 0)]


def test_after_a_time_none_begins(programs: Programs) -> None:
    """Not even the one that waits for room then: the first ends after that time."""
    clock = Clock(now=60.0)
    programs.write()

    def tasks() -> Iterator[tuple[str, Task]]:
        yield "a", programs.task("a")
        clock.now = 61.0  # the first has begun
        yield "b", programs.task("b")

    ended = run_children(tasks(), at_once=1, start_deadline=60.0, clock=clock.read)
    assert [name for name, _ in ended] == ["a"]


def test_the_port_of_the_ranks_is_taken_before_they_begin(programs: Programs) -> None:
    """Else another run of this machine may take it, or a connection of another's."""
    programs.write(
        "import socket, torch.distributed as dist",
        "socket.create_connection(('localhost', int(os.environ['MASTER_PORT']))).close()",
        "dist.init_process_group('gloo')",
        "ranks = [None, None]",
        "dist.all_gather_object(ranks, os.environ['RANK'])",
        "os.write(1, f'{ranks}\\n'.encode())",
        "dist.destroy_process_group()",
    )
    child = run_child(programs.task("x", num_processes=2))
    assert child.exit_code == 0
    # It comes after what gloo prints.
    assert child.output.read_text().endswith("['0', '1']\n" * 2)


def test_what_runs_is_ended_when_nobody_wants_it_any_more(programs: Programs, tmp_path: Path) -> None:
    """The first one ends as soon as the second, which never does, has said who it is."""
    long = tmp_path / "out" / "long"
    programs.write("print(os.getpid())", f"while first == 'long' or not os.path.getsize('{long}'): {WAIT}")
    running = run_children([(name, programs.task(name)) for name in ("long", "short")], at_once=2)
    assert next(running)[0] == "short"
    # A KeyboardInterrupt closes it in the same way.
    running.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(long.read_text()), 0)


def test_a_fork_of_this_process_starts_a_server_of_its_own(programs: Programs, tmp_path: Path) -> None:
    """It does not wait for the parent's server, nor end it, nor keep it alive."""
    programs.write("print(os.getppid())")
    server = run_child(programs.task("before")).output.read_text()
    alive_fd: int = vars(multiprocessing.forkserver)["_forkserver"]._forkserver_alive_fd
    alive = os.readlink(f"/proc/self/fd/{alive_fd}")
    fork = os.fork()
    if fork == 0:
        # Nothing that this process inherited may run on in it: not the test session either.
        exit_code = 1
        try:
            open_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
            forkserver.CONTEXT.set_forkserver_preload([])
            code = f"import os, pathlib; pathlib.Path({str(tmp_path)!r}, 'server').write_text(f'{{os.getppid()}}\\n')"
            process = forkserver.CONTEXT.Process(target=exec, args=(code,))
            process.start()
            process.join()
            exit_code = 0 if process.exitcode == 0 and alive not in open_files else 2
        finally:
            os._exit(exit_code)
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
    assert (tmp_path / "server").read_text() != server
    assert run_child(programs.task("after")).output.read_text() == server


DRIVER = """
import os, sys, time
from pathlib import Path
from replay.processes.forkserver import start

program, mark = map(Path, sys.argv[1:])
start(program, [str(mark)], os.environ, mark.with_name("output.txt"), Path())
time.sleep(600)
"""


@pytest.mark.slow
def test_what_runs_is_killed_with_the_command_that_began_it(tmp_path: Path) -> None:
    """Otherwise it would write beside what --continue runs again."""
    program, mark = tmp_path / "program.py", tmp_path / "mark"
    program.write_text("import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()}.'); time.sleep(600)")
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(program), str(mark)], cwd=ROOT)
    while not mark.exists() or not mark.read_text().endswith("."):
        time.sleep(0.05)
    child = os.pidfd_open(int(mark.read_text()[:-1]))
    driver.kill()
    ended, _, _ = select.select([child], [], [], 300.0)
    assert ended == [child]
    os.close(child)
    driver.wait()


def test_where_cuda_was_initialised_before_the_fork_python_begins_afresh(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; print('torch' in sys.modules, sys.argv[1:])")
    code = (
        "import os, pathlib, sys, torch; from replay.processes import forkserver\n"
        "torch.cuda._is_in_bad_fork = lambda: True\n"
        "program, output, folder = map(pathlib.Path, sys.argv[1:])\n"
        "forkserver._run(program, ['x', '--y'], dict(os.environ), output, folder)"
    )
    paths = [str(program), str(tmp_path / "output"), str(tmp_path)]
    subprocess.run([sys.executable, "-c", code, *paths], cwd=ROOT, check=True)
    assert (tmp_path / "output").read_text() == "False ['x', '--y']\n"


@pytest.mark.slow
def test_the_losses_are_those_of_a_replay_that_was_started_by_hand(short_sample_folder: Path, tmp_path: Path) -> None:
    arguments = ["--backend", "fsdp2", "--tp", "2", "--max-inputs", "2", "--step", "--learning-rate", "0.01"]
    arguments += ["--inputs", str(short_sample_folder)]
    job = parse_command_line([*arguments, "--log-folder", str(tmp_path / "a")]).args[0]
    task = Task(job=job, num_processes=2, output=tmp_path / "a.txt", limit=1800)
    child = run_child(task)
    assert child.exit_code == 0, child.output.read_text()
    by_hand = [str(warm_bin() / "python"), "replay", *arguments, "--log-folder", str(tmp_path / "b")]
    subprocess.run(by_hand, cwd=ROOT, check=True, capture_output=True)

    def numbers(logs: Path) -> list[Any]:
        return [
            (record.rank, record.source, record.result.loss, record.result.grad_norm)
            for record in PastRun.read(logs).records
        ]

    assert numbers(task.logs) == numbers(tmp_path / "b")
    assert len(numbers(task.logs)) == 4


@pytest.mark.gpu
def test_what_is_forked_can_use_a_gpu(programs: Programs) -> None:
    programs.write("print('deepspeed' in sys.modules)", "import torch", "print(torch.ones(2).cuda().sum().item())")
    child = run_child(programs.task("x"))
    assert child.output.read_text() == "True\n2.0\n"


@pytest.mark.multi_gpu
def test_ranks_that_are_forked_meet_on_their_gpus(programs: Programs) -> None:
    programs.write(
        "import torch",
        "rank = int(os.environ['RANK'])",
        "torch.cuda.set_device(rank)",
        "torch.distributed.init_process_group('nccl')",
        "number = torch.ones(1).cuda() + rank",
        "torch.distributed.all_reduce(number)",
        "os.write(1, f'{number.item()}\\n'.encode())",
        "torch.distributed.destroy_process_group()",
    )
    child = run_child(programs.task("x", num_processes=2))
    assert (child.exit_code, child.output.read_text()) == (0, "3.0\n3.0\n")
