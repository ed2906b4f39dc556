"""A Ray job records on nodes that share no disk: its files come home, and replay; so do those of killed workers.

Needs the extra `ray`. The cluster has two nodes on this machine.
"""

import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from capture import capture_files
from capture.black_box.incidents import read_incidents
from capture.cli import main
from capture.file_format.capture_file import utc_now
from capture.file_format.manifest import check_folder
from capture.on_ray.collect import collect_folder
from capture.on_ray.node_files import MAX_BYTES_PER_ANSWER
from replay.command_line.cli import main as replay_main
from tests.helpers.commands import LIMIT, ROOT
from tests.helpers.ray_cluster import TwoNodes, two_nodes
from tests.helpers.read_logs import read_log

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    with two_nodes(tmp_path_factory.mktemp("cluster"), cpus_a_node=1) as cluster:
        yield cluster


def run_job(cluster: TwoNodes, script: Path, *arguments: str) -> tuple[int, str]:
    """Run the driver of a job. Returns its exit code and what it said."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    return done.returncode, done.stdout


def collect(cluster: TwoNodes, folder: str, home: Path) -> int:
    return main(["collect", folder, "--to", str(home), "--address", cluster.address])


def test_the_job_of_the_documentation_comes_home_and_is_reproduced(
    cluster: TwoNodes, tmp_path: Path, capfd: pytest.CaptureFixture[str], one_world: None
) -> None:
    guide = (ROOT / "docs" / "clusters.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    exit_code, output = run_job(cluster, tmp_path / "train.py", str(tmp_path), "$NODE_DISK/captures")
    assert exit_code == 0, output
    home = tmp_path / "my-run" / "captures"
    # the first node's disk alone has one rank's files: the other's came through Ray
    here = {path.name for path in capture_files(cluster.disk / "captures")}
    assert (len(here), len(capture_files(home))) == (4, 8)
    checked = check_folder(home)
    assert (len(checked.good), checked.is_whole, checked.uncommitted) == (8, True, [])
    (command,) = re.findall(r"\$ replay (--inputs .*)", guide)
    logs = tmp_path / "logs"
    typed = command.replace("/shared", str(tmp_path)).split()
    assert replay_main([*typed, "--verdict", "strict", "--log-folder", str(logs)]) == 0
    said = capfd.readouterr().out
    assert "verdict    REPRODUCED\n" in said, said
    assert "8 of 8 passes and 4 of 4 steps judged" in said, said
    assert read_log(next(logs.iterdir()))[0]["status"] == "finished"


def test_flight_recorders_of_killed_workers_come_home(cluster: TwoNodes, tmp_path: Path) -> None:
    """Those of the first attempt are written by the second one's workers, those of the second by the collection."""
    script = ROOT / "tests" / "helpers" / "killed_ray_job.py"
    exit_code, output = run_job(cluster, script, str(tmp_path / "storage"), "$NODE_DISK/killed")
    assert exit_code == 1, output
    ended = utc_now()
    came = collect_folder("$NODE_DISK/killed", tmp_path / "home", address=cluster.address)
    assert came.is_whole
    # rank 0 lost its peer: it wrote its passes itself, or Ray ended it before it could
    killed = [record for record in read_incidents(tmp_path / "home") if record.rank == 1]
    died = [incident for record in killed for incident in record.incidents]
    assert [(incident.what, len(incident.files), incident.time < ended) for incident in died] == [
        ("died", 4, True),
        ("died", 4, False),
    ]
    assert sum(node.num_salvaged for node in came.nodes) >= 4
    assert {name for incident in died for name in incident.files} <= {
        path.name for path in capture_files(tmp_path / "home")
    }
    assert check_folder(tmp_path / "home").is_whole


def test_another_version_of_ray_is_one_line(
    cluster: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "__version__", "2.1.0")
    assert collect(cluster, "/tmp/captures", tmp_path / "home") == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"capture: --address {cluster.address}: Version mismatch: The cluster was started with: Ray: "
    )
    assert "Ray: 2.1.0" in error
    assert error.count("\n") == 1


def test_a_cluster_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("localhost:1\n")
    assert main(["collect", "/tmp/captures", "--to", str(tmp_path / "home")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("capture: --address auto, which is localhost:1: no Ray cluster there: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "home").exists()


def test_a_folder_that_no_node_has_is_one_line(
    cluster: TwoNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect(cluster, "$NODE_DISK/none", tmp_path / "home") == 2
    error = capsys.readouterr().err
    assert error.startswith("capture: $NODE_DISK/none: no node of the cluster has this folder: asked ")
    assert not (tmp_path / "home").exists()


def test_ctrl_c_leaves_no_actor(cluster: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cluster.disk / "large").mkdir()
    (cluster.disk / "large" / "file").write_bytes(bytes(2 * MAX_BYTES_PER_ANSWER))
    actors: list[int] = []

    def interrupt(*_: object) -> None:
        actors.extend(os.pidfd_open(process) for process in cluster.actors("NodeFiles"))
        raise KeyboardInterrupt

    monkeypatch.setattr("capture.progress_bar.ProgressBar.show", interrupt)
    assert collect(cluster, "$NODE_DISK/large", tmp_path / "home") == 130
    assert len(actors) == 2
    assert not (tmp_path / "home").exists()
    for actor in actors:
        # The pipe of an actor can be read at its end.
        assert select.select([actor], [], [], LIMIT)[0]
        os.close(actor)


def test_the_rest_comes_home_when_a_node_is_lost(
    cluster: TwoNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last test of this cluster: it kills a node."""
    (cluster.disk / "both").mkdir()
    (cluster.disk / "both" / "first").write_text("first")
    (node,) = cluster.cluster.worker_nodes
    cluster.cluster.remove_node(node, allow_graceful=False)
    assert collect(cluster, str(cluster.disk / "both"), tmp_path / "home") in (0, 1)
    said = capsys.readouterr().out
    assert re.search(r"lost .* left the cluster before|failed .* left the cluster meanwhile", said), said
    assert (tmp_path / "home" / "first").read_text() == "first"
