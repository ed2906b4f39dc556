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
from replay.on_ray.node_actors import GRACE_SECONDS, Place, RankProcess
from replay.output.text import counted
from replay.processes.pool import Child, Task

Key = TypeVar("Key")
POLL_SECONDS = 0.5
END_SECONDS = 2 * GRACE_SECONDS  # for ranks that are told to end
MOST_AT_ONCE = 256
LOST = "the node of a rank, or the worker that ran it, was lost"


class Cells:
    """Runs tasks on a cluster, as `run_children` does on this machine."""

    def __init__(self, cluster: Cluster, root: Path, *, at_once: int = 1, module: str = "replay") -> None:
        """Create it for tasks whose logs and outputs lie below `root`.

        at_once  tasks of one rank that share a GPU, or a CPU on a cluster without GPUs; a rank of others has its own
        module   what each rank runs with `--job FILE`
        """
        self._cluster = cluster
        self._root = root
        self._at_once = at_once
        self._module = module
        self._copies: dict[Path, Mapping[str, Path]] = {}  # by folder of inputs, then by node
        self._actors: dict[Any, list[Any]] = {}  # of running tasks, by placement group
        self._is_ending = False
        self._lost: set[Path] = set()  # outputs of tasks whose node or worker was lost

    @property
    def num_running(self) -> int:
        return len(self._actors)

    def __call__(self, tasks: Iterable[tuple[Key, Task]], *, until: float = math.inf) -> Generator[tuple[Key, Child]]:
        """Yield the result of each task as it ends, with its files at home. None starts after `until` (monotonic).

        On Ctrl-C, or any other exception here or in the caller's loop, running tasks are ended first.
        """
        self._is_ending = False
        waiting = iter(tasks)
        running: dict[Future[Child | None], tuple[Key, Task]] = {}
        num_threads = min(self._cluster.num_slots * self._at_once, MOST_AT_ONCE)
        with ThreadPoolExecutor(num_threads, thread_name_prefix="cell") as threads:
            try:
                while True:
                    while len(running) < num_threads and time.monotonic() <= until:
                        if (following := next(waiting, None)) is None:
                            break
                        self._refuse_too_many(following[1].num_processes)
                        copies = self._copies_of_inputs(following[1])
                        running[threads.submit(self._run, following[1], copies, until)] = following
                    if not running:
                        return
                    over, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                    self._cluster.fetch(partial(self._cluster.write_home, root=self._root))
                    for one in over:
                        key, task = running.pop(one)
                        if (child := one.result()) is not None:
                            self._cluster.finish(task, self._root, LOST if task.output in self._lost else "")
                            yield key, child
            finally:
                self._end_all()

    def _refuse_too_many(self, num_ranks: int) -> None:
        """Raise UsageError for a run that would wait for a place without end."""
        if num_ranks > self._cluster.num_slots:
            slots = counted(self._cluster.num_slots, self._cluster.kind)
            raise UsageError(
                f"a run needs {num_ranks} ranks, and the cluster has {slots}. Try: smaller --tp and --ring"
            )

    def _copies_of_inputs(self, task: Task) -> Mapping[str, Path]:
        inputs = task.job.inputs
        if inputs not in self._copies:
            self._copies[inputs] = self._cluster.ship(inputs)
        return self._copies[inputs]

    def _run(self, task: Task, copies: Mapping[str, Path], until: float) -> Child | None:
        """Run one task, in a thread of its own. Returns None if it did not start."""
        from ray.util import placement_group, remove_placement_group

        share = 1 / self._at_once if task.num_processes == 1 else 1.0
        fits = task.num_processes <= self._cluster.largest
        bundles = [{self._cluster.kind: share}] * task.num_processes
        group = placement_group(bundles, strategy="STRICT_PACK" if fits else "PACK")
        try:
            ready = group.ready()
            while not self._cluster.ray.wait([ready], timeout=POLL_SECONDS)[0]:
                if self._is_ending or time.monotonic() > until:
                    return None
            began = time.monotonic()
            try:
                exit_code = self._run_in(group, share, task, copies)
            except self._cluster.ray.exceptions.RayError:
                self._lost.add(task.output)
                exit_code = -signal.SIGKILL
            seconds = time.monotonic() - began
            return Child(exit_code=exit_code, seconds=seconds, output=task.output, logs=task.logs)
        finally:
            self._end(self._actors.pop(group, []))
            remove_placement_group(group)

    def _run_in(self, group: Any, share: float, task: Task, copies: Mapping[str, Path]) -> int | None:
        """Run the ranks in the group's bundles. The exit code is that of a failed rank, if any."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = self._cluster.ray
        kind = ray.remote(**{f"num_{self._cluster.kind.lower()}s": share}, max_concurrency=2)(RankProcess)
        bundles = [PlacementGroupSchedulingStrategy(group, index) for index in range(task.num_processes)]
        actors = self._actors[group] = [kind.options(scheduling_strategy=one).remote() for one in bundles]
        places: list[Place] = ray.get([actor.place.remote() for actor in actors])
        order = sorted(range(len(actors)), key=lambda index: places[index].node_id)  # neighbours share a node
        actors, places = [actors[index] for index in order], [places[index] for index in order]
        port = ray.get(actors[0].open_store.remote(places[0].address)) if len(actors) > 1 else None
        nodes = list(dict.fromkeys(place.node_id for place in places))
        running = []
        for rank, (actor, place) in enumerate(zip(actors, places, strict=True)):
            home = self._cluster.home_on(place.node_id)
            job = task.job.on_node(home / task.logs.relative_to(self._root), copies.get(place.node_id))
            output = output_of(nodes.index(place.node_id), home / task.output.relative_to(self._root))
            variables = variables_of(rank, places, port)
            running.append(actor.run.remote(self._module, job.text, variables, str(Path.cwd()), output, task.limit))
        while running:
            [over], running = ray.wait(running, num_returns=1)
            exit_code: int | None = ray.get(over)
            if exit_code != 0:
                return exit_code
        return 0

    def _end(self, actors: Sequence[Any]) -> None:
        """End the ranks, then their actors."""
        ray = self._cluster.ray
        if ending := [actor.end.remote() for actor in actors]:
            ray.wait(ending, num_returns=len(ending), timeout=END_SECONDS)
        for actor in actors:
            ray.kill(actor)

    def _end_all(self) -> None:
        self._is_ending = True
        self._end([actor for actors in list(self._actors.values()) for actor in actors])


def output_of(node_index: int, output: Path) -> Path:
    """Return the file for what ranks print on one of a task's nodes."""
    return output if node_index == 0 else output.with_name(f"{output.name}.node{node_index}")


def variables_of(rank: int, places: Sequence[Place], port: int | None) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank, and the GPUs of all ranks on its node.

    places  of all ranks, those of a node side by side
    port    of the store at the first rank's address; None: it is the only rank, which needs none of them
    """
    if port is None:
        return {}
    here = [other for other, place in enumerate(places) if place.node_id == places[rank].node_id]
    gpus = [gpu for other in here for gpu in places[other].gpus]
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(here.index(rank)),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
    }
