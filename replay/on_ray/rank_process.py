"""Run one rank of a replay on the node that Ray chose, as a process of its own."""

import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from replay.on_ray.node_agent import work_in
from replay.processes.child_job import ChildJob
from replay.processes.launch import without_launcher
from replay.processes.supervisor import Group, start

GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL


class Place(NamedTuple):
    node_id: str
    address: str
    gpus: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them


class RankProcess:
    """A Ray actor with room for one rank. `end` may be called while `run` runs."""

    def __init__(self) -> None:
        self._rank: Group | None = None
        self._store: object = None  # kept: it is open as long as this is

    def place(self) -> Place:
        import ray

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return Place(context.get_node_id(), ray.util.get_node_ip_address(), tuple(gpus))

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
        command = [sys.executable, "-u", "-m", "replay.on_ray.bound", module, "--job", str(path)]
        with output.open("ab") as file:
            environment = without_launcher(os.environ) | variables
            self._rank = Group.start([partial(start, command, environment, output=file)], limit=limit)
        exit_code = self._rank.wait()
        self.end()
        return exit_code

    def end(self) -> None:
        """End the rank if it still runs."""
        if self._rank is not None:
            with suppress(ProcessLookupError):
                self._rank.end(grace=GRACE_SECONDS)
