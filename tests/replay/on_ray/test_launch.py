"""A replay on a Ray cluster is the replay that a launcher starts here: losses, log, exit code, errors.

Needs the extra `ray`. The cluster has two nodes on this machine.
"""

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from actor_init.spec import UsageError
from capture.on_ray.node_files import OVERLAP_BYTES, NodeFiles, write_change
from replay.agreement.rows import ParityLog
from replay.command_line.cli import main
from replay.on_ray.cluster import Cluster, open_cluster
from replay.on_ray.launch import run_on_ray
from replay.on_ray.task_runner import RayTaskRunner
from replay.options.ray_options import RayOptions
from replay.options.spec import InputsSpec, MeasureSpec, ReplaySpec
from replay.processes.child_job import ChildJob
from replay.processes.pool import Task
from replay.runlog.records import PassRecord
from replay.runlog.writer import INTERRUPTED, list_versions
from tests.helpers.commands import BIN, LIMIT, ROOT
from tests.helpers.process_table import processes_left
from tests.helpers.ray_cluster import warm_cluster
from tests.helpers.read_logs import read_log

Captured = pytest.CaptureFixture[str]
Fds = pytest.CaptureFixture[str]
ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


def home(source: Path, target: Path, files: NodeFiles) -> None:
    while changes := files.read_changes():
        for change in changes:
            write_change(change, target)
    theirs, ours = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (source, target)
    )
    assert ours == theirs


def test_what_a_node_writes_comes_home_as_it_is(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "run").mkdir(parents=True)
    files = NodeFiles(str(there))
    log = there / "run" / "rank0.jsonl"
    log.write_text("one\n")
    home(there, here, files)
    with log.open("r+") as lines:
        # The latest line is written again, and one more.
        lines.write("other, longer\ntwo\n")
    home(there, here, files)
    with log.open("a") as lines:
        lines.write("x" * OVERLAP_BYTES + "\n")
    home(there, here, files)
    log.write_text("short\n")
    replaced = there / "run.json"
    for text in ("{}", '{"status": "finished"}'):
        (there / "new").write_text(text)
        os.replace(there / "new", replaced)
        home(there, here, files)
    log.unlink()
    home(there, here, files)
    assert files.read_changes() == []


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--processes 2", "--processes is for a Ray cluster. Try: --launcher ray --processes 2"),
        ("--launcher ray --address auto", "--address auto, which is 127.0.0.1:1: no Ray cluster there: "),
        ("--launcher ray --address localhost:1", "--address localhost:1: no Ray cluster there: "),
        ("--launcher ray --address ray://host:1", "--address ray://host:1 is not allowed. Give auto, or HOST:PORT"),
    ],
)
def test_a_cluster_that_cannot_be_had_is_one_line(
    typed: str, says: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(typed.split()) == 2
    assert capsys.readouterr().err.startswith(f"replay: {says}")


# As Ray checks ids of nodes.
FIRST, SECOND = "aa" * 28, "bb" * 28


class FakeRay:
    """A cluster of the nodes FIRST and SECOND. Agents do not start on SECOND, which is then lost or not."""

    exceptions = SimpleNamespace(RayError=ValueError)

    def __init__(self, *, is_lost: bool) -> None:
        self.is_lost, self.has_started = is_lost, False

    def nodes(self) -> list[dict[str, Any]]:
        is_alive = {FIRST: True, SECOND: not (self.is_lost and self.has_started)}
        return [
            {"NodeID": name, "NodeManagerHostname": name, "Resources": {"CPU": 2.0}, "Alive": alive}
            for name, alive in is_alive.items()
        ]

    def remote(self, **_: Any) -> Callable[[type], Any]:
        def make_agent(home: str) -> Any:
            return SimpleNamespace(list_versions=SimpleNamespace(remote=lambda: Path(home).name))

        return lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make_agent))

    def get(self, node: str) -> dict[str, str | None]:
        self.has_started = True
        if node == SECOND:
            raise ValueError("The actor never ran")
        return list_versions()


