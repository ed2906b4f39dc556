"""Train on a Ray cluster, one task after another, by Ray Train: it keeps states, and begins again from the latest.

STORAGE/<name>/step-000010/    a checkpoint of the task whose logs are in LOGS/<name>: the parts of all workers
STORAGE/<name>/...             what Ray Train writes down about them

A task that was trained before under the same name and storage goes on from its latest checkpoint.
"""

import math
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from actor_init.saving.huggingface import check_folder
from actor_init.spec import UsageError
from replay.on_ray.cluster import Cluster
from replay.on_ray.node_agent import inputs_of
from replay.on_ray.node_files import Change, write
from replay.on_ray.training_rank import train
from replay.processes.pool import Child, Task
from replay.report.text import one_line
from replay.runlog.writer import RUN_FILE
from replay.runner.states import KEPT

Key = TypeVar("Key")
POLL_SECONDS = 0.5
MOST_FAILURES = 3  # of workers or nodes, before a training is given up
NODE_SECONDS = 60.0  # for a lost node to come back
FAILED = 1


class Trainings:
    """Runs tasks on a cluster, as `run_children` does on this machine; each is a run of Ray Train."""

    def __init__(
        self,
        cluster: Cluster,
        root: Path,
        storage: str,
        *,
        rank: Callable[[Mapping[str, Any]], int] = train,
        node_seconds: float = NODE_SECONDS,
    ) -> None:
        """Create it for tasks whose logs and outputs lie below `root`.

        storage  folder that all nodes share, or a URI as Ray Train takes it
        rank     what each worker runs

        Raises UsageError if a node cannot write into the storage.
        """
        self._cluster = cluster
        self._root = root
        self._storage = storage
        self._rank = rank
        self._node_seconds = node_seconds
        if "://" not in storage:
            self._check(Path(storage))

    def __call__(self, tasks: Iterable[tuple[Key, Task]], *, until: float = math.inf) -> Generator[tuple[Key, Child]]:
        """Yield the result of each task as it ends, with its files at home. None starts after `until` (monotonic).

        On Ctrl-C, or any other exception here or in the caller's loop, the running one is ended first.
        """
        for key, task in tasks:
            if time.monotonic() > until:
                return
            yield key, self._train(task)

    def _check(self, storage: Path) -> None:
        check_folder(storage / "any", "--storage")
        marker = storage / f".{uuid.uuid4().hex}"
        try:
            marker.touch()
            answers = {
                node.host: self._cluster.agents[node.id].sees.remote(str(storage), marker.name)
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

    def _train(self, task: Task) -> Child:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray = self._cluster.ray
        began = time.monotonic()
        task.output.parent.mkdir(parents=True, exist_ok=True)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        run = ray.remote(num_cpus=0)(_Run).options(scheduling_strategy=here).remote()
        said, exit_code = "", None
        try:
            fitting = run.fit.remote(
                self._rank, self._job(task), self._storage, task.logs.name, task.num_processes, self._cluster.kind
            )
            enough_at = began
            while True:
                ended, _ = ray.wait([fitting], timeout=POLL_SECONDS)
                self._cluster.fetch(self._take)
                if ended:
                    exit_code, said = ray.get(fitting)
                    break
                if time.monotonic() - began > task.limit:
                    break
                self._cluster.meet_new_nodes()
                num_left = self._cluster.num_slots_left()
                enough_at = time.monotonic() if num_left >= task.num_processes else enough_at
                if time.monotonic() - enough_at > self._node_seconds:
                    exit_code = FAILED
                    said = (
                        f"{task.num_processes} ranks need as many {self._cluster.kind}s, and {num_left} are left since "
                        f"a node was lost; states are kept in {self._storage}"
                    )
                    break
        except ray.exceptions.RayError as error:
            exit_code, said = FAILED, f"Ray Train: {one_line(str(error))}"
        finally:
            ray.kill(run)  # and with it the workers
        self._cluster.fetch(self._take)
        self._bring_home(task, said)
        return Child(exit_code=exit_code, seconds=time.monotonic() - began, output=task.output, logs=task.logs)

    def _job(self, task: Task) -> dict[str, Any]:
        copies = self._cluster.ship(inputs_of(task.arguments))
        return {
            "arguments": list(task.arguments),
            "homes": str(self._cluster.home_on("")),
            "logs": str(task.logs.relative_to(self._root)),
            "output": str(task.output.relative_to(self._root)),
            "folder": str(Path.cwd()),
            "inputs": {node: str(folder) for node, folder in copies.items()},
        }

    def _take(self, change: Change) -> None:
        if change.is_whole_text:
            change = change._replace(data=self._cluster.with_paths_here(change.data, self._root))
        write(change, self._root)

    def _bring_home(self, task: Task, said: str) -> None:
        """Join what was printed on the nodes; move the logs of attempts that broke off aside; clear up on the nodes."""
        parts = sorted(task.output.parent.glob(f"{task.output.name}.node-*"))
        printed = b"".join(part.read_bytes() for part in parts)
        printed = self._cluster.with_paths_here(printed, self._root)
        printed += f"replay: {said}\n".encode() if said else b""
        task.output.write_bytes(printed)
        for part in parts:
            part.unlink()
        for path in (task.logs, *parts):
            self._cluster.forget(path.relative_to(self._root).as_posix())
        attempts = sorted(path.parent for path in task.logs.glob(f"*/{RUN_FILE}"))
        for attempt in attempts[:-1]:
            asides = (task.logs.with_name(f"{task.logs.name}.{number}") for number in count(1))
            aside = next(path for path in asides if not path.exists())
            aside.mkdir()
            attempt.rename(aside / attempt.name)


class _Run:
    """A Ray actor that runs Ray Train. Ray ends the workers, and frees their places, when it ends."""

    def fit(
        self,
        rank: Callable[[Mapping[str, Any]], int],
        job: Mapping[str, Any],
        storage: str,
        name: str,
        num_ranks: int,
        kind: str,
    ) -> tuple[int, str]:
        """Train to the end, and return the exit code and what there is to say about it."""
        from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # it prints what goes to a redirected stream a second time
        on_gpus = kind == "GPU"
        trainer = TorchTrainer(
            rank,
            train_loop_config=dict(job),
            scaling_config=ScalingConfig(num_workers=num_ranks, use_gpu=on_gpus),
            torch_config=TorchConfig(backend="nccl" if on_gpus else "gloo"),
            run_config=RunConfig(
                name=name,
                storage_path=storage,
                failure_config=FailureConfig(max_failures=MOST_FAILURES),
                checkpoint_config=CheckpointConfig(num_to_keep=KEPT),
            ),
        )
        try:
            return int(trainer.fit().return_value), ""
        except Exception as error:
            return FAILED, f"given up after {MOST_FAILURES} failures, the last: {one_line(str(error))}"
