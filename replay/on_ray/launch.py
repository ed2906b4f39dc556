"""Run a replay, or another command of many ranks, on a Ray cluster: Ray Train starts the ranks."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from actor_init.spec import UsageError
from capture.on_ray.node_files import FileChange
from replay.on_ray.cluster import Cluster, cluster_at
from replay.on_ray.fit import Fit, fitting
from replay.on_ray.node_actors import ERR, EXIT_CODE, OUT
from replay.on_ray.node_actors import replay as replay_as_rank
from replay.options.ray_options import RayOptions
from replay.processes.child_job import ChildJob
from replay.runlog.run_file import RUN_FILE, RunFile
from replay.runlog.writer import INTERRUPTED

POLL_SECONDS = 0.5
DIED = 1  # exit code of a run whose ranks left none: they were killed, ended each other, or died with their node


def run_on_ray(command: Callable[[ChildJob], int], job: ChildJob, options: RayOptions, *, show_traceback: bool) -> int:
    """Run a command on a running cluster, or on one that is started here and stopped again. Returns its exit code.

    command         what each rank calls with its job; it is pickled
    job             which logs into a folder here
    show_traceback  of an error of a rank

    Raises UsageError without Ray, without a cluster at the address, for more ranks than it has GPUs or CPUs, or for a
    number of them that is no multiple of tp x ring.
    """
    parallel = job.spec.actor.parallel
    num_model_ranks = parallel.tp * parallel.ring
    num_ranks = options.num_processes or num_model_ranks
    if num_ranks % num_model_ranks:
        more = (num_ranks // num_model_ranks + 1) * num_model_ranks
        raise UsageError(
            f"--processes {num_ranks} is no multiple of tp {parallel.tp} x ring {parallel.ring}. "
            f"Try: --processes {more}"
        )
    with cluster_at(options.address, num_ranks) as cluster:
        cluster.refuse_too_many(num_ranks, "--processes")
        if spill := cluster.spill(num_model_ranks):
            print(f"replay: {spill}", file=sys.stderr)
        run = _RayRun(cluster, job.logs)
        return run.run(command, job, num_ranks, show_traceback=show_traceback)


class _RayRun:
    def __init__(self, cluster: Cluster, logs: Path) -> None:
        self._cluster = cluster
        self._logs = logs
        self._exit_codes: dict[str, int] = {}
        self._folders: set[Path] = set()  # of runs
        self._printed: dict[str, int] = {}  # bytes of what each rank has said, by file

    def run(self, command: Callable[[ChildJob], int], job: ChildJob, num_ranks: int, *, show_traceback: bool) -> int:
        copies = self._cluster.ship(job.inputs)
        work = {
            "command": command,
            "job": job.text,
            "homes": str(self._cluster.home_on("")),
            "folder": str(Path.cwd()),
            "inputs": {node: str(folder) for node, folder in copies.items()},
            "show_traceback": show_traceback,
        }
        storage = str(self._cluster.home_on("ray"))
        fit = Fit(rank=replay_as_rank, job=work, storage=storage, name="train", num_ranks=num_ranks)
        try:
            with fitting(fit, self._cluster) as trainer:
                while not trainer.is_over(POLL_SECONDS):
                    self._cluster.fetch(self._take)
        except KeyboardInterrupt:
            self._mark_interrupted()
            raise
        self._cluster.fetch(self._take)
        _, error = trainer.outcome()
        if error and not self._exit_codes:
            print(f"replay: Ray Train: {error}", file=sys.stderr)
        return max(self._exit_codes.values(), default=DIED)

    def _mark_interrupted(self) -> None:
        """Say so in run.json: the ranks are ended with the cluster's job and write nothing any more."""
        for folder in self._folders:
            run = RunFile.read(folder)
            if run.status == "running":
                replace(run, status="interrupted", exit_code=INTERRUPTED).write(folder)

    def _take(self, change: FileChange) -> None:
        if change.name.startswith(EXIT_CODE):
            if change.data:  # else the rank has made its file and not written it yet
                self._exit_codes[change.name] = int(change.data)
        elif change.name.startswith((OUT, ERR)) and "/" not in change.name:
            stream = sys.stdout if change.name.startswith(OUT) else sys.stderr
            printed = self._printed.get(change.name, 0)
            said = b"".join(change.data[max(0, printed - change.offset) :].rpartition(b"\n")[:2])  # whole lines
            stream.write(self._cluster.with_paths_here(said, self._logs).decode(errors="replace"))
            stream.flush()
            self._printed[change.name] = printed + len(said)
        else:
            self._cluster.write_home(change, self._logs)
            if Path(change.name).name == RUN_FILE:
                self._folders.add((self._logs / change.name).parent)