def test_a_node_that_is_lost_while_its_agent_starts_is_left_out() -> None:
    cluster = Cluster(FakeRay(is_lost=True))
    assert list(cluster.agents) == [FIRST]
    assert [node.id for node in cluster.nodes] == [FIRST]
    with pytest.raises(UsageError, match=rf"^node {SECOND} cannot run replay: The actor never ran\. Try: one image"):
        _ = Cluster(FakeRay(is_lost=False)).agents


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    with warm_cluster(num_cpus=2) as cluster:
        cluster.add_node(num_cpus=2)
        yield cluster


@pytest.fixture
def address(ray_cluster: Any) -> str:
    return str(ray_cluster.address)


def test_what_is_bound_is_killed_with_the_process_that_started_it() -> None:
    sleeper = [str(BIN / "python"), "-m", "replay.processes.supervisor", "tests.helpers.sleeping"]
    starts = f"import subprocess, signal; subprocess.Popen({sleeper!r}); signal.pause()"
    with subprocess.Popen([str(BIN / "python"), "-c", starts], cwd=ROOT, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"asleep\n"
        starter.kill()
        assert select.select([starter.stdout], [], [], LIMIT)[0]
        # Nobody has the pipe open any more.
        assert starter.stdout.read() == b""


def on_ray(address: str, typed: str, logs: Path) -> int:
    return main(["--launcher", "ray", "--address", address, *typed.split(), "--log-folder", str(logs)])


def on_ray_command(address: str, typed: str, logs: Path) -> list[str]:
    cluster = ["--launcher", "ray", "--address", address]
    return [sys.executable, "-m", "replay", *cluster, *typed.split(), "--log-folder", str(logs)]


def only_log(logs: Path) -> tuple[Path, dict[str, object], list[PassRecord]]:
    (folder,) = logs.iterdir()
    return folder, *read_log(folder)


def test_four_ranks_on_two_nodes_that_do_not_see_the_inputs_have_the_losses_of_one_process(
    address: str, short_sample_folder: Path, tmp_path: Path
) -> None:
    """The driver alone has its folder of inputs: what is mounted in its namespace is not seen outside."""
    inputs, logs = tmp_path / "inputs", tmp_path / "ray"
    inputs.mkdir()
    options = "--dtype fp32 --backend fsdp2"
    _, *arguments = on_ray_command(address, f"--processes 4 --tp 2 --max-inputs 2 {options} --inputs {inputs}", logs)
    # A warm process would be outside of the namespace.
    command = [str(BIN / "python"), *arguments]
    copy = f"cp {shlex.quote(str(short_sample_folder))}/* {inputs}"
    script = f"mount -t tmpfs none {inputs} && {copy} && exec {shlex.join(command)}"
    done = subprocess.run(
        ["unshare", *(["-m"] if os.geteuid() == 0 else ["-rm"]), "sh", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert list(inputs.iterdir()) == []
    assert done.returncode == 0, done.stdout + done.stderr
    folder, run, records = only_log(logs)
    assert (run["status"], run["world_size"]) == ("finished", 4)
    assert done.stdout.startswith(f"model      {inputs / 'actor.json'}, ")
    assert f"log        {folder}" in done.stdout.splitlines()
    here = ["--inputs", str(short_sample_folder), "--log-folder", str(tmp_path / "here")]
    assert main([*options.split(), *here]) == 0
    alone = {record.source: record.result.loss for record in only_log(tmp_path / "here")[2]}
    assert {record.rank for record in records} == {0, 1, 2, 3}
    for record in records:
        peer = next(r for r in records if r.rank == record.rank ^ 1 and r.index == record.index)
        assert peer.source == record.source
        if record.source in alone:
            assert record.result.loss == pytest.approx(alone[record.source], rel=1e-6)
    assert len({record.source for record in records} & alone.keys()) >= 2


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--processes 3 --tp 2", "--processes 3 is no multiple of tp 2 x ring 1. Try: --processes 4"),
        ("--processes 5", "--processes 5 needs as many CPUs, and the cluster has 4 on 2 nodes. Try: --processes 4"),
    ],
)
def test_a_refusal_of_the_driver_is_one_line(
    typed: str, says: str, address: str, tmp_path: Path, capsys: Captured
) -> None:
    assert on_ray(address, typed, tmp_path) == 2
    [said] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("replay: ")]
    assert said.startswith(f"replay: {says}")


