"""A training on a Ray cluster goes on from its latest state, whatever was killed: its curve is the uninterrupted one.

Needs the extra `ray`. The cluster has two nodes on this machine, with room for a worker each. About 140 s.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from actor_init.spec import UsageError
from capture.on_ray.node_files import FileChange
from replay.campaign.training import RayTrainings
from replay.command_line.cli import main
from replay.on_ray.cluster import Cluster, open_cluster
from replay.on_ray.node_actors import NodeAgent
from replay.options.option_parsing import format_error_with_flags
from replay.options.spec import ReplaySpec, StateSpec
from replay.processes.child_job import ChildJob
from replay.processes.pool import Task
from replay.runlog.reader import PastRun
from tests.helpers import doomed_training
from tests.helpers.commands import LIMIT, ROOT
from tests.helpers.ray_cluster import warm_cluster

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

STEPS = 8
SNAPSHOT = "checkpoint_manager_snapshot.json"  # lists the checkpoints that count
SUITE = f"suite --only ddp --processes 2 --steps {STEPS} --max-samples 4 --dtype fp32"


class TwoNodes:
    """A cluster with room for a worker on each of its nodes; the second one can be lost."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.address: str = cluster.address
        self.add()

    def add(self) -> None:
        self.second = self.cluster.add_node(num_cpus=1)

    def lose(self) -> None:
        self.cluster.remove_node(self.second, allow_graceful=False)


def when(cluster: Cluster, is_time: Callable[[], object], *deeds: Callable[[], None]) -> None:
    """Have the driver do the deeds once, as soon as it is time, when it looks for news from the nodes."""
    fetch, left = cluster.fetch, list(deeds)

    def fetch_and_do(handle_change: Callable[[FileChange], None]) -> None:
        while left and is_time():
            left.pop(0)()
        fetch(handle_change)

    cluster.fetch = fetch_and_do  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")  # for nodes: a state counts when Ray Train has looked
        with warm_cluster(num_cpus=1) as cluster:
            yield TwoNodes(cluster)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a suite that nothing interrupted, without Ray."""
    logs = tmp_path_factory.mktemp("whole")
    assert main([*SUITE.split(), "--log-folder", str(logs)]) == 0
    (folder,) = logs.iterdir()
    return folder


def numbers(folder: Path) -> list[tuple[object, ...]]:
    return [
        (record.index, record.rank, record.source, record.result.loss, record.result.grad_norm)
        for record in PastRun.read(folder).records
    ]


def doomed(run: Any, marks: Path) -> Any:
    """Workers that find `marks` in their job."""

    def rank(job: Mapping[str, Any]) -> int:
        snapshot = marks / "storage" / "ddp" / SNAPSHOT
        code: int = run({**job, "marks": str(marks), "snapshot": str(snapshot)})
        return code

    return rank


def task_of(root: Path, spec: ReplaySpec) -> Task:
    return Task.for_attempt(root / "runs" / "ddp", ChildJob(spec=spec), num_processes=2, limit=LIMIT)


def test_a_worker_killed_in_a_state_or_in_a_pass_with_its_node_changes_no_number(
    nodes: TwoNodes, whole: Path, tmp_path: Path
) -> None:
    past = PastRun.read(whole / "runs" / "ddp" / "0")
    state = StateSpec(save_state=tmp_path / "none", save_every=2, resume=True)
    spec = ReplaySpec(actor=past.actor, inputs=past.inputs, measure=past.measure, objective=past.objective, state=state)
    may_go = (tmp_path / doomed_training.NODE_MAY_GO).exists
    with open_cluster(nodes.address) as cluster:
        when(cluster, may_go, nodes.lose, nodes.add)
        rank = doomed(doomed_training.doomed, tmp_path)
        run = RayTrainings(cluster, tmp_path, str(tmp_path / "storage"), run_rank=rank)
        [(_, child)] = run([(None, task_of(tmp_path, spec))])
    said = child.output.read_text()
    assert child.exit_code == 0, said
    assert numbers(tmp_path / "runs" / "ddp" / "0") == numbers(whole / "runs" / "ddp" / "0")
    assert len(list(tmp_path.glob("*-was-killed"))) == 2
    resumed = re.findall(r"^resumed +([^,\n]*)", said, re.MULTILINE)
    assert set(resumed) == {"from the beginning: no state was saved yet", "behind 2 steps", "behind 6 steps"}
    states = sorted(path.name for path in (tmp_path / "storage" / "ddp").glob("step-*"))
    assert states == ["step-000006", "step-000008"]
    assert sorted(path.name for path in (tmp_path / "runs" / "ddp").iterdir()) == ["0", "0.1", "0.2"]


KILLED_WITH_A_STATE = """
import os, signal, sys
from pathlib import Path
from replay.command_line.entry import run_and_leave
from replay.on_ray.cluster import Cluster

