"""Run a replay on the nodes of a Ray cluster: Ray Train starts its ranks, and its log comes home as it is written."""

import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from actor_init.spec import UsageError
from capture.file_format.folder_layout import homes_in
from replay.on_ray.node_files import Change, NodeFiles, write
from replay.on_ray.rank import ERR, EXIT_CODE, OUT
from replay.on_ray.rank import replay as replay_as_rank
from replay.option_parsing import command_line
from replay.report.text import counted
from replay.runlog.writer import versions
from replay.runner.selection import default_folder
from replay.spec import RunSpec

POLL_SECONDS = 0.5
CONNECT_SECONDS = 5.0
MOST_RANKS_SHARING_CORES = 8
DIED = 1  # exit code of a run whose ranks left none: they were killed, ended each other, or died with their node


class Node(NamedTuple):
    id: str
    num_slots: int  # ranks that fit: GPUs, or CPUs where the cluster has no GPU


def run_on_ray(
    spec: RunSpec,
    command: Callable[[Sequence[str]], int],
    *,
    address: str | None,
    num_workers: int | None,
    show_traceback: bool,
) -> int:
    """Replay on a running cluster, or on one that is started here and stopped again. Returns the replay's exit code.

    command      the function of the command line, which each rank calls with the arguments of `spec`
    address      of the cluster, or `auto`; None: start a local one
    num_workers  ranks; None: tp x ring

    Raises UsageError without Ray, without a cluster at the address, or for more workers than it has GPUs or CPUs.
    """
    parallel = spec.actor.parallel
    num_workers = num_workers or parallel.tp * parallel.ring
    with _cluster(address, num_workers) as ray:
        nodes, kind = _nodes(ray)
        _refuse_too_many(num_workers, nodes, kind)
        if spill := _spill(parallel.tp * parallel.ring, nodes):
            print(f"replay: {spill}", file=sys.stderr)
        run = _RayRun(ray, nodes, Path(spec.measure.log_folder))
        try:
            return run.run(spec, command, num_workers, on_gpus=kind == "GPU", show_traceback=show_traceback)
        finally:
            run.close()