def test_what_a_rank_refuses_is_said_here_and_its_local_cluster_is_stopped(tmp_path: Path) -> None:
    # Ray makes sockets below this path, which may not be long.
    with TemporaryDirectory(prefix="ray") as own:
        done = subprocess.run(
            [sys.executable, "-m", "tests.helpers.refused_on_ray", str(tmp_path)],
            env={**os.environ, "RAY_TMPDIR": own},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert any(Path(own).rglob("raylet.out"))
        # A worker ends by itself once its raylet is gone.
        assert processes_left(own, LIMIT) == []
    assert done.returncode == 2, done.stdout + done.stderr
    assert "replay: --this is not allowed" in done.stderr.splitlines()


# many at once


@pytest.fixture
def cells(address: str, tmp_path: Path) -> Iterator[RayTaskRunner]:
    with open_cluster(address) as cluster:
        yield RayTaskRunner(cluster, tmp_path, module="tests.helpers.cell_program")


def cell(
    root: Path, what: str, *, inputs: Path | None = None, num_processes: int = 1, limit: float = LIMIT
) -> tuple[str, Task]:
    # The folder tells these processes from those of other runs of the tests on this machine.
    logs = root / root_name(root) / what
    spec = ReplaySpec(inputs=InputsSpec(inputs=inputs), measure=MeasureSpec(name=what, log_folder=logs))
    return what, Task(job=ChildJob(spec=spec), num_processes=num_processes, output=logs / "output.txt", limit=limit)


def root_name(root: Path) -> str:
    return "-".join(root.parts[1:])


def test_cells_end_alone_and_their_files_come_home(cells: RayTaskRunner, tmp_path: Path) -> None:
    four, two = cell(tmp_path, "wait 0", num_processes=4), cell(tmp_path, "wait 0.1", num_processes=2)
    tasks = [
        cell(tmp_path, "killed"),
        cell(tmp_path, "hang", limit=10.0),
        cell(tmp_path, "worker lost"),
        cell(tmp_path, "refused"),
        four,
        two,
    ]
    done = dict(cells(tasks))
    assert {what: child.exit_code for what, child in done.items()} == {
        "killed": -signal.SIGKILL,
        "hang": None,
        "worker lost": -signal.SIGKILL,
        "refused": 2,
        "wait 0": 0,
        "wait 0.1": 0,
    }
    for what in ("killed", "hang", "worker lost", "refused"):
        child = done[what]
        assert child.output.read_text().startswith(f"replay: rank 0: {what} in {child.logs / 'run'}\n")
        assert (child.logs / "run" / "rank0.jsonl").read_text() == "- - - - -\n"
    assert done["worker lost"].error == "the node of a rank, or the worker that ran it, was lost"
    assert done["hang"].error.startswith("not finished within ")
    # Two ranks share a node, four need both.
    for (what, _), size in ((four, 4), (two, 2)):
        child = done[what]
        lines = [(child.logs / "run" / f"rank{rank}.jsonl").read_text().split() for rank in range(size)]
        assert [line[:4] for line in lines] == [[str(rank), str(rank % 2), str(size), "2"] for rank in range(size)]
        assert len({line[4] for line in lines}) == 1
        assert child.output.read_text().count("replay: rank ") == size
    assert processes_left(root_name(tmp_path), LIMIT) == []


def test_none_starts_after_the_time_is_up(cells: RayTaskRunner, tmp_path: Path) -> None:
    tasks = [cell(tmp_path, f"wait {number}", num_processes=4) for number in range(3)]
    assert [what for what, _ in cells(tasks, start_deadline=time.monotonic())] in ([], ["wait 0"])


@contextmanager
def lose_node_when(ray_cluster: Any, is_time: Callable[[], bool]) -> Iterator[None]:
    """Add a node with room for three ranks, which fit there alone, and lose it when it is time."""
    node = ray_cluster.add_node(num_cpus=3)

    def lose_it() -> None:
        while not is_time():
            time.sleep(0.1)
        ray_cluster.remove_node(node, allow_graceful=False)

    loser = Thread(target=lose_it)
    loser.start()
    try:
        yield
    finally:
        loser.join()


def wait_to_be_ended(job: ChildJob) -> int:
    """Say that a rank runs, in the place of a replay."""
    Path(job.spec.measure.name, os.environ["RANK"]).touch()
    signal.pause()
    return 0


def test_a_lost_node_ends_the_run_of_its_ranks(ray_cluster: Any, tmp_path: Path, capfd: Fds) -> None:
    options = RayOptions(address=ray_cluster.address, num_processes=3)
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    with lose_node_when(ray_cluster, lambda: len(list(ranks.iterdir())) == 3):
        job = ChildJob(spec=ReplaySpec(measure=MeasureSpec(log_folder=tmp_path / "logs", name=str(ranks))))
        ended = run_on_ray(wait_to_be_ended, job, options, show_traceback=False)
        assert ended == 1
    first, second = [line for line in capfd.readouterr().err.splitlines() if line.startswith("replay: ")]
    assert re.fullmatch(r"replay: node \S+ is lost; what it had not sent yet is lost too", first)
    assert second.startswith("replay: Ray Train: ")


def test_a_lost_node_ends_its_cells_alone(ray_cluster: Any, tmp_path: Path) -> None:
    hang = cell(tmp_path, "hang", num_processes=3)
    output = hang[1].output
    with (
        lose_node_when(ray_cluster, lambda: output.is_file() and output.read_text().count("replay: rank ") == 3),
        open_cluster(ray_cluster.address) as cluster,
    ):
        run = RayTaskRunner(cluster, tmp_path, module="tests.helpers.cell_program")
        done = dict(run([hang, cell(tmp_path, "wait 0"), cell(tmp_path, "wait 0.1")]))
        again = dict(run([cell(tmp_path, "wait 0.2")]))
    assert {what: child.exit_code for what, child in (done | again).items()} == {
        "hang": -signal.SIGKILL,
        "wait 0": 0,
        "wait 0.1": 0,
        "wait 0.2": 0,
    }
    assert done["hang"].error == "the node of a rank, or the worker that ran it, was lost"
    assert processes_left(str(tmp_path), LIMIT) == []


MATRIX = """
[[cells]]
backend = "fsdp2"
dtype = "fp32"
packing = [true, false]
"""
KILLED_AT_THE_FIRST = """
import os, signal
from replay.command_line.entry import run_and_leave
from replay.commands.parity.report import ParityProgress

ParityProgress.show_run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
run_and_leave()
"""


def test_parity_goes_on_after_its_driver_was_killed(address: str, short_sample_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "matrix.toml").write_text(MATRIX)
    parity = ["parity", "--launcher", "ray", "--address", address]
    matrix = ["--matrix", str(tmp_path / "matrix.toml"), "--processes", "1", "--max-inputs", "2"]
    matrix += ["--inputs", str(short_sample_folder)]
    begin = [sys.executable, "-c", KILLED_AT_THE_FIRST, *parity, *matrix, "--log-folder", str(tmp_path / "logs")]
    killed = subprocess.run(begin, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    (folder,) = (tmp_path / "logs").iterdir()
    before = states_of(folder)
    finished = [name for name, state in before.items() if state == "done"]
    assert 0 < len(finished) < len(before)
    again = [sys.executable, "-m", "replay", *parity, "--continue", str(folder)]
    done = subprocess.run(again, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(states_of(folder).values()) == {"done"}
    made = re.findall(r"^\d+ of \d+, (.+?): ", done.stdout, re.MULTILINE)
    assert sorted(made) == sorted(before.keys() - set(finished))


def states_of(folder: Path) -> dict[str, str]:
    return {row.cell.name: row.state for row in ParityLog.read(folder).rows}


def test_ctrl_c_ends_the_ranks_and_is_said_in_the_log(address: str, short_sample_folder: Path, tmp_path: Path) -> None:
    typed = f"--processes 2 --backend fsdp2 --epochs 200 --timeout 300 --inputs {short_sample_folder}"
    command = on_ray_command(address, typed, tmp_path)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
        assert driver.stdout is not None
        while not any(path.read_text() for path in tmp_path.glob("*/rank1.jsonl")):
            assert driver.poll() is None
            time.sleep(0.1)
        driver.send_signal(signal.SIGINT)
        said, _ = driver.communicate(timeout=LIMIT)
    assert driver.returncode == INTERRUPTED, said
    assert only_log(tmp_path)[1]["status"] == "interrupted"
    with open_cluster(address) as cluster:
        # The places of the ranks are free again.
        while cluster.ray.available_resources().get("CPU") != 4.0:
            time.sleep(0.1)
