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
from capture.facts import Setting
from capture.file_format.folder_layout import list_capture_folders
from capture.file_format.micro_batch import CaptureError
from capture.on_ray.cluster import connect
from capture.on_ray.node_files import FileChange, write_change
from replay.on_ray.node_actors import NodeAgent
from replay.output.text import pluralise
from replay.processes.pool import Task
from replay.runlog.writer import list_versions

# The time that the agents get to remove their files.
LEAVE_SECONDS = 10.0
MOST_RANKS_SHARING_CORES = 8


class NodeSlots(NamedTuple):
    """A node, and its room for ranks."""

    id: str
    host: str
    # How many ranks fit: GPUs, or CPUs where the cluster has no GPU.
    num_slots: int


class Cluster:
    """The nodes that were alive at the start. What ranks write on a node is below `home_on(node)` there."""

    def __init__(self, ray: Any) -> None:
        has_gpus = any(node["Resources"].get("GPU") for node in ray.nodes() if node["Alive"])
        self.ray = ray
        # What each rank takes one of.
        self.resource = "GPU" if has_gpus else "CPU"
        self.nodes = self._list_alive_nodes()
        self._home = Path(tempfile.gettempdir()) / f"replay-on-ray-{uuid.uuid4().hex[:12]}"
        self._lost: set[str] = set()
        # The driver's folders of inputs, by the paths of their copies on nodes.
        self._originals: dict[str, Path] = {}

    @property
    def num_slots(self) -> int:
        return sum(node.num_slots for node in self.nodes)

    def count_slots_left(self) -> int:
        """Return how many ranks fit now: nodes may be lost, and others come."""
        return sum(node.num_slots for node in self._list_alive_nodes())

    @property
    def slots_on_largest_node(self) -> int:
        """Return how many ranks fit into one node."""
        return max(node.num_slots for node in self.nodes)

    def describe_spill(self, num_model_ranks: int) -> str | None:
        """Say that the ranks of one model replica do not fit into a node; None if they do."""
        if num_model_ranks <= self.slots_on_largest_node:
            return None
        return (
            f"tp x ring needs {num_model_ranks} ranks and no node has more than {self.slots_on_largest_node}: "
            "they talk across nodes"
        )

    def locate_home(self, node_id: str) -> Path:
        return self._home / node_id

    @cached_property
    def agents(self) -> dict[str, Any]:
        """Start an agent on each node. Raises UsageError if a node cannot run it, or has other versions."""
        agents = self._start_agents(self.nodes)
        self.nodes = [node for node in self.nodes if node.id in agents]
        return agents

    def start_agents_on_new_nodes(self) -> None:
        """Start an agent on each node that has joined the cluster since. Raises UsageError as `agents` does."""
        known_ids = {node.id for node in self.nodes}
        new_nodes = [node for node in self._list_alive_nodes() if node.id not in known_ids]
        started = self._start_agents(new_nodes)
        self.agents.update(started)
        self.nodes += [node for node in new_nodes if node.id in started]

    def _list_alive_nodes(self) -> list[NodeSlots]:
        return [
            NodeSlots(node["NodeID"], node["NodeManagerHostname"], int(node["Resources"].get(self.resource, 0)))
            for node in self.ray.nodes()
            if node["Alive"]
        ]

    def _start_agents(self, nodes: Sequence[NodeSlots]) -> dict[str, Any]:
        """Start an agent on each of these nodes but those that are lost meanwhile, and return them by node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # An agent takes no CPU, so that it also starts on a node that other jobs fill.
        agent_class = self.ray.remote(num_cpus=0)(NodeAgent)
        agents = {}
        for node in nodes:
            on_this_node = NodeAffinitySchedulingStrategy(node.id, soft=False)
            agent = agent_class.options(scheduling_strategy=on_this_node).remote(str(self.locate_home(node.id)))
            agents[node.id] = agent
        driver_versions, answers = list_versions(), [agents[node.id].list_versions.remote() for node in nodes]
        for node, answer in zip(nodes, answers, strict=True):
            try:
                node_versions = self.ray.get(answer)
            except self.ray.exceptions.RayError as error:
                # For some seconds Ray says of a lost node that it is alive.
                if node not in self._list_alive_nodes():
                    del agents[node.id]
                    continue
                reason = [line for line in str(error).splitlines() if line.strip()][-1].strip()
                raise UsageError(
                    f"node {node.host} cannot run replay: {reason}. Try: one image for all nodes"
                ) from None
            differences = [
                f"{name} {node_versions.get(name)}, not {version}"
                for name, version in driver_versions.items()
                if node_versions.get(name) != version
            ]
            if differences:
                raise UsageError(
                    f"node {node.host} has other versions than the driver: {'; '.join(differences)}. "
                    "Try: one image for all nodes"
                )
        return agents

    def refuse_too_many(self, num_ranks: int) -> None:
        if num_ranks > self.num_slots:
            raise UsageError(
                Setting("processes", num_ranks),
                f"needs as many {self.resource}s, and the cluster has {self.num_slots} on "
                f"{pluralise(len(self.nodes), 'node')}",
                f"Try: {Setting('processes', self.num_slots)}",
            )

    def ship(self, folder: Path) -> dict[str, Path]:
        """Copy a folder of inputs through Ray's object store to the nodes that see other files there, or none.

        Returns the folder of the copy by node.
        """
        homes = list_capture_folders(folder) if folder.is_dir() else []
        paths = [path for home in homes for path in home.iterdir() if path.is_file()]
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
        answers = {node: agent.is_missing_files.remote(str(folder), sizes) for node, agent in self.agents.items()}
        nodes_without_files = [node for node, answer in answers.items() if self.ray.get(answer)]
        name = uuid.uuid4().hex[:8]
        for path in paths if nodes_without_files else []:
            data = self.ray.put(path.read_bytes())
            relative = path.relative_to(folder).as_posix()
            self.ray.get([self.agents[node].receive.remote(name, relative, data) for node in nodes_without_files])
        copies = {node: NodeAgent.folder_of_inputs(self.locate_home(node), name) for node in nodes_without_files}
        self._originals |= {str(copy): folder for copy in copies.values()}
        return copies

    def translate_paths(self, written: bytes, root: Path) -> bytes:
        """Return what was written on a node with the driver's paths: below `root`, or of the inputs."""
        homes = {str(self.locate_home(node)): root for node in self.agents}
        for node_path, driver_path in (self._originals | homes).items():
            written = written.replace(node_path.encode(), str(driver_path).encode())
        return written

    def fetch(self, handle_change: Callable[[FileChange], None]) -> None:
        """Bring home what the nodes have written: `handle_change` gets each change."""
        open_nodes = [node for node in self.agents if node not in self._lost]
        while open_nodes:
            news = {node: self.agents[node].read_changes.remote() for node in open_nodes}
            open_nodes = []
            for node, changes in news.items():
                try:
                    for change in (received := self.ray.get(changes)):
                        handle_change(change)
                except self.ray.exceptions.RayError:
                    self._lose(node)
                else:
                    open_nodes += [node] if received else []

    def _lose(self, node_id: str) -> None:
        self._lost.add(node_id)
        [host] = [node.host for node in self.nodes if node.id == node_id]
        print(f"replay: node {host} is lost; what it had not sent yet is lost too", file=sys.stderr, flush=True)

    def write_home(self, change: FileChange, root: Path) -> None:
        """Repeat a node's change of a file below `root`, with the driver's paths."""
        if change.is_whole_text:
            change = change._replace(data=self.translate_paths(change.data, root))
        write_change(change, root)

    def finish(self, task: Task, root: Path, message: str = "") -> None:
        """Join what a task's ranks printed on the nodes, and `message`; clear up there. Its logs lie below `root`."""
        parts = [task.output, *sorted(task.output.parent.glob(f"{task.output.name}.node*"))]
        printed = self.translate_paths(b"".join(part.read_bytes() for part in parts if part.is_file()), root)
        task.output.parent.mkdir(parents=True, exist_ok=True)
        task.output.write_bytes(printed + (f"replay: {message}\n".encode() if message else b""))
        for part in parts[1:]:
            part.unlink()
        for path in (task.logs, *parts):
            self.forget(path.relative_to(root).as_posix())

    def forget(self, name: str) -> None:
        """Remove what lies below `name` on every node: it has come home."""
        for node in self.agents.keys() - self._lost:
            self.agents[node].remove.remote(name)

    def close(self) -> None:
        if "agents" in self.__dict__:
            answers = [agent.leave.remote() for node, agent in self.agents.items() if node not in self._lost]
            with suppress(self.ray.exceptions.RayError):
                self.ray.wait(answers, num_returns=len(answers), timeout=LEAVE_SECONDS)
            for agent in self.agents.values():
                self.ray.kill(agent)


@contextmanager
def open_cluster(address: str | None, num_ranks: int = 1) -> Iterator[Cluster]:
    """Connect to the cluster at `address`, or start one here with room for `num_ranks`; leave or stop it at the end.

    Raises UsageError without Ray, or without a cluster at the address.
    """
    with ExitStack() as stack:
        try:
            ray = stack.enter_context(
                connect(address) if address else _start_local_cluster(_count_local_slots(num_ranks))
            )
        except CaptureError as error:
            raise UsageError(*error.args) from None
        cluster = Cluster(ray)
        stack.callback(cluster.close)
        yield cluster


@contextmanager
def _start_local_cluster(num_cpus: int) -> Iterator[Any]:
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


def _count_local_slots(num_ranks: int) -> int:
    """Return how many CPUs a local cluster counts: without GPUs, ranks may share cores, as under torchrun."""
    return max(os.cpu_count() or 1, min(num_ranks, MOST_RANKS_SHARING_CORES))
