"""Group a run's records into passes and accumulation windows identified by their inputs, and match those of two runs.

Matching ignores order, data ranks, and tp or ring peers.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from replay.runlog.records import PassRecord
from replay.runlog.summary import reason_to_leave_out

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One input through the model, as recorded by all ranks that shared it."""

    peers: Sequence[PassRecord]  # one per tp and ring rank
    is_counted: bool  # in the statistics of time and memory
    num_windows_before: int

    @property
    def source(self) -> str:
        return self.peers[0].source


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The passes that one gradient was averaged over: `grad_accumulation` passes on every data rank."""

    inputs: tuple[str, ...]  # sorted, because their order does not matter
    norms: Sequence[float]  # of every rank
    last_pass: int  # index of its last pass in the run
    index: int  # of its last pass, as each rank counts its own

    @property
    def name(self) -> str:
        return self.inputs[0] if len(self.inputs) == 1 else f"{self.inputs[0]} and {len(self.inputs) - 1} more"


def passes_and_windows(records: Sequence[PassRecord]) -> tuple[list[Pass], list[Window]]:
    """Return the passes and windows in all ranks' records, which are sorted by pass and rank."""
    passes: list[Pass] = []
    windows: list[Window] = []
    open_inputs: list[str] = []
    for _, group in groupby(records, key=lambda record: record.index):
        ranks = list(group)
        by_data_rank: dict[int, list[PassRecord]] = {}
        for record in ranks:
            by_data_rank.setdefault(record.data_rank, []).append(record)
        is_counted = reason_to_leave_out(ranks) is None
        for peers in by_data_rank.values():
            passes.append(Pass(peers=peers, is_counted=is_counted, num_windows_before=len(windows)))
            if peers[0].input.trains:
                open_inputs.append(peers[0].source)
        if norms := [record.result.grad_norm for record in ranks if record.result.grad_norm is not None]:
            inputs = tuple(sorted(open_inputs))
            windows.append(Window(inputs=inputs, norms=norms, last_pass=len(passes) - 1, index=ranks[0].index))
            open_inputs = []
    return passes, windows


def matched(
    reference: Iterable[Item], others: Iterable[Item], key: Callable[[Item], Hashable]
) -> list[tuple[Item, Item]]:
    """Pair items with the same key, in the order of `reference`; equal keys pair up in order."""
    partners = _numbered(others, key)
    return [(item, partners[name]) for name, item in _numbered(reference, key).items() if name in partners]


def _numbered(items: Iterable[Item], key: Callable[[Item], Hashable]) -> dict[tuple[Hashable, int], Item]:
    seen: Counter[Hashable] = Counter()
    numbered: dict[tuple[Hashable, int], Item] = {}
    for item in items:
        numbered[key(item), seen[key(item)]] = item
        seen[key(item)] += 1
    return numbered
