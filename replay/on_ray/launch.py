"""Run a replay, or another command of many ranks, on a Ray cluster: Ray Train starts the ranks."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from actor_init.spec import UsageError
from capture.on_ray.node_files import FileChange
from replay.on_ray.cluster import Cluster, open_cluster
from replay.on_ray.node_actors import ERR, EXIT_CODE, OUT, run_as_rank
from replay.on_ray.ray_train import RayTrainJob, start_ray_train
from replay.options.ray_options import RayOptions
from replay.processes.child_job import ChildJob
from replay.runlog.run_file import RUN_FILE, RunFile
from replay.runlog.writer import INTERRUPTED

POLL_SECONDS = 0.5
# The exit code of a run whose ranks left none: they were killed, ended each other, or died with their node.
DIED = 1


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
    with open_cluster(options.address, num_ranks) as cluster:
        cluster.refuse_too_many(num_ranks)
        if spill := cluster.describe_spill(num_model_ranks):
            print(f"replay: {spill}", file=sys.stderr)
        run = _RayRun(cluster, job.logs)
        return run.run(command, job, num_ranks, show_traceback=show_traceback)


class _RayRun:
    def __init__(self, cluster: Cluster, logs: Path) -> None:
        self._cluster = cluster
        self._logs = logs
        self._exit_codes: dict[str, int] = {}
        self._run_folders: set[Path] = set()
        # How many bytes of each rank's output are printed, by file.
        self._num_printed: dict[str, int] = {}

    def run(self, command: Callable[[ChildJob], int], job: ChildJob, num_ranks: int, *, show_traceback: bool) -> int:
        copies = self._cluster.ship(job.inputs)
        work = {
            "command": command,
            "job": job.text,
            "homes": str(self._cluster.locate_home("")),
            "folder": str(Path.cwd()),
            "inputs": {node: str(folder) for node, folder in copies.items()},
            "show_traceback": show_traceback,
        }
        storage = str(self._cluster.locate_home("ray"))
        train_job = RayTrainJob(run_rank=run_as_rank, job=work, storage=storage, name="train", num_ranks=num_ranks)
        try:
            with start_ray_train(train_job, self._cluster) as trainer:
                while not trainer.wait(POLL_SECONDS):
                    self._cluster.fetch(self._handle_change)
        except KeyboardInterrupt:
            self._mark_interrupted()
            raise
        self._cluster.fetch(self._handle_change)
        _, error = trainer.read_outcome()
        if error and not self._exit_codes:
            print(f"replay: Ray Train: {error}", file=sys.stderr)
        return max(self._exit_codes.values(), default=DIED)

    def _mark_interrupted(self) -> None:
        """Write into run.json that the run was interrupted: the ranks are ended with the cluster's job and cannot."""
        for folder in self._run_folders:
            run = RunFile.read(folder)
            if run.status == "running":
                replace(run, status="interrupted", exit_code=INTERRUPTED).write(folder)

    def _handle_change(self, change: FileChange) -> None:
        if change.name.startswith(EXIT_CODE):
            # Without data the rank has made its file, and not written it yet.
            if change.data:
                self._exit_codes[change.name] = int(change.data)
        elif change.name.startswith((OUT, ERR)) and "/" not in change.name:
            stream = sys.stdout if change.name.startswith(OUT) else sys.stderr
            num_printed = self._num_printed.get(change.name, 0)
            new_data = change.data[max(0, num_printed - change.offset) :]
            whole_lines = b"".join(new_data.rpartition(b"\n")[:2])
            stream.write(self._cluster.translate_paths(whole_lines, self._logs).decode(errors="replace"))
            stream.flush()
            self._num_printed[change.name] = num_printed + len(whole_lines)
        else:
            self._cluster.write_home(change, self._logs)
            if Path(change.name).name == RUN_FILE:
                self._run_folders.add((self._logs / change.name).parent)
