"""Run many replays side by side on a Ray cluster, each in a placement group of as many GPUs as it has ranks.

Ray decides what runs where and when. A replay that dies, hangs or runs out of memory ends alone.
"""

import math
import signal
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from actor_init.spec import UsageError
from replay.on_ray.cluster import Cluster
from replay.on_ray.node_actors import GRACE_SECONDS, RankPlace, RankProcess
from replay.output.text import pluralise
from replay.processes.pool import ProcessResult, Task

Key = TypeVar("Key")
POLL_SECONDS = 0.5
# The time that ranks get to end when they are told to.
END_SECONDS = 2 * GRACE_SECONDS
MAX_TASKS_AT_ONCE = 256
LOST_MESSAGE = "the node of a rank, or the worker that ran it, was lost"


class RayTaskRunner:
    """Runs tasks on a cluster, as `replay.processes.pool.run_children` does on this machine."""

    def __init__(self, cluster: Cluster, root: Path, *, at_once: int = 1, module: str = "replay") -> None:
        """Create it for tasks whose logs and outputs lie below `root`.

        at_once  tasks of one rank that share a GPU, or a CPU on a cluster without GPUs; a rank of others has its own
        module   what each rank runs with `--job FILE`
        """
        self._cluster = cluster
        self._root = root
        self._at_once = at_once
        self._module = module
        # The copies of each folder of inputs, by node.
        self._copies: dict[Path, Mapping[str, Path]] = {}
        # The actors of each running task, by its placement group. Each task has a thread, which alone adds and removes
        # its group; the caller's thread only reads a copy of them, when all are ended.
        self._actors: dict[Any, list[Any]] = {}
        self._is_ending = False
        # The outputs of tasks whose node or worker was lost.
        self._lost_outputs: set[Path] = set()

    @property
    def num_running(self) -> int:
        return len(self._actors)

    def __call__(
        self, tasks: Iterable[tuple[Key, Task]], *, start_deadline: float = math.inf
    ) -> Generator[tuple[Key, ProcessResult]]:
        """Yield the result of each task as it ends, with its files at home. None starts after `until` (monotonic).

        On Ctrl-C, or any other exception here or in the caller's loop, running tasks are ended first.
        """
        self._is_ending = False
        waiting = iter(tasks)
        running: dict[Future[ProcessResult | None], tuple[Key, Task]] = {}
        num_threads = min(self._cluster.num_slots * self._at_once, MAX_TASKS_AT_ONCE)
        with ThreadPoolExecutor(num_threads, thread_name_prefix="cell") as threads:
            try:
                while True:
                    while len(running) < num_threads and time.monotonic() <= start_deadline:
                        if (next_pair := next(waiting, None)) is None:
                            break
                        key, task = next_pair
                        self._refuse_too_many(task.num_processes)
                        copies = self._ship_inputs(task)
                        running[threads.submit(self._run, task, copies, start_deadline)] = next_pair
                    if not running:
                        return
                    ended_futures, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                    self._cluster.fetch(partial(self._cluster.write_home, root=self._root))
                    for future in ended_futures:
                        key, task = running.pop(future)
                        if (child := future.result()) is not None:
                            is_lost = task.output in self._lost_outputs
                            self._cluster.finish(task, self._root, LOST_MESSAGE if is_lost else "")
                            yield key, child
            finally:
                self._end_all()

    def _refuse_too_many(self, num_ranks: int) -> None:
        """Raise UsageError for a run that would wait for a place without end."""
        if num_ranks > self._cluster.num_slots:
            slots = pluralise(self._cluster.num_slots, self._cluster.resource)
            raise UsageError(
                f"a run needs {num_ranks} ranks, and the cluster has {slots}. Try: smaller --tp and --ring"
            )

    def _ship_inputs(self, task: Task) -> Mapping[str, Path]:
        inputs = task.job.inputs
        if inputs not in self._copies:
            self._copies[inputs] = self._cluster.ship(inputs)
        return self._copies[inputs]

    def _run(self, task: Task, copies: Mapping[str, Path], start_deadline: float) -> ProcessResult | None:
        """Run one task, in a thread of its own. Returns None if it did not start."""
        from ray.util import placement_group, remove_placement_group

        share = 1 / self._at_once if task.num_processes == 1 else 1.0
        fits_into_a_node = task.num_processes <= self._cluster.slots_on_largest_node
        bundles = [{self._cluster.resource: share}] * task.num_processes
        group = placement_group(bundles, strategy="STRICT_PACK" if fits_into_a_node else "PACK")
        try:
            ready = group.ready()
            while not self._cluster.ray.wait([ready], timeout=POLL_SECONDS)[0]:
                if self._is_ending or time.monotonic() > start_deadline:
                    return None
            started_at = time.monotonic()
            try:
                exit_code = self._run_ranks(group, share, task, copies)
            except self._cluster.ray.exceptions.RayError:
                self._lost_outputs.add(task.output)
                exit_code = -signal.SIGKILL
            seconds = time.monotonic() - started_at
            return ProcessResult(exit_code=exit_code, seconds=seconds, output=task.output, logs=task.logs)
        finally:
            self._end(self._actors.pop(group, []))
            remove_placement_group(group)

    def _run_ranks(self, group: Any, share: float, task: Task, copies: Mapping[str, Path]) -> int | None:
        """Run the ranks in the group's bundles. The exit code is that of a failed rank, if any."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = self._cluster.ray
        # Two calls at once: `end` has to reach an actor whose `run` is running.
        actor_class = ray.remote(**{f"num_{self._cluster.resource.lower()}s": share}, max_concurrency=2)(RankProcess)
        strategies = [PlacementGroupSchedulingStrategy(group, index) for index in range(task.num_processes)]
        actors = [actor_class.options(scheduling_strategy=strategy).remote() for strategy in strategies]
        self._actors[group] = actors
        places: list[RankPlace] = ray.get([actor.find_place.remote() for actor in actors])
        # The ranks of a node get consecutive numbers, as under torchrun. Those of one replica of the model (tp x ring)
        # are consecutive too, so they share a node where they fit.
        order = sorted(range(len(actors)), key=lambda index: places[index].node_id)
        actors, places = [actors[index] for index in order], [places[index] for index in order]
        port = ray.get(actors[0].open_store.remote(places[0].address)) if len(actors) > 1 else None
        nodes = list(dict.fromkeys(place.node_id for place in places))
        running = []
        for rank, (actor, place) in enumerate(zip(actors, places, strict=True)):
            home = self._cluster.locate_home(place.node_id)
            job = task.job.on_node(home / task.logs.relative_to(self._root), copies.get(place.node_id))
            output = choose_output_file(nodes.index(place.node_id), home / task.output.relative_to(self._root))
            variables = build_rank_variables(rank, places, port)
            running.append(
                actor.run.remote(self._module, job.text, variables, str(task.folder.absolute()), output, task.limit)
            )
        while running:
            [ended], running = ray.wait(running, num_returns=1)
            exit_code: int | None = ray.get(ended)
            if exit_code != 0:
                return exit_code
        return 0

    def _end(self, actors: Sequence[Any]) -> None:
        """End the ranks, then their actors."""
        ray = self._cluster.ray
        if answers := [actor.end.remote() for actor in actors]:
            ray.wait(answers, num_returns=len(answers), timeout=END_SECONDS)
        for actor in actors:
            ray.kill(actor)

    def _end_all(self) -> None:
        self._is_ending = True
        self._end([actor for actors in list(self._actors.values()) for actor in actors])


def choose_output_file(node_index: int, output: Path) -> Path:
    """Return the file for what ranks print on one of a task's nodes."""
    return output if node_index == 0 else output.with_name(f"{output.name}.node{node_index}")


def build_rank_variables(rank: int, places: Sequence[RankPlace], port: int | None) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank, and the GPUs of all ranks on its node.

    places  of all ranks, those of a node side by side
    port    of the store at the first rank's address; None: it is the only rank, which needs none of them
    """
    if port is None:
        return {}
    ranks_on_node = [other for other, place in enumerate(places) if place.node_id == places[rank].node_id]
    gpus = [gpu for other in ranks_on_node for gpu in places[other].gpus]
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(ranks_on_node.index(rank)),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_WORLD_SIZE": str(len(ranks_on_node)),
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
    }
