"""Divide the time of a profiled pass among kinds of work.

Every moment belongs to one kind: to the kernel that runs, the one that began first where several do; to exposed
communication where only communication runs; to `gaps` where nothing runs. So the kinds add up to the pass.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

PHASE = "phase: "  # begins the name of the range that a phase of a pass is recorded under


class Work(StrEnum):
    ATTENTION = "attention"
    MATMUL = "matmul"
    ELEMENTWISE = "elementwise"
    COPIES = "copies"
    COMMUNICATION = "communication"
    GAPS = "gaps"


# parts of the names of CUDA kernels and of torch's operators, in the order in which they are tried
PARTS: Mapping[Work, Sequence[str]] = {
    Work.COMMUNICATION: ("nccl", "gloo:", "c10d::", "oneccl"),
    Work.ATTENTION: ("flash", "fmha", "sdpa", "scaled_dot_product", "efficient_attention"),
    Work.MATMUL: (
        "gemm",
        "gemv",
        "nvjet",
        "cutlass",
        "cublas",
        "xmma",
        "splitk",
        "::mm",
        "addmm",
        "bmm",
        "linear",
        "matmul",
    ),
    Work.COPIES: ("memcpy", "memset", "copy", "aten::cat", "catarray", "chunk_cat", "::clone", "::contiguous"),
}


class Interval(NamedTuple):
    """Work from `begin` to `end`, in seconds on one clock."""

    begin: float
    end: float
    work: Work


def work_of(name: str) -> Work:
    """Return the kind of work of a kernel or operator by its name; what no part fits is elementwise."""
    name = name.lower()
    return next((work for work, parts in PARTS.items() if any(part in name for part in parts)), Work.ELEMENTWISE)


def seconds_by_work(intervals: Iterable[Interval], begin: float, end: float) -> dict[Work, float]:
    """Return the seconds of each kind between `begin` and `end`, which add up to `end - begin`."""
    seconds: dict[Work, float] = defaultdict(float)
    clipped = sorted(one._replace(begin=max(one.begin, begin), end=min(one.end, end)) for one in intervals)
    computing = [one for one in clipped if one.work is not Work.COMMUNICATION and one.begin < one.end]
    last = begin
    for one in computing:
        seconds[one.work] += max(0.0, one.end - max(one.begin, last))
        last = max(last, one.end)
    busy = sum(seconds.values())
    communicating = [one for one in clipped if one.work is Work.COMMUNICATION and one.begin < one.end]
    busy_with_both = _covered(sorted([*computing, *communicating]))
    if communicating:
        seconds[Work.COMMUNICATION] = busy_with_both - busy
    seconds[Work.GAPS] = end - begin - busy_with_both
    return dict(seconds)


def hidden_seconds(intervals: Sequence[Interval]) -> float:
    """Return the seconds in which communication ran beside other work."""
    communicating = [one for one in intervals if one.work is Work.COMMUNICATION]
    computing = [one for one in intervals if one.work is not Work.COMMUNICATION]
    return max(0.0, _covered(communicating) + _covered(computing) - _covered(intervals))


def _covered(intervals: Iterable[Interval]) -> float:
    total, last = 0.0, float("-inf")
    for one in sorted(intervals):
        total += max(0.0, one.end - max(one.begin, last))
        last = max(last, one.end)
    return total


def waited_for(seconds_by_rank: Sequence[Sequence[float]]) -> list[float] | None:
    """Return how long each rank waited in collectives, given the seconds of each collective on each rank, in order.

    The rank that comes last to a collective is in it for the shortest time; what another is in it longer, it waited.
    None if the ranks did not run the same number of collectives.
    """
    if len({len(seconds) for seconds in seconds_by_rank}) != 1 or not seconds_by_rank[0]:
        return None
    shortest = [min(one) for one in zip(*seconds_by_rank, strict=True)]
    return [sum(seconds) - sum(shortest) for seconds in seconds_by_rank]
