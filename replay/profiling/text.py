"""Format profiles: where a pass's time went, its longest kernels, who waited for whom; what held its peak."""

import re
from collections.abc import Sequence

from replay.output.text import Columns, Pairs, format_gibibytes, format_milliseconds, join_lines
from replay.profiling.profile_records import MemoryPeak, MemoryProfile, Profile, Saving, Work

NUM_HOLDERS = 20
HELD = {"cuda": "held at the peak", "cpu": "resident at the peak"}
VIEWERS = {"cuda": "pytorch.org/memory_viz", "cpu": "ui.perfetto.dev"}
WHY_MORE = "memory may be given out and never touched"
WHY_LESS = "libraries take memory for themselves, and what is freed may stay"
# The sum of the parts may differ from the measured peak by this share of it without a remark.
NEAR = 0.02
# Longer names of kernels are shortened. run.json has the whole names.
NAME_WIDTH = 44


def build_share_table(profile: Profile) -> Columns:
    """Return a row for each kind of work, the longest first, with milliseconds and shares by rank."""
    ranks = profile.ranks
    works = sorted(
        {work for rank in ranks for work in rank.seconds_by_work},
        key=lambda work: -sum(rank.seconds_by_work.get(work, 0.0) for rank in ranks),
    )
    columns: Columns = {"profiled pass": [_label_work(work) for work in works]}
    for number, rank in enumerate(ranks):
        seconds = [rank.seconds_by_work.get(work, 0.0) for work in works]
        suffix = f" {number}" if len(ranks) > 1 else ""
        columns[f"ms{suffix}"] = [format_milliseconds(work_seconds) for work_seconds in seconds]
        columns[f"share{suffix}"] = [f"{work_seconds / rank.seconds:.1%}" for work_seconds in seconds]
    return columns


def _label_work(work: str) -> str:
    return "communication, exposed" if work == Work.COMMUNICATION else work


def build_kernel_table(profile: Profile) -> Columns:
    """Return a row for each of the longest kernels of rank 0."""
    rows = profile.ranks[0].longest
    return {
        "kernel" if profile.device == "cuda" else "operator": [_shorten(row.name) for row in rows],
        "module": [row.module or "-" for row in rows],
        "calls": [str(row.count) for row in rows],
        "ms": [format_milliseconds(row.seconds) for row in rows],
    }


def list_profile_remarks(profile: Profile) -> Pairs:
    """Name the profiled pass, hidden communication, the rank that waits and for whom, and the trace files."""
    pairs: Pairs = [("profiled", f"pass {profile.index + 1} once more, {profile.source}: {_describe_clock(profile)}")]
    hidden = [rank.hidden_communication_seconds for rank in profile.ranks]
    if len(profile.ranks) > 1:
        by_rank = ", ".join(format_milliseconds(seconds) for seconds in hidden)
        pairs.append(("hidden", f"{by_rank} ms of communication ran behind other work"))
    if (waits := profile.waits) is not None:
        last, first = waits.index(min(waits)), waits.index(max(waits))
        text = f"rank {first} waited {format_milliseconds(waits[first])} ms in collectives, longest for rank {last}"
        pairs.append(("waits", text if waits[first] > waits[last] else "no rank for another"))
    elif len(profile.ranks) > 1:
        pairs.append(("waits", "unknown: the ranks did not run the same number of collectives"))
    pairs.append(
        ("timeline", f"{', '.join(rank.timeline for rank in profile.ranks)} in the log folder, for ui.perfetto.dev")
    )
    return pairs


def _shorten(name: str) -> str:
    """Leave out a C++ kernel's arguments, then the middle of a long name: its end says more, such as `_backward`."""
    name = re.sub(r"(?<=[\w>])\([^()]*\)$", "", name)
    half = (NAME_WIDTH - 3) // 2
    return name if len(name) <= NAME_WIDTH else f"{name[:half]}...{name[-half:]}"


def _describe_clock(profile: Profile) -> str:
    if profile.device == "cuda":
        return "time of the device; gaps: it ran nothing"
    return "time of the CPU; gaps: no operator of torch ran, but Python or compiled code"


