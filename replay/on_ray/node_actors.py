"""Define what runs on the nodes of a Ray cluster.

NodeAgent    an actor on each node, for its files
RankProcess  an actor for each rank of one of many replays, which it runs in a process of its own
run_as_rank  what a worker of Ray Train does: one replay, as a rank of the process group that Ray has opened
"""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from capture.on_ray.node_files import NodeFiles
from replay.processes.child_job import ChildJob
from replay.processes.error_reports import run_to_exit_code
from replay.processes.launch import without_launcher
from replay.processes.supervisor import ChildGroup, start_process
from replay.runlog.writer import list_versions

# How long a process may take to end after SIGTERM, until it gets SIGKILL.
GRACE_SECONDS = 5.0


class NodeAgent(NodeFiles):
    """A Ray actor pinned to a node. Its folder holds what ranks write, a folder beside it the inputs it received."""

    @staticmethod
    def folder_of_inputs(home: Path, name: str) -> Path:
        return home.with_name(f"{home.name}-inputs") / name

    @staticmethod
    def folder_of_states(home: Path) -> Path:
        """Return the folder where ranks write their part of a state, for Ray Train to carry to its storage."""
        return home.with_name(f"{home.name}-states")

    def list_versions(self) -> dict[str, str | None]:
        return list_versions()

    def is_missing_files(self, folder: str, sizes: Mapping[str, int]) -> bool:
        """Tell whether this node sees other files, or none, where the driver has a folder of inputs."""
        paths = {Path(folder) / name: size for name, size in sizes.items()}
        return any(not path.is_file() or path.stat().st_size != size for path, size in paths.items())

    def receive(self, name: str, file: str, data: bytes) -> None:
        """Write one file of the inputs called `name`."""
        path = self.folder_of_inputs(self.folder, name) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def try_shared_folder(self, folder: str, name: str) -> str | None:
        """Try to write into a folder that all nodes share, where the driver wrote `name`. Return why not."""
        if not (Path(folder) / name).is_file():
            return "it sees another folder there, or none"
        try:
            with TemporaryDirectory(dir=folder):
                return None
        except OSError as error:
            return error.strerror

    def leave(self) -> None:
        """Remove all that this agent and the ranks have written."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.folder_of_states(self.folder), ignore_errors=True)
        shutil.rmtree(self.folder_of_inputs(self.folder, ""), ignore_errors=True)


def work_in(folder: str) -> None:
    """Make the driver's working folder this process's, if this node has it."""
    if Path(folder).is_dir():
        os.chdir(folder)


class RankPlace(NamedTuple):
    """The node where a rank's actor runs, and the GPUs that Ray gives it."""

    node_id: str
    address: str
    # As CUDA_VISIBLE_DEVICES names them.
    gpus: tuple[str, ...]


class RankProcess:
    """A Ray actor with room for one rank. `end` may be called while `run` runs."""

    def __init__(self) -> None:
        self._rank: ChildGroup | None = None
        # The store is open as long as this object refers to it.
        self._store: object = None

    def find_place(self) -> RankPlace:
        import ray

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return RankPlace(context.get_node_id(), ray.util.get_node_ip_address(), tuple(gpus))

    def open_store(self, address: str) -> int:
        """Open the store where the ranks meet, and return its port."""
        from torch.distributed import TCPStore

        self._store = store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return store.port

    def run(
        self,
        module: str,
        job: str,
        variables: dict[str, str],
        folder: str,
        output: Path,
        limit: float,
    ) -> int | None:
        """Run `python -m module --job FILE` and return its exit code; None if it has not ended after `limit` seconds.

        job     as JSON
        folder  the working folder, if this node has it
        output  file for what is printed
        """
        work_in(folder)
        output.parent.mkdir(parents=True, exist_ok=True)
        path = ChildJob.parse(job, source="the job of a rank").write()
        command = [sys.executable, "-u", "-m", "replay.processes.supervisor", module, "--job", str(path)]
        with output.open("ab") as file:
            environment = without_launcher(os.environ) | variables
            self._rank = ChildGroup.start([partial(start_process, command, environment, output=file)], limit=limit)
        exit_code = self._rank.wait()
        self.end()
        return exit_code

    def end(self) -> None:
        """End the rank if it still runs."""
        if self._rank is not None:
            with suppress(ProcessLookupError):
                self._rank.end(grace=GRACE_SECONDS)


# The names of each rank's files begin with these words; its number follows, as in `out0`.
EXIT_CODE, OUT, ERR = "exit-code", "out", "err"


def run_as_rank(job: Mapping[str, Any]) -> int:
    """Run a command, and leave its output and exit code in files, for `NodeFiles` to send.

    command function of the job, which returns an exit code
    job     what is replayed, as JSON
    homes   folder with a folder for each node, for what ranks write there
    folder  the driver's working folder, which becomes this rank's if the node has it
    inputs  by node, the folder of the inputs that were sent there; none where a node sees the driver's folder
    show_traceback  of an error
    """
    import ray

    node, rank = ray.get_runtime_context().get_node_id(), os.environ["RANK"]
    home = Path(job["homes"]) / node
    home.mkdir(parents=True, exist_ok=True)
    rank_job = ChildJob.parse(job["job"], source="the job of a rank").on_node(home, job["inputs"].get(node))
    work_in(job["folder"])
    with redirect_output(home / f"{OUT}{rank}", home / f"{ERR}{rank}"):
        exit_code = run_to_exit_code(partial(job["command"], rank_job), show_traceback=job["show_traceback"])
    (home / f"{EXIT_CODE}{rank}").write_text(str(exit_code))
    return exit_code


@contextmanager
def redirect_output(out: Path, err: Path) -> Iterator[None]:
    """Send this process's standard output and error into files, native code's too."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    duplicates = [os.dup(number) for number in (1, 2)]
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    with open(1, "w", buffering=1, closefd=False) as to_out, open(2, "w", buffering=1, closefd=False) as to_err:
        sys.stdout, sys.stderr = to_out, to_err
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams
            for number, duplicate in zip((1, 2), duplicates, strict=True):
                os.dup2(duplicate, number)
                os.close(duplicate)
