"""What comes home from the nodes of a cluster is whole, and takes no other file's place.

The nodes here are folders, and their actors are called in this process; `test_ray_jobs.py` has real ones.
"""

import itertools
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from capture import recording
from capture.cli import main
from capture.file_format.atomic_write import choose_temporary_path
from capture.file_format.manifest import check_folder
from capture.file_format.micro_batch import CaptureError
from capture.on_ray.cluster import check_address
from capture.on_ray.collect import Collection, collect_folder
from capture.on_ray.node_files import MAX_BYTES_PER_ANSWER, NodeFiles
from tests.helpers.full_disk import full_disk
from tests.helpers.small_jobs import TinyModel


class RayError(Exception):
    pass


class Method:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> Callable[[], Any]:
        return lambda: self._function(*arguments)


class Actor:
    """Stands for the handle of an actor."""

    def __init__(self, files: NodeFiles) -> None:
        self.files = files

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self.files, name))


class Cluster(ModuleType):
    """Stands for the module `ray`, connected to a cluster of two nodes and one that was lost.

    disks      stand for the disks of the two nodes
    max_bytes  what an answer of a node holds of files at most
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=KeyError, GetTimeoutError=TimeoutError)
    cloudpickle = SimpleNamespace(register_pickle_by_value=id, unregister_pickle_by_value=id)

    def __init__(self, disks: list[Path]) -> None:
        super().__init__("ray")
        self.disks = disks
        self.max_bytes = MAX_BYTES_PER_ANSWER
        self.is_connected = self.is_interrupted = False
        self.num_actors = 0

    def is_initialized(self) -> bool:
        return self.is_connected

    def init(self, **_: Any) -> None:
        self.is_connected = True

    def shutdown(self) -> None:
        self.is_connected = False

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": f"{number}" * 56, "NodeManagerHostname": f"host{number}", "Alive": number < len(self.disks)}
            for number in range(len(self.disks) + 1)
        ]

    def get(self, call: Callable[[], Any], timeout: float) -> Any:
        if self.is_interrupted:
            raise KeyboardInterrupt
        return call()

    def remote(self, **_: Any) -> Callable[[type[NodeFiles]], Any]:
        """Return what makes a class that of actors, which are started with options."""

        def start(files: type[NodeFiles], node_id: str, folder: str) -> Actor:
            self.num_actors += 1
            on_disk = folder.replace("$DISK", str(self.disks[int(node_id[0])]))
            return Actor(files(on_disk, max_bytes=self.max_bytes))

        def with_options(files: type[NodeFiles], scheduling_strategy: str, **_: Any) -> Any:
            return SimpleNamespace(remote=partial(start, files, scheduling_strategy))

        return lambda files: SimpleNamespace(options=partial(with_options, files))

    def kill(self, actor: Actor) -> None:
        self.num_actors -= 1


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    # No cluster that was started on this machine is looked for.
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    cluster = Cluster([tmp_path / "disk0", tmp_path / "disk1"])
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node_id, soft: node_id)
    for name, module in (("ray", cluster), ("ray.util.scheduling_strategies", strategies)):
        monkeypatch.setitem(sys.modules, name, module)
    yield cluster
    assert (cluster.num_actors, cluster.is_connected) == (0, False)


@pytest.fixture
def nodes(cluster: Cluster) -> list[Path]:
    """The folders `$DISK/run` of two nodes."""
    folders = [disk / "run" for disk in cluster.disks]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def record(folder: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(rank))
    with recording(model := TinyModel(), folder) as recorder:
        for _ in range(3):
            model(torch.ones(2, 4, dtype=torch.long))
    assert recorder.num_written == 3


def read_contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def collect_home(home: Path, **options: Any) -> Collection:
    return collect_folder("$DISK/run", home, **options)


def describe_lines(done: Collection, home: Path) -> list[str]:
    return done.lines("$DISK/run", home)


def test_the_folders_of_all_nodes_come_home_and_are_sent_once(
    nodes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    for rank, folder in enumerate(nodes):
        record(folder, rank, monkeypatch)
    done = collect_home(home)
    assert done.is_whole
    assert read_contents(home) == read_contents(nodes[0]) | read_contents(nodes[1])
    checked = check_folder(home)
    assert (len(checked.good), checked.is_whole, checked.uncommitted) == (6, True, [])
    assert {path.stat().st_mode & 0o777 for path in home.iterdir()} == {0o600}
    again = collect_home(home)
    assert [(node.num_files, node.num_bytes, node.num_equal) for node in again.nodes] == [(0, 0, 4), (0, 0, 4)]
    said = describe_lines(done, home)
    assert said[0].startswith("node       00000000 on host0: 4 files, ")
    assert said[2].startswith("lost       22222222 on host2: left the cluster before")
    assert said[-2:] == [f"           capture check {home}", f"           replay inspect {home}"]


def test_what_was_interrupted_goes_on(cluster: Cluster, nodes: list[Path], tmp_path: Path) -> None:
    home = tmp_path / "home"
    cluster.max_bytes = 1000
    for number in range(4):
        (nodes[0] / f"{number}.bin").write_bytes(os.urandom(2500))

    def interrupt(num_done: int, num_all: int, node: str) -> None:
        # The collection is at the third file then.
        if num_done > 6000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_home(home, on_progress=interrupt)
    assert read_contents(home) == {f"{number}.bin": (nodes[0] / f"{number}.bin").read_bytes() for number in range(2)}
    done = collect_home(home)
    assert (done.nodes[0].num_files, done.nodes[0].num_equal) == (2, 2)
    assert read_contents(home) == read_contents(nodes[0])


def test_ctrl_c_is_one_line(
    cluster: Cluster, nodes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (nodes[0] / "x").write_bytes(b"x")
    cluster.is_interrupted = True
    assert main(["collect", "$DISK/run", "--to", str(tmp_path / "home")]) == 130
    assert capsys.readouterr().err == (
        f"capture: interrupted. What is in {tmp_path / 'home'} is whole; type the same again for the rest\n"
    )


def test_a_file_that_goes_on_is_completed(cluster: Cluster, nodes: list[Path], tmp_path: Path) -> None:
    home, grows = tmp_path / "home", nodes[0] / "grows.bin"
    cluster.max_bytes = 1000
    whole = os.urandom(5000)
    grows.write_bytes(whole[:2500])

    def write_on(num_done: int, num_all: int, node: str) -> None:
        if num_done == 1000:
            with grows.open("ab") as file:
                file.write(whole[2500:4000])

    done = collect_home(home, on_progress=write_on)
    assert (done.is_whole, done.nodes[0].growing) == (False, ["grows.bin"])
    assert "failed     00000000 on host0: grows.bin still being written: the beginning is here" in describe_lines(
        done, home
    )
    assert read_contents(home) == {"grows.bin": whole[:2500]}
    with grows.open("ab") as file:
        file.write(whole[4000:])
    done = collect_home(home)
    assert (done.is_whole, done.nodes[0].num_bytes, done.nodes[0].num_later) == (True, 2500, 1)
    assert read_contents(home) == {"grows.bin": whole}


def test_a_file_that_is_rewritten_while_it_is_read_is_no_mixture(
    cluster: Cluster, nodes: list[Path], tmp_path: Path
) -> None:
    home, changing = tmp_path / "home", nodes[0] / "changing.bin"
    cluster.max_bytes = 1000
    changing.write_bytes(b"a" * 2500)
    others = iter("b")

    def rewrite(num_done: int, num_all: int, node: str) -> None:
        if num_done == 1000 and (other := next(others, None)):
            changing.write_text(other * 2500)

    done = collect_home(home, on_progress=rewrite)
    assert (done.is_whole, read_contents(home)) == (True, {"changing.bin": b"b" * 2500})
    shutil.rmtree(home)
    others = itertools.cycle("cd")
    done = collect_home(home, on_progress=rewrite)
    assert done.nodes[0].unread == {"changing.bin": "it is rewritten again and again"}
    assert not done.is_whole
    assert not home.exists()


def test_a_manifest_is_replaced_by_its_later_state_alone(nodes: list[Path], tmp_path: Path) -> None:
    home = tmp_path / "home"
    manifest = nodes[0] / "manifest_rank0_2026.json"
    for text in ("early", "late"):
        manifest.write_text(text)
        os.utime(manifest, (len(text), -len(text) + 10))
        collect_home(home)
    assert read_contents(home) == {manifest.name: b"late"}
    (nodes[1] / manifest.name).write_text("earlier")
    os.utime(nodes[1] / manifest.name, (0, 0))
    done = collect_home(home)
    assert (done.is_whole, read_contents(home)) == (True, {manifest.name: b"late"})


def test_another_file_of_the_same_name_stays_where_it_is(
    nodes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    for folder, text in zip(nodes, ("one", "two"), strict=True):
        (folder / "notes.txt").write_text(text)
        (folder / f"{text}.txt").write_text(text)
    assert main(["collect", "$DISK/run", "--to", str(home)]) == 1
    assert read_contents(home) == {"notes.txt": b"one", "one.txt": b"one", "two.txt": b"two"}
    said = capsys.readouterr().out.splitlines()
    assert "failed     11111111 on host1: notes.txt not brought: here is another file of that name" in said
    command = f"capture collect '$DISK/run' --to {home}-2 --node 11111111"
    assert f"           Try: {command}" in said
    assert main(command.replace("'", "").split()[1:]) == 0
    assert read_contents(Path(f"{home}-2")) == {"notes.txt": b"two", "two.txt": b"two"}


def test_captures_of_another_model_are_not_mixed_in(
    nodes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    for rank, (folder, size) in enumerate(zip(nodes, (32, 64), strict=True)):
        record(folder, rank, monkeypatch)
        config = {"hidden_size": size, "transformers_version": f"5.{rank}"}
        (folder / "actor.json").write_text(json.dumps({"format": 1, "model_name": None, "config": config}))
    done = collect_home(home)
    assert not done.is_whole
    assert read_contents(home) == read_contents(nodes[0])
    assert done.nodes[1].others == ["actor.json"]
    assert set(done.nodes[1].unread.values()) == {"the actor.json here is another model's"}
    same = (nodes[1] / "actor.json").read_text().replace("64", "32")
    (nodes[1] / "actor.json").write_text(same)
    assert collect_home(home).is_whole
    assert len(check_folder(home).good) == 6


def test_a_temporary_is_no_file_yet(nodes: list[Path], tmp_path: Path) -> None:
    home = tmp_path / "home"
    (nodes[0] / ".actor_inputs_rank0_x.pkl.0123abcd-1-0123abcd-0.tmp").write_bytes(b"half")
    done = collect_home(home)
    assert (done.is_whole, done.nodes[0].num_unfinished) == (True, 1)
    assert not home.exists()
    assert any("1 temporary left there" in line for line in describe_lines(done, home))


def test_temporaries_of_a_killed_collection_are_removed(nodes: list[Path], tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    alive = choose_temporary_path(home / "x")
    dead = alive.with_name(alive.name.replace(f"-{os.getpid()}-", f"-{2**22 + 1}-"))
    for path in (dead, alive):
        path.touch()
    collect_home(home)
    assert [path.exists() for path in (dead, alive)] == [False, True]


def test_the_rest_comes_home_when_a_node_dies(cluster: Cluster, nodes: list[Path], tmp_path: Path) -> None:
    home = tmp_path / "home"
    cluster.max_bytes = 1000
    for folder in nodes:
        for number in range(3):
            (folder / f"{folder.parent.name}-{number}").write_bytes(os.urandom(900))

    def die(num_done: int, num_all: int, node: str) -> None:
        if num_done == 1800 and node.startswith("0"):
            raise RayError("The actor died.\nMuch more.")

    done = collect_home(home, on_progress=die)
    assert sorted(read_contents(home)) == ["disk0-0", "disk1-0", "disk1-1", "disk1-2"]
    assert not done.is_whole
    assert any(
        line.startswith("failed     00000000 on host0: its actor died: The actor died.")
        for line in describe_lines(done, home)
    )


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("run --to {home}", "run is no absolute path"),
        ("$DISK/run --to {home} --node host9", "--node host9: no such node. Give an id or a host of 00000000 on host0"),
        ("$DISK/none --to {home}", "$DISK/none: no node of the cluster has this folder: asked 00000000 on host0, 1111"),
        ("$DISK/run --to /proc/none", "/proc/none: cannot be written to: No such file or directory. Give --to a"),
        ("{home} --to {home}/below", "{home}/below lies in {home}, whose files would be brought there"),
    ],
)
def test_what_cannot_be_collected_is_one_line(
    nodes: list[Path], tmp_path: Path, typed: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    assert main(["collect", *typed.format(home=home).split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"capture: {says.format(home=home)}")
    assert err.count("\n") == 1
    assert not home.exists()


def test_a_full_disk_ends_it_with_a_line(nodes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (nodes[0] / "a").write_bytes(b"a")
    with full_disk():
        assert main(["collect", "$DISK/run", "--to", str(tmp_path / "home")]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"capture: {tmp_path / 'home'}: cannot be written to: File too large. What came is")


def test_a_listener_that_is_no_cluster_is_refused_at_once() -> None:
    with socket.create_server(("localhost", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer).start()
        address = f"localhost:{server.getsockname()[1]}"
        with pytest.raises(
            CaptureError, match=f"address='{address}': no Ray cluster there: what listens there is something else"
        ):
            check_address(address)
    with socket.socket() as deaf:
        # The port stays bound but does not listen. If it were free, another process might listen there by then.
        deaf.bind(("localhost", 0))
        address = f"localhost:{deaf.getsockname()[1]}"
        with pytest.raises(CaptureError, match=f"address='{address}': no Ray cluster there: .*refused"):
            check_address(address)
    with pytest.raises(CaptureError, match="ray://host:1' is not allowed"):
        check_address("ray://host:1")
