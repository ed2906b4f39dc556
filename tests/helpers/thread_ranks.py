"""Ranks that are threads of this process: some tell each other values alone, others have torch's process groups."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from actor_init.spec import ParallelSpec
from actor_init.world import MESH_AXES, World
from tests.helpers.commands import LIMIT

ResultT = TypeVar("ResultT")

CPU = torch.device("cpu")


class Threads:
    """A world whose ranks are threads of this process."""

    def __init__(self, world_size: int, limit: float = LIMIT) -> None:
        """Make the ranks; one that waits for another gives up after `limit` seconds."""
        self.world_size = world_size
        self._limit = limit
        self._values: dict[int, Any] = {}
        self._barrier = threading.Barrier(world_size)

    def on_rank(self, rank: int, device: torch.device = CPU) -> Any:
        return _Thread(self, rank, device)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait(self._limit)
        values = [self._values[r] for r in range(self.world_size)]
        self._barrier.wait(self._limit)
        return values


class _Thread:
    def __init__(self, threads: Threads, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = threads.world_size
        self.device = device
        self.gather: Callable[[Any], list[Any]] = lambda value: threads.exchange(rank, value)
        self.broadcast_from_rank0: Callable[[Any], Any] = lambda value: threads.exchange(rank, value)[0]


def call_on_ranks(
    function: Callable[[Any], Any], devices: Sequence[torch.device], *, limit: float = LIMIT
) -> list[Any]:
    """Call `function` with the world of each rank, and return what it returned or raised there.

    limit  seconds after which ranks that do not meet in the same exchange give up
    """
    threads = Threads(len(devices), limit)
    results: dict[int, Any] = {}

    def call(rank: int) -> None:
        try:
            results[rank] = function(threads.on_rank(rank, devices[rank]))
        except Exception as error:
            results[rank] = error

    workers = [threading.Thread(target=call, args=(rank,)) for rank in range(len(devices))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(limit)
    return [results[rank] for rank in range(len(devices))]


def run_with_groups(function: Callable[[World], ResultT], num_ranks: int, parallel: ParallelSpec) -> list[ResultT]:
    """Call `function` with the world of each rank, and return what it returned there; raise what a rank raised.

    Collectives go through the process groups that torch tests its own parallelism with. They copy as gloo does, but
    know no shares of different sizes in a reduce-scatter, and no groups that DeepSpeed opens.
    """
    results: dict[int, ResultT] = {}
    errors: list[BaseException] = []

    def call(rank: int, store: dist.Store, give_up: Callable[[BaseException], None]) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
        try:
            results[rank] = function(_make_world(rank, num_ranks, parallel))
        # The others wait for this rank, whatever it raises; they are ended by a SystemExit.
        except BaseException as error:
            errors.append(error)
            give_up(error)
        finally:
            dist.destroy_process_group()

    with _groups_of_threads() as give_up:
        store = dist.HashStore()
        workers = [threading.Thread(target=call, args=(rank, store, give_up)) for rank in range(num_ranks)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(LIMIT)
    if errors:
        raise next((error for error in errors if not isinstance(error, SystemExit)), errors[0])
    return [results[rank] for rank in range(num_ranks)]


@contextmanager
def _groups_of_threads() -> Iterator[Callable[[BaseException], None]]:
    """Give each thread process groups of its own. Yields what ends the ranks that wait for one that failed."""
    # Imported here because the import registers a backend of process groups for good.
    from torch.testing._internal.distributed import multi_threaded_pg

    # A torch for CUDA that finds no GPU takes out, at the first FakeTensorMode, what looks after CUDA's devices. Two
    # threads that do so at once end the process by SIGSEGV (torch 2.11).
    with FakeTensorMode():
        pass
    groups: Any = multi_threaded_pg.ProcessLocalGroup
    c10d: Any = torch._C._distributed_c10d
    c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        # A rank tells the compiler of the whole process what to do, and takes that back, as a ring's check does. Where
        # two do so one amidst the other, what was before does not come back.
        with torch.compiler.set_stance("default"):
            yield groups.exception_handle
    finally:
        groups.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        c10d._set_thread_isolation_mode(False)


def _make_world(rank: int, num_ranks: int, parallel: ParallelSpec) -> World:
    """Make the world that `World.from_env` makes of a launcher's variables, which all threads share."""
    tp, ring = parallel.tp, parallel.ring
    return World(
        rank=rank,
        world_size=num_ranks,
        device=CPU,
        mesh=init_device_mesh("cpu", (num_ranks // (tp * ring), ring, tp), mesh_dim_names=MESH_AXES),
        weights_mesh=init_device_mesh("cpu", (num_ranks // tp, tp), mesh_dim_names=("shard", "tp")),
    )
