"""Train on a Ray cluster, one task after another, by Ray Train: it keeps states, and begins again from the latest.

STORAGE/<name>/step-000010/    a checkpoint of the task whose logs are in LOGS/<name>/0: the parts of all workers
STORAGE/<name>/...             what Ray Train writes down about them

A task that was trained before under the same name and storage goes on from its latest checkpoint.
"""

import math
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from actor_init.saving.huggingface import check_folder
from actor_init.spec import UsageError
from replay.campaign.training_rank import train
from replay.on_ray.cluster import Cluster
from replay.on_ray.ray_train import FAILED_EXIT_CODE, RayTrainJob, RayTrainProcess, start_ray_train
from replay.processes.pool import ProcessResult, Task
from replay.runlog.run_file import RUN_FILE

Key = TypeVar("Key")
POLL_SECONDS = 0.5
# Seconds that a lost node has to come back, before the training is given up.
NODE_SECONDS = 60.0
# Workers or nodes that may fail before a training is given up.
MAX_FAILURES = 3


class RayTrainings:
    """Runs tasks on a cluster, as `run_children` does on this machine; each is a run of Ray Train."""

    def __init__(
        self,
        cluster: Cluster,
        root: Path,
        storage: str,
        *,
        run_rank: Callable[[Mapping[str, Any]], int] = train,
        node_seconds: float = NODE_SECONDS,
    ) -> None:
        """Create it for tasks whose logs and outputs lie below `root`.

        storage   folder that all nodes share, or a URI as Ray Train takes it
        run_rank  what each worker runs

        Raises UsageError if a node cannot write into the storage.
        """
        self._cluster = cluster
        self._root = root
        self._storage = storage
        self._run_rank = run_rank
        self._node_seconds = node_seconds
        self._is_running = False
        if "://" not in storage:
            self._check_storage(Path(storage))

    @property
    def num_running(self) -> int:
        return int(self._is_running)

    def __call__(
        self, tasks: Iterable[tuple[Key, Task]], *, start_deadline: float = math.inf
    ) -> Generator[tuple[Key, ProcessResult]]:
        """Yield the result of each task as it ends, with its files at home.

        No task starts after `start_deadline` (monotonic).

        On Ctrl-C, or any other exception here or in the caller's loop, the running one is ended first.
        """
        for key, task in tasks:
            if time.monotonic() > start_deadline:
                return
            self._is_running = True
            try:
                child = self._train(task)
            finally:
                self._is_running = False
            yield key, child

    def _check_storage(self, storage: Path) -> None:
        # The storage may hold states, and `check_folder` wants an empty folder: so it is asked for one inside.
        check_folder(storage / "any", "storage")
        marker = storage / f".{uuid.uuid4().hex}"
        try:
            marker.touch()
            answers = {
                node.host: self._cluster.agents[node.id].try_shared_folder.remote(str(storage), marker.name)
                for node in self._cluster.nodes
            }
            for host, answer in answers.items():
                if reason := self._cluster.ray.get(answer):
                    raise UsageError(
                        f"--storage {storage}: node {host} cannot use it: {reason}. "
                        "Give a folder that all nodes share, or a URI such as s3://bucket/path"
                    )
        finally:
            marker.unlink(missing_ok=True)

    def _train(self, task: Task) -> ProcessResult:
        began = time.monotonic()
        task.output.parent.mkdir(parents=True, exist_ok=True)
        train_job = RayTrainJob(
            run_rank=self._run_rank,
            job=self._describe_job(task),
            storage=self._storage,
            name=task.logs.parent.name,
            num_ranks=task.num_processes,
            max_failures=MAX_FAILURES,
        )
        with start_ray_train(train_job, self._cluster) as trainer:
            exit_code, message = self._follow(trainer, task)
        self._fetch()
        self._cluster.finish(task, self._root, message)
        self._move_aside(task)
        return ProcessResult(exit_code=exit_code, seconds=time.monotonic() - began, output=task.output, logs=task.logs)

    def _follow(self, trainer: RayTrainProcess, task: Task) -> tuple[int | None, str]:
        """Bring home what is written until Ray Train has ended, or until the task's limit or a lost node ends the wait.

        Returns the exit code, None beyond the limit, and a message, which may be empty.
        """
        began = enough_at = time.monotonic()
        while not trainer.wait(POLL_SECONDS):
            self._fetch()
            self._cluster.start_agents_on_new_nodes()
            now, num_left = time.monotonic(), self._cluster.count_slots_left()
            if now - began > task.limit:
                return None, ""
            enough_at = now if num_left >= task.num_processes else enough_at
            if now - enough_at > self._node_seconds:
                return FAILED_EXIT_CODE, (
                    f"{task.num_processes} ranks need as many {self._cluster.resource}s, and {num_left} are left since "
                    f"a node was lost; states are kept in {self._storage}"
                )
        exit_code, error = trainer.read_outcome()
        return exit_code, error and f"Ray Train gave up, at most {MAX_FAILURES} failures are allowed: {error}"

    def _describe_job(self, task: Task) -> dict[str, Any]:
        copies = self._cluster.ship(task.job.inputs)
        return {
            "job": task.job.text,
            "homes": str(self._cluster.locate_home("")),
            "logs": str(task.logs.relative_to(self._root)),
            "output": str(task.output.relative_to(self._root)),
            "folder": str(task.folder.absolute()),
            "inputs": {node: str(folder) for node, folder in copies.items()},
        }

    def _fetch(self) -> None:
        self._cluster.fetch(partial(self._cluster.write_home, root=self._root))

    def _move_aside(self, task: Task) -> None:
        """Move the logs of attempts that broke off aside."""
        attempts = sorted(path.parent for path in task.logs.glob(f"*/{RUN_FILE}"))
        for attempt in attempts[:-1]:
            asides = (task.logs.with_name(f"{task.logs.name}.{number}") for number in count(1))
            aside = next(path for path in asides if not path.exists())
            aside.mkdir()
            attempt.rename(aside / attempt.name)