def build_holder_table(memory: MemoryPeak) -> Columns:
    """Return a row for each part that held the peak of the rank with the highest one, the largest first."""
    rank = _find_highest_rank(memory)
    shown, smaller = rank.holders[:NUM_HOLDERS], rank.holders[NUM_HOLDERS:]
    rows = [(holder.kind.value, holder.name or "-", holder.count, holder.num_bytes) for holder in shown]
    if smaller:
        count, num_bytes = sum(holder.count for holder in smaller), sum(holder.num_bytes for holder in smaller)
        rows.append((f"{len(smaller)} smaller ones", "-", count, num_bytes))
    return {
        HELD[rank.device]: [kind for kind, _, _, _ in rows],
        "module": [name for _, name, _, _ in rows],
        "blocks": [str(count) for _, _, count, _ in rows],
        "GiB": [format_gibibytes(num_bytes) for _, _, _, num_bytes in rows],
        "share": [f"{num_bytes / rank.peak_bytes:.1%}" for _, _, _, num_bytes in rows],
    }


def list_memory_remarks(memory: MemoryPeak) -> Pairs:
    """Name the pass and rank, hold the sum against the measured peak, say what options would need, name the files."""
    rank = _find_highest_rank(memory)
    number = memory.ranks.index(rank) if rank.rank is None else rank.rank
    again = " once more" if memory.is_once_more else ""
    pairs: Pairs = [
        ("peak held", f"pass {memory.index + 1}{again}, rank {number}, {memory.source}; {_describe_sums(rank)}")
    ]
    if rank.device == "cpu":
        text = "of the process, by torch's profiler of a CPU's allocations, in place of an allocator's snapshot on CUDA"
        pairs.insert(0, ("resident", text))
    if rank.ran_out:
        pairs.append(("ran out", rank.ran_out.splitlines()[0]))
    if rank.failed:
        pairs.append(("failed", f"this time: {join_lines(rank.failed)}"))
    if not rank.ran_out:
        pairs.append(("would need", f"by prediction, {describe_savings(rank.savings)}"))
    elif rank.savings:
        pairs.append(("would need", f"at least, from what was held when it ran out, {describe_savings(rank.savings)}"))
    files, viewer = ", ".join(profile.snapshot for profile in memory.ranks), VIEWERS[rank.device]
    pairs.append(("snapshot", f"{files} in the log folder, for {viewer}"))
    return pairs


def describe_savings(savings: Sequence[Saving]) -> str:
    """Name options, each with the peak that is predicted with it."""
    if not savings:
        return "no option needs 1% less"
    return "; ".join(f"{saving.option}: {format_gibibytes(saving.peak_bytes)} GiB" for saving in savings)


def _describe_sums(rank: MemoryProfile) -> str:
    sums = f"these are {format_gibibytes(rank.peak_bytes)} GiB"
    if rank.device == "cuda":
        assert rank.reserved_bytes is not None
        unused = format_gibibytes(rank.reserved_bytes - rank.peak_bytes)
        counted = format_gibibytes(rank.counted_bytes)
        return f"{sums}, the allocator counted {counted}, and {unused} GiB more were reserved and not in use"
    excess = rank.peak_bytes / rank.counted_bytes - 1
    difference = f"{abs(excess):.1%} {'more' if excess > 0 else 'less'}"
    reason = f": {WHY_MORE if excess > 0 else WHY_LESS}" if abs(excess) > NEAR else ""
    in_the_run = ""
    if rank.reserved_bytes is not None and rank.reserved_bytes > rank.counted_bytes:
        in_the_run = (
            f". In the run itself they were {format_gibibytes(rank.reserved_bytes)}: what is freed stays resident there"
        )
    pluralise = format_gibibytes(rank.counted_bytes)
    return f"{sums}, {difference} than the {pluralise} GiB that were resident at most{reason}{in_the_run}"


def _find_highest_rank(memory: MemoryPeak) -> MemoryProfile:
    return max(memory.ranks, key=lambda profile: profile.peak_bytes)