fetch, storage = Cluster.fetch, Path(sys.argv[sys.argv.index("--storage") + 1])

def fetch_or_die(*given):
    if any("step-" in path.read_text() for path in storage.glob("*/ddp/{snapshot}")):
        os.kill(os.getpid(), signal.SIGKILL)
    fetch(*given)

Cluster.fetch = fetch_or_die
run_and_leave()
"""


def test_a_suite_goes_on_by_its_name_after_its_driver_was_killed(nodes: TwoNodes, whole: Path, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    where = ["--launcher", "ray", "--address", nodes.address, "--storage", str(storage)]
    begin = [*SUITE.split(), "--save-state", "--save-every", "2", *where, "--log-folder", str(tmp_path / "logs")]
    driver = [sys.executable, "-c", KILLED_WITH_A_STATE.format(snapshot=SNAPSHOT), *begin]
    killed = subprocess.run(driver, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    (name,) = (path.name for path in storage.iterdir())
    assert not (tmp_path / "logs" / name / "ddp.jsonl").exists()
    again = ["suite", "--continue", name, *where, "--log-folder", str(tmp_path / "elsewhere")]
    done = subprocess.run(
        [sys.executable, "-m", "replay", *again], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "elsewhere" / name
    assert "resumed    behind " in (folder / "runs" / "ddp" / "0" / "output.txt").read_text()
    ours, theirs = (
        [(step["loss"], step["norm"], step["inputs"]) for step in map(json.loads, curve.read_text().splitlines())]
        for curve in (folder / "ddp.jsonl", whole / "ddp.jsonl")
    )
    assert len(ours) == STEPS
    assert ours == theirs


def test_a_node_that_is_lost_for_good_ends_the_training_and_leaves_no_worker_and_no_place_taken(
    nodes: TwoNodes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    storage = str(tmp_path / "storage")
    with open_cluster(nodes.address) as cluster:
        when(cluster, lambda: len(list(tmp_path.glob("rank*"))) == 2, nodes.lose)
        rank = doomed(doomed_training.hang, tmp_path)
        [(_, child)] = RayTrainings(cluster, tmp_path, storage, run_rank=rank, node_seconds=1.0)(
            [(None, task_of(tmp_path, ReplaySpec()))]
        )
        workers = [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("rank*")]
        until = time.monotonic() + LIMIT
        while taken() or any(map(is_alive, workers)):
            assert time.monotonic() < until
            time.sleep(0.1)
    nodes.add()
    assert child.exit_code == 1
    assert (
        child.error == f"2 ranks need as many CPUs, and 1 are left since a node was lost; states are kept in {storage}"
    )
    assert " is lost; what it had not sent yet is lost too\n" in capfd.readouterr().err


def taken() -> list[object]:
    from ray.util import placement_group_table

    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_storage_that_cannot_be_used_is_one_line(nodes: TwoNodes, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with open_cluster(nodes.address) as cluster, pytest.raises(UsageError) as caught:
        RayTrainings(cluster, tmp_path, str(tmp_path / "file" / "storage"))
    assert format_error_with_flags(caught.value).startswith(f"--storage {tmp_path / 'file' / 'storage'}")
    assert str(caught.value).endswith("Give a folder where you may write")
    agent = NodeAgent(str(tmp_path))
    (tmp_path / "mark").touch()
    assert agent.try_shared_folder(str(tmp_path), "mark") is None
    assert agent.try_shared_folder(str(tmp_path / "elsewhere"), "mark") == "it sees another folder there, or none"
