"""A training on a Ray cluster goes on from its latest state, whatever was killed: its curve is the uninterrupted one.

Needs the extra `ray`. The cluster has two nodes on this machine, with room for a worker each. About 60 s.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actor_init.spec import UsageError
from replay.cli import main
from replay.on_ray.cluster import cluster_at
from replay.on_ray.node_agent import NodeAgent
from replay.on_ray.training import Trainings
from replay.option_parsing import command_line
from replay.processes.pool import Task
from replay.runlog.reader import PastRun
from replay.spec import StateSpec
from tests.helpers import doomed_training
from tests.helpers.commands import LIMIT, ROOT

ray = pytest.importorskip("ray")

STEPS = 12
SNAPSHOT = "checkpoint_manager_snapshot.json"  # lists the checkpoints that count
SUITE = f"suite --only ddp --num-gpus 2 --steps {STEPS} --max-samples 4 --dtype fp32"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")  # for nodes: a state counts when Ray Train has looked
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        cluster.add_node(num_cpus=1)
        try:
            yield cluster.address
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a suite that nothing interrupted, without Ray."""
    logs = tmp_path_factory.mktemp("whole")
    assert main([*SUITE.split(), "--log-folder", str(logs)]) == 0
    (folder,) = logs.iterdir()
    return folder


def numbers(folder: Path) -> list[tuple[object, ...]]:
    return [(one.index, one.rank, one.source, one.loss, one.grad_norm) for one in PastRun.read(folder).records]


def doomed(run: Any, marks: Path) -> Any:
    """Workers that find `marks` in their job."""

    def rank(job: Mapping[str, Any]) -> int:
        snapshot = marks / "storage" / "ddp" / SNAPSHOT
        code: int = run({**job, "marks": str(marks), "snapshot": str(snapshot)})
        return code

    return rank


def task_of(root: Path, arguments: list[str], name: str = "ddp") -> Task:
    return Task(
        arguments=arguments, num_processes=2, logs=root / "runs" / name, output=root / f"{name}.log", limit=LIMIT
    )


def test_a_worker_killed_in_a_run_and_one_killed_in_a_state_change_no_number(
    address: str, whole: Path, tmp_path: Path
) -> None:
    spec = PastRun.read(whole / "runs" / "ddp").spec
    spec = replace(spec, state=StateSpec(save_state=tmp_path / "none", save_every=2, resume=True))
    with cluster_at(address) as cluster:
        rank = doomed(doomed_training.killed_twice, tmp_path)
        run = Trainings(cluster, tmp_path, str(tmp_path / "storage"), rank=rank)
        [(_, child)] = run([(None, task_of(tmp_path, command_line(spec)))])
    said = child.output.read_text()
    assert child.exit_code == 0, said
    assert numbers(tmp_path / "runs" / "ddp") == numbers(whole / "runs" / "ddp")
    assert {path.name for path in tmp_path.glob("*-was-killed")} == {"run-was-killed", "state-was-killed"}
    assert said.count("resumed    behind 2 steps, 2 of 12 passes on each rank\n") == 2
    states = sorted(path.name for path in (tmp_path / "storage" / "ddp").glob("step-*"))
    assert states == ["step-000010", "step-000012"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["ddp", "ddp.1", "ddp.2"]


def test_a_suite_goes_on_by_its_name_after_its_driver_was_killed(address: str, whole: Path, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    where = ["--launcher", "ray", "--address", address, "--storage", str(storage)]
    begin = [*SUITE.split(), "--save-state", "--save-every", "2", *where, "--log-folder", str(tmp_path / "logs")]
    with subprocess.Popen([sys.executable, "-m", "replay", *begin], cwd=ROOT, stdout=subprocess.PIPE) as driver:
        while not any("step-000002" in path.read_text() for path in storage.glob(f"*/ddp/{SNAPSHOT}")):
            assert driver.poll() is None
            time.sleep(0.05)
        driver.kill()
    (name,) = (path.name for path in storage.iterdir())
    assert not (tmp_path / "logs" / name / "ddp.jsonl").exists()
    again = ["suite", "--resume-from", name, *where, "--log-folder", str(tmp_path / "elsewhere")]
    done = subprocess.run(
        [sys.executable, "-m", "replay", *again], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "elsewhere" / name
    assert "resumed    behind " in (folder / "ddp.log").read_text()
    ours, theirs = (
        [(step["loss"], step["norm"], step["inputs"]) for step in map(json.loads, curve.read_text().splitlines())]
        for curve in (folder / "ddp.jsonl", whole / "ddp.jsonl")
    )
    assert len(ours) == STEPS
    assert ours == theirs


def test_what_is_ended_leaves_no_worker_and_no_place_taken(address: str, tmp_path: Path) -> None:
    with cluster_at(address) as cluster:
        run = Trainings(cluster, tmp_path, str(tmp_path / "storage"), rank=doomed(doomed_training.hang, tmp_path))
        fetch = cluster.fetch

        def interrupted(take: Any) -> None:
            if len(list(tmp_path.glob("rank*"))) == 2:
                raise KeyboardInterrupt
            fetch(take)

        cluster.fetch = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            list(run([(None, task_of(tmp_path, []))]))
        workers = [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("rank*")]
        until = time.monotonic() + LIMIT
        while taken() or any(map(is_alive, workers)):
            assert time.monotonic() < until
            time.sleep(0.1)


def taken() -> list[object]:
    from ray.util import placement_group_table

    return [one for one in placement_group_table().values() if one["state"] != "REMOVED"]


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_storage_that_cannot_be_used_is_one_line(address: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with cluster_at(address) as cluster, pytest.raises(UsageError) as caught:
        Trainings(cluster, tmp_path, str(tmp_path / "file" / "storage"))
    assert str(caught.value).startswith(f"--storage {tmp_path / 'file' / 'storage'}")
    assert str(caught.value).endswith("Give a folder where you may write")
    agent = NodeAgent(str(tmp_path))
    (tmp_path / "mark").touch()
    assert agent.sees(str(tmp_path), "mark") is None
    assert agent.sees(str(tmp_path / "elsewhere"), "mark") == "it sees another folder there, or none"
