"""Connect to a Ray cluster or start a local one, and keep an agent on each of its nodes."""

import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from actor_init.spec import UsageError
from capture.file_format.folder_layout import list_capture_folders
from capture.file_format.micro_batch import CaptureError
from capture.on_ray.cluster import connect
from capture.on_ray.node_files import FileChange, write_change
from replay.on_ray.node_actors import NodeAgent
from replay.output.text import counted
from replay.processes.pool import Task
from replay.runlog.writer import versions

LEAVE_SECONDS = 10.0  # for the agents to remove their files
MOST_RANKS_SHARING_CORES = 8


class Node(NamedTuple):
    id: str
    host: str
    num_slots: int  # ranks that fit: GPUs, or CPUs where the cluster has no GPU


class Cluster:
    """The nodes that were alive at the start. What ranks write on a node is below `home_on(node)` there."""

    def __init__(self, ray: Any) -> None:
        has_gpus = any(node["Resources"].get("GPU") for node in ray.nodes() if node["Alive"])
        self.ray = ray
        self.kind = "GPU" if has_gpus else "CPU"  # what a rank takes
        self.nodes = self._alive()
        self._home = Path(tempfile.gettempdir()) / f"replay-on-ray-{uuid.uuid4().hex[:12]}"
        self._lost: set[str] = set()
        self._originals: dict[str, Path] = {}  # folders of inputs, by their copies on nodes

    @property
    def num_slots(self) -> int:
        return sum(node.num_slots for node in self.nodes)

    def num_slots_left(self) -> int:
        """Return how many ranks fit now: nodes may be lost, and others come."""
        return sum(node.num_slots for node in self._alive())

    @property
    def largest(self) -> int:
        """Return how many ranks fit into one node."""
        return max(node.num_slots for node in self.nodes)

    def spill(self, num_model_ranks: int) -> str | None:
        """Say that the ranks of one model replica do not fit into a node; None if they do."""
        if num_model_ranks <= self.largest:
            return None
        return (
            f"tp x ring needs {num_model_ranks} ranks and no node has more than {self.largest}: they talk across nodes"
        )

    def home_on(self, node_id: str) -> Path:
        return self._home / node_id

    @cached_property
    def agents(self) -> dict[str, Any]:
        """Start an agent on each node. Raises UsageError if a node cannot run it, or has other versions."""
        return self._agents_on(self.nodes)

    def meet_new_nodes(self) -> None:
        """Start an agent on each node that has joined the cluster since. Raises UsageError as `agents` does."""
        known = {node.id for node in self.nodes}
        new = [node for node in self._alive() if node.id not in known]
        self.agents.update(self._agents_on(new))
        self.nodes += new

    def _alive(self) -> list[Node]:
        return [
            Node(node["NodeID"], node["NodeManagerHostname"], int(node["Resources"].get(self.kind, 0)))
            for node in self.ray.nodes()
            if node["Alive"]
        ]

    def _agents_on(self, nodes: Sequence[Node]) -> dict[str, Any]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        kind = self.ray.remote(num_cpus=0)(NodeAgent)
        agents = {
            node.id: kind.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
                str(self.home_on(node.id))
            )
            for node in nodes
        }
        here, theirs = versions(), [agents[node.id].versions.remote() for node in nodes]
        for node, answer in zip(nodes, theirs, strict=True):
            try:
                there = self.ray.get(answer)
            except self.ray.exceptions.RayError as error:
                reason = [line for line in str(error).splitlines() if line.strip()][-1].strip()
                raise UsageError(
                    f"node {node.host} cannot run replay: {reason}. Try: one image for all nodes"
                ) from None
            others = [
                f"{name} {there.get(name)}, not {version}"
                for name, version in here.items()
                if there.get(name) != version
            ]
            if others:
                raise UsageError(
                    f"node {node.host} has other versions than the driver: {'; '.join(others)}. "
                    "Try: one image for all nodes"
                )
        return agents

    def refuse_too_many(self, num_ranks: int, option: str) -> None:
        if num_ranks > self.num_slots:
            raise UsageError(
                f"{option} {num_ranks} needs as many {self.kind}s, and the cluster has {self.num_slots} on "
                f"{counted(len(self.nodes), 'node')}. Try: {option} {self.num_slots}"
            )

    def ship(self, folder: Path) -> dict[str, Path]:
        """Copy a folder of inputs through Ray's object store to the nodes that see other files there, or none.

        Returns the folder of the copy by node.
        """
        homes = list_capture_folders(folder) if folder.is_dir() else []
        paths = [path for home in homes for path in home.iterdir() if path.is_file()]
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
        lacks = {node: agent.lacks.remote(str(folder), sizes) for node, agent in self.agents.items()}
        lacking = [node for node, lack in lacks.items() if self.ray.get(lack)]
        name = uuid.uuid4().hex[:8]
        for path in paths if lacking else []:
            data = self.ray.put(path.read_bytes())
            relative = path.relative_to(folder).as_posix()
            self.ray.get([self.agents[node].receive.remote(name, relative, data) for node in lacking])
        copies = {node: NodeAgent.folder_of_inputs(self.home_on(node), name) for node in lacking}
        self._originals |= {str(copy): folder for copy in copies.values()}
        return copies

    def with_paths_here(self, said: bytes, root: Path) -> bytes:
        """Return what was written on a node with the paths that it has here: below `root`, or of the inputs."""
        homes = {str(self.home_on(node)): root for node in self.agents}
        for there, here in (self._originals | homes).items():
            said = said.replace(there.encode(), str(here).encode())
        return said

    def fetch(self, take: Callable[[FileChange], None]) -> None:
        """Bring home what the nodes have written: `take` gets each change."""
        open_nodes = [node for node in self.agents if node not in self._lost]
        while open_nodes:
            news = {node: self.agents[node].news.remote() for node in open_nodes}
            open_nodes = []
            for node, changes in news.items():
                try:
                    for change in (got := self.ray.get(changes)):
                        take(change)
                except self.ray.exceptions.RayError:
                    self._lose(node)
                else:
                    open_nodes += [node] if got else []

    def _lose(self, node_id: str) -> None:
        self._lost.add(node_id)
        [host] = [node.host for node in self.nodes if node.id == node_id]
        print(f"replay: node {host} is lost; what it had not sent yet is lost too", file=sys.stderr, flush=True)

    def write_home(self, change: FileChange, root: Path) -> None:
        """Make a node's change below `root`, with paths as they are here."""
        if change.is_whole_text:
            change = change._replace(data=self.with_paths_here(change.data, root))
        write_change(change, root)

    def finish(self, task: Task, root: Path, said: str = "") -> None:
        """Join what a task's ranks printed on the nodes, and `said`; clear up there. Its logs lie below `root`."""
        parts = [task.output, *sorted(task.output.parent.glob(f"{task.output.name}.node*"))]
        printed = self.with_paths_here(b"".join(part.read_bytes() for part in parts if part.is_file()), root)
        task.output.parent.mkdir(parents=True, exist_ok=True)
        task.output.write_bytes(printed + (f"replay: {said}\n".encode() if said else b""))
        for part in parts[1:]:
            part.unlink()
        for path in (task.logs, *parts):
            self.forget(path.relative_to(root).as_posix())

    def forget(self, name: str) -> None:
        """Remove what lies below `name` on every node: it has come home."""
        for node in self.agents.keys() - self._lost:
            self.agents[node].forget.remote(name)

    def close(self) -> None:
        if "agents" in self.__dict__:
            left = [agent.leave.remote() for node, agent in self.agents.items() if node not in self._lost]
            with suppress(self.ray.exceptions.RayError):
                self.ray.wait(left, num_returns=len(left), timeout=LEAVE_SECONDS)
            for agent in self.agents.values():
                self.ray.kill(agent)


@contextmanager
def cluster_at(address: str | None, num_ranks: int = 1) -> Iterator[Cluster]:
    """Connect to the cluster at `address`, or start one here with room for `num_ranks`; leave or stop it at the end.

    Raises UsageError without Ray, or without a cluster at the address.
    """
    with ExitStack() as stack:
        try:
            ray = stack.enter_context(connect(address) if address else _started(_num_local_slots(num_ranks)))
        except CaptureError as error:
            raise UsageError(*error.args) from None
        cluster = Cluster(ray)
        stack.callback(cluster.close)
        yield cluster


@contextmanager
def _started(num_cpus: int) -> Iterator[Any]:
    """Start a cluster here, and stop it at the end."""
    try:
        import ray
    except ImportError:
        raise UsageError("--launcher ray needs Ray. Try: pip install 'micro-replay[ray]'") from None
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield ray
    finally:
        ray.shutdown()


def _num_local_slots(num_ranks: int) -> int:
    """Return how many CPUs a local cluster counts: without GPUs, ranks may share cores, as under torchrun."""
    return max(os.cpu_count() or 1, min(num_ranks, MOST_RANKS_SHARING_CORES))
