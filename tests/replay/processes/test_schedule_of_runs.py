"""Which runs begin when, and on which GPUs: no process is started here."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from replay.processes import pool
from replay.processes.pool import run_children
from tests.helpers.children import start_each_task


class MadeRuns:
    """In the place of processes: of those that run, the one that began first ends first. Writes down what happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.running: list[Any] = []
        start_each_task(self.start, monkeypatch)
        monkeypatch.setattr(pool, "wait_for_any", self.end_first)

    def start(self, task: Any, gpus: Sequence[str]) -> Any:
        self.events.append(f"{task.name} on {''.join(gpus)}" if gpus else task.name)
        ranks = SimpleNamespace(is_over=False, processes=[])
        self.running.append(SimpleNamespace(ranks=ranks, gpus=gpus, task=task, finish=lambda grace: task.name))
        return self.running[-1]

    def end_first(self, ranks: Any) -> None:
        first = self.running.pop(0)
        first.ranks.is_over = True
        self.events.append(f"{first.task.name} ends")


def make_tasks(sizes: str) -> Iterator[tuple[str, Any]]:
    """Tasks a, b, c, ... of so many processes."""
    for name, size in zip("abcdefgh", sizes, strict=False):
        yield name, SimpleNamespace(name=name, num_processes=int(size))


@pytest.mark.parametrize(
    ("sizes", "at_once", "gpus", "events"),
    [
        ("111", 1, "", "a, a ends, b, b ends, c, c ends"),
        ("1111", 3, "", "a, b, c, a ends, d, b ends, c ends, d ends"),
        # Without GPUs the number of processes of a run is not limited.
        ("99", 1, "", "a, a ends, b, b ends"),
        ("111", 1, "01", "a on 0, b on 1, a ends, c on 0, b ends, c ends"),
        # A run of two processes waits for both GPUs, and what comes behind it waits too.
        ("1121", 1, "01", "a on 0, b on 1, a ends, b ends, c on 01, c ends, d on 0, d ends"),
        # The least used GPUs come first; on none are more than two.
        ("12111", 2, "01", "a on 0, b on 10, c on 1, a ends, d on 0, b ends, e on 0, c ends, d ends, e ends"),
        ("2121", 1, "0123", "a on 01, b on 2, a ends, c on 01, d on 3, b ends, c ends, d ends"),
    ],
)
def test_runs_begin_as_there_is_room(
    sizes: str, at_once: int, gpus: str, events: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeRuns(monkeypatch)
    ended: list[Any] = list(run_children(make_tasks(sizes), at_once=at_once, gpus=list(gpus)))
    assert ", ".join(made.events) == events
    assert sorted(ended) == [(name, name) for name in "abcdefgh"[: len(sizes)]]