@contextmanager
def _cluster(address: str | None, num_workers: int) -> Iterator[Any]:
    """Connect to the cluster, or start one here; leave it, or stop it, at the end."""
    try:
        import ray
    except ImportError:
        raise UsageError("--launcher ray needs Ray. Try: pip install 'micro-replay[ray]'") from None
    if address not in (None, "auto"):
        _refuse_silent(address)
    num_cpus = None if address else _num_local_slots(num_workers)
    try:
        ray.init(
            address=address or "local",
            num_cpus=num_cpus,
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:  # the second: other versions of Ray or Python
        raise UsageError(
            f"--address {address}: {str(error).splitlines()[0]} Try: ray status, or no --address for a local cluster"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _refuse_silent(address: str) -> None:
    """Raise UsageError if nobody listens at the address. Ray itself would try for a minute and more."""
    host, _, port = address.rpartition(":")
    if "/" in host or not host or not port.isdecimal():
        raise UsageError(f"--address {address} is not allowed. Give auto, or HOST:PORT as `ray start --head` prints it")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--address {address}: no Ray cluster there: {error}. Try: ray status, or no --address for a local cluster"
        ) from None


def _num_local_slots(num_workers: int) -> int:
    """Return how many CPUs a local cluster counts: without GPUs, ranks may share cores, as under torchrun."""
    return max(os.cpu_count() or 1, min(num_workers, MOST_RANKS_SHARING_CORES))


def _nodes(ray: Any) -> tuple[list[Node], str]:
    """Return the nodes that are alive, and what a rank takes on them: a GPU, or a CPU if the cluster has no GPU."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    kind = "GPU" if any(node["Resources"].get("GPU") for node in alive) else "CPU"
    return [Node(node["NodeID"], int(node["Resources"].get(kind, 0))) for node in alive], kind


def _refuse_too_many(num_workers: int, nodes: Sequence[Node], kind: str) -> None:
    num_slots = sum(node.num_slots for node in nodes)
    if num_workers > num_slots:
        raise UsageError(
            f"--workers {num_workers} needs as many {kind}s, and the cluster has {num_slots} on "
            f"{counted(len(nodes), 'node')}. Try: --workers {num_slots}"
        )


def _spill(num_model_ranks: int, nodes: Sequence[Node]) -> str | None:
    """Say that the ranks of one model replica do not fit into a node."""
    largest = max(node.num_slots for node in nodes)
    if num_model_ranks <= largest:
        return None
    return f"tp x ring needs {num_model_ranks} ranks and no node has more than {largest}: they talk across nodes"


class _RayRun:
    def __init__(self, ray: Any, nodes: Sequence[Node], logs: Path) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray = ray
        self._logs = logs
        self._home = Path(tempfile.gettempdir()) / f"replay-on-ray-{uuid.uuid4().hex[:12]}"
        self._exit_codes: dict[str, int] = {}
        self._printed: dict[str, int] = {}  # bytes of what each rank has said, by file
        actor = ray.remote(num_cpus=0)(NodeFiles)
        self._files = {
            node: actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
                str(self._home / node.id)
            )
            for node in nodes
        }

    def run(
        self,
        spec: RunSpec,
        command: Callable[[Sequence[str]], int],
        num_workers: int,
        *,
        on_gpus: bool,
        show_traceback: bool,
    ) -> int:
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        job = {
            "command": command,
            "arguments": [*command_line(spec), *["--traceback"] * show_traceback],
            "home": str(self._home),
            "folder": str(Path.cwd()),
            "inputs": self._inputs_to_ship(spec),
            "versions": versions(),
        }
        os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # it prints what goes to a redirected stream a second time
        trainer = TorchTrainer(
            replay_as_rank,
            train_loop_config=job,
            scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=on_gpus),
            torch_config=TorchConfig(backend="nccl" if on_gpus else "gloo"),
            run_config=RunConfig(storage_path=str(self._home / "ray"), name="train"),
        )
        failure = _Failure()
        training = threading.Thread(target=failure.guard, args=(trainer.fit,), daemon=True)
        training.start()
        while training.is_alive():
            training.join(POLL_SECONDS)
            self._fetch()
        self._fetch()
        if failure.error is not None and not self._exit_codes:
            print(f"replay: Ray Train: {str(failure.error).splitlines()[0]}", file=sys.stderr)
        return max(self._exit_codes.values(), default=DIED)

    def close(self) -> None:
        for files in self._files.values():
            self._ray.kill(files)
        shutil.rmtree(self._home, ignore_errors=True)

    def _inputs_to_ship(self, spec: RunSpec) -> list[Any] | None:
        """Put the inputs into Ray's object store if a node sees others where they are; None if all see them."""
        folder = (spec.inputs.inputs or default_folder()).absolute()
        homes = homes_in(folder) if folder.is_dir() else []
        found = [path for home in homes for path in home.iterdir() if path.is_file()]
        paths = {path.relative_to(folder).as_posix(): path for path in found}
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        if not any(self._ray.get([files.lacks.remote(str(folder), sizes) for files in self._files.values()])):
            return None
        return [self._ray.put({name: path.read_bytes() for name, path in paths.items()})]

    def _fetch(self) -> None:
        """Bring home what the nodes have written: logs, what ranks print, exit codes."""
        for node, files in self._files.items():
            while changes := self._ray.get(files.news.remote()):
                for change in changes:
                    self._take(change, str(self._home / node.id))

    def _take(self, change: Change, home: str) -> None:
        """Paths of the node's folder become those of the driver's log folder in what is printed and in whole files."""
        if change.name.startswith(EXIT_CODE):
            self._exit_codes[change.name] = int(change.data)
        elif change.name.startswith((OUT, ERR)) and "/" not in change.name:
            stream = sys.stdout if change.name.startswith(OUT) else sys.stderr
            printed = self._printed.get(change.name, 0)
            said = b"".join(change.data[max(0, printed - change.offset) :].rpartition(b"\n")[:2])  # whole lines
            stream.write(said.decode(errors="replace").replace(home, str(self._logs)))
            stream.flush()
            self._printed[change.name] = printed + len(said)
        else:
            if change.offset == 0 and change.name.endswith((".json", ".txt")):
                change = change._replace(data=change.data.replace(home.encode(), str(self._logs).encode()))
            write(change, self._logs)


class _Failure:
    error: Exception | None = None

    def guard(self, work: Any) -> None:
        try:
            work()
        except Exception as error:  # of Ray Train: what a rank said is in its own output
            self.error = error
