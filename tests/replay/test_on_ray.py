"""A replay on a Ray cluster is the replay that a launcher starts here: losses, log, exit code, errors.

Needs the extra `ray`. The cluster has two nodes on this machine.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from capture.on_ray.node_files import OVERLAP_BYTES, NodeFiles, write
from replay.cli import main
from replay.runlog.records import PassRecord
from replay.runlog.writer import read_log
from replay.runner.selection import default_folder
from tests.helpers.commands import LIMIT, ROOT
from tests.helpers.process_table import processes_with

ray = pytest.importorskip("ray")


def home(source: Path, target: Path, files: NodeFiles) -> None:
    while changes := files.news():
        for change in changes:
            write(change, target)
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
        lines.write("other, longer\ntwo\n")  # the latest line again, and one more
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
    assert files.news() == []


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--workers 2", "--workers is for a Ray cluster. Try: --launcher ray --workers ..."),
        ("--launcher ray --address auto", "--address auto: Could not find any running Ray instance."),
        ("--launcher ray --address localhost:1", "--address localhost:1: no Ray cluster there: "),
        ("--launcher ray --address ray://host:1", "--address ray://host:1 is not allowed. Give auto, or HOST:PORT"),
    ],
)
def test_a_cluster_that_cannot_be_had_is_one_line(typed: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split()) == 2
    assert capsys.readouterr().err.startswith(f"replay: {says}")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


def on_ray(address: str, typed: str, logs: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "replay", "--launcher", "ray", "--address", address, *typed.split()]
    return subprocess.run(
        [*command, "--log-folder", str(logs)], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
    )


def only_log(logs: Path) -> tuple[Path, dict[str, object], list[PassRecord]]:
    (folder,) = logs.iterdir()
    return folder, *read_log(folder)


def test_four_ranks_on_two_nodes_have_the_losses_of_one_process(address: str, tmp_path: Path) -> None:
    options = "--dtype fp32 --max-inputs 2 --backend fsdp2"
    done = on_ray(address, f"--workers 4 --tp 2 {options}", tmp_path / "ray")
    assert done.returncode == 0, done.stdout + done.stderr
    folder, run, records = only_log(tmp_path / "ray")
    assert (run["status"], run["world_size"]) == ("finished", 4)
    assert f"log        {folder}" in done.stdout.splitlines()
    assert main([*options.replace("2 --backend", "8 --backend").split(), "--log-folder", str(tmp_path / "here")]) == 0
    alone = {record.source: record.loss for record in only_log(tmp_path / "here")[2]}
    assert {record.rank for record in records} == {0, 1, 2, 3}
    for record in records:
        peer = next(r for r in records if r.rank == record.rank ^ 1 and r.index == record.index)
        assert peer.source == record.source
        if record.source in alone:
            assert record.loss == pytest.approx(alone[record.source], rel=1e-6)
    assert len({record.source for record in records} & alone.keys()) >= 2


def test_what_ranks_refuse_and_what_fails_is_said_here(address: str, tmp_path: Path) -> None:
    done = on_ray(address, "--workers 3 --tp 2 --max-inputs 1", tmp_path / "refused")
    assert done.returncode == 2
    assert "replay: 3 processes were started, but tp 2 x ring 1 needs a multiple of 2" in done.stderr
    done = on_ray(address, "--workers 5 --max-inputs 1", tmp_path / "refused")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--workers 5 needs as many CPUs, and the cluster has 4 on 2 nodes. Try: --workers 4" in done.stderr
    source = default_folder()
    (tmp_path / "inputs").mkdir()
    for path in sorted(source.iterdir())[:8]:
        (tmp_path / "inputs" / path.name).write_bytes(path.read_bytes()[: None if path.suffix == ".json" else -9])
    done = on_ray(address, f"--inputs {tmp_path / 'inputs'}", tmp_path / "failed")
    assert done.returncode == 1, done.stdout + done.stderr
    assert json.loads(next((tmp_path / "failed").glob("*/run.json")).read_text())["status"] != "running"


def test_a_local_cluster_is_started_and_stopped(tmp_path: Path) -> None:
    before = processes_with("raylet")
    command = [sys.executable, "-m", "replay", "--launcher", "ray", "--max-inputs", "1", "--quiet"]
    done = subprocess.run(
        [*command, "--log-folder", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert only_log(tmp_path)[1]["status"] == "finished"
    assert processes_with("raylet") == before
