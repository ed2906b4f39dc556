"""Ranks that are threads of this process, for code in which ranks do no more than tell each other values."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.helpers.commands import LIMIT

CPU = torch.device("cpu")


class Threads:
    """A world whose ranks are threads of this process."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._values: dict[int, Any] = {}
        self._barrier = threading.Barrier(world_size)

    def on_rank(self, rank: int, device: torch.device = CPU) -> Any:
        return _Thread(self, rank, device)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait(LIMIT)
        values = [self._values[r] for r in range(self.world_size)]
        self._barrier.wait(LIMIT)
        return values


class _Thread:
    def __init__(self, threads: Threads, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = threads.world_size
        self.device = device
        self.gather: Callable[[Any], list[Any]] = lambda value: threads.exchange(rank, value)
        self.broadcast_from_rank0: Callable[[Any], Any] = lambda value: threads.exchange(rank, value)[0]


def call_on_ranks(function: Callable[[Any], Any], devices: Sequence[torch.device]) -> list[Any]:
    """Call `function` with the world of each rank, and return what it returned or raised there."""
    threads = Threads(len(devices))
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
        worker.join(LIMIT)
    return [results[rank] for rank in range(len(devices))]
