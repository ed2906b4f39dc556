"""Compute statistics over the records of a run.

A pass counts if it counts on every rank: no warm-up, no new graph or other first use, no error, not traced. Ranks wait
for each other within a pass, so one rank's compilation slows them all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from replay.runlog.records import FirstUse, PassRecord

FAILED, TRACED, WARMUP, NEW_GRAPH = "failed", "traced", "warm-up", "compiled a new graph"
FIRST_USES: Mapping[str, str] = {
    FirstUse.COMPILED: "compiled",
    FirstUse.TRITON: "compiled or loaded a Triton kernel",
    FirstUse.AUTOTUNED: "autotuned",
    FirstUse.GPU_CODE: "loaded GPU code",
    FirstUse.PLAN: "planned cuDNN's attention",
    FirstUse.RETRY: "retried cudaMalloc",
    FirstUse.LIBRARY: "loaded a library",
    FirstUse.IMPORT: "imported a module",
    FirstUse.ONCE: "slow only once",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseStatistics:
    """Statistics of one phase over all counted passes and ranks."""

    median_seconds: float
    p95_seconds: float  # statistics.quantiles, inclusive: never outside the measured range
    iqr_seconds: float  # inter-quartile range, by the same method
    peak_allocated_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Extreme:
    """A value and the input it belongs to."""

    value: float
    index: int
    source: str
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """The statistics of a run. Everything but the counts is None or empty if no pass counted."""

    num_passes: int
    num_counted: int
    left_out: Mapping[str, int] = field(default_factory=dict)  # passes by reason
    phases: Mapping[str, PhaseStatistics] = field(default_factory=dict)
    median_seconds: float | None = None  # forward + backward + step
    p95_seconds: float | None = None
    iqr_seconds: float | None = None
    real_tokens_per_second: float | None = None  # of all ranks together; a pass takes as long as its slowest rank
    slowest: Extreme | None = None  # seconds
    highest_peak: Extreme | None = None  # bytes
    padding_share: float | None = None  # of all tokens in the inputs
    padding_time_share: float | None = None  # of the ranks' time, assuming that every token costs the same
    wait_share: float | None = None  # of the ranks' time, waiting for the slowest; None with one rank


def sum_phase_seconds(record: PassRecord) -> float:
    return sum(cost.seconds for cost in record.cost.phases.values())


def find_peak_bytes(record: PassRecord) -> int:
    return max((cost.peak_allocated_bytes for cost in record.cost.phases.values()), default=0)


def summarize(records: Sequence[PassRecord]) -> Statistics:
    """Compute statistics over the records of all ranks."""
    passes: dict[int, list[PassRecord]] = {}
    for record in sorted(records, key=lambda r: (r.index, r.rank)):
        passes.setdefault(record.index, []).append(record)
    reasons = {index: find_reason_to_leave_out(ranks) for index, ranks in passes.items()}
    known = dict.fromkeys((FAILED, TRACED, WARMUP, NEW_GRAPH, *FIRST_USES.values()))
    given = [reason for reason in reasons.values() if reason is not None]
    left_out = {name: n for name in known | dict.fromkeys(given) if (n := given.count(name))}
    counted = [ranks for index, ranks in passes.items() if reasons[index] is None]
    if not counted:
        return Statistics(num_passes=len(passes), num_counted=0, left_out=left_out)

    flat = [record for ranks in counted for record in ranks]
    seconds = [sum_phase_seconds(record) for record in flat]
    pass_seconds = sum(max(sum_phase_seconds(r) + (r.cost.wait_seconds or 0.0) for r in ranks) for ranks in counted)
    own_inputs = list({(record.index, record.data_rank): record for record in flat}.values())
    num_real = sum(record.input.real_tokens for record in own_inputs)
    return Statistics(
        num_passes=len(passes),
        num_counted=len(counted),
        left_out=left_out,
        phases=_phase_statistics(flat),
        median_seconds=median(seconds),
        p95_seconds=percentile_95(seconds),
        iqr_seconds=inter_quartile_range(seconds),
        real_tokens_per_second=num_real / pass_seconds if pass_seconds else None,
        slowest=_find_largest(flat, seconds),
        highest_peak=_find_largest(flat, [find_peak_bytes(record) for record in flat]),
        padding_share=1 - num_real / sum(record.input.padded_tokens for record in own_inputs),
        padding_time_share=_padding_time_share(flat),
        wait_share=_wait_share(flat),
    )


def find_reason_to_leave_out(ranks: Sequence[PassRecord]) -> str | None:
    """Return why a pass, given its records of all ranks, is not counted; None if it is."""
    if any(record.error is not None for record in ranks):
        return FAILED
    if any(record.traced for record in ranks):
        return TRACED
    if any(record.warmup for record in ranks):
        return WARMUP
    if any(record.compilation.new_graphs for record in ranks):
        return NEW_GRAPH
    uses = [use for record in ranks for use in record.first_uses]
    return next((FIRST_USES.get(use, use) for use in [*FirstUse, *uses] if use in uses), None)


def percentile_95(values: Sequence[float]) -> float:
    """Return the 95th percentile, interpolated linearly between the two nearest values."""
    return values[0] if len(values) == 1 else quantiles(values, n=20, method="inclusive")[-1]


def inter_quartile_range(values: Sequence[float]) -> float:
    """Return the inter-quartile range, quartiles interpolated linearly between the two nearest values."""
    if len(values) == 1:
        return 0.0
    first, _, third = quantiles(values, n=4, method="inclusive")
    return third - first


def _phase_statistics(records: Sequence[PassRecord]) -> dict[str, PhaseStatistics]:
    costs: dict[str, list[tuple[float, int]]] = {}
    for record in records:
        for name, cost in record.cost.phases.items():
            costs.setdefault(name, []).append((cost.seconds, cost.peak_allocated_bytes))
    return {
        name: PhaseStatistics(
            median_seconds=median(seconds for seconds, _ in measured),
            p95_seconds=percentile_95([seconds for seconds, _ in measured]),
            iqr_seconds=inter_quartile_range([seconds for seconds, _ in measured]),
            peak_allocated_bytes=max(peak for _, peak in measured),
        )
        for name, measured in costs.items()
    }


def _find_largest(records: Sequence[PassRecord], values: Sequence[float]) -> Extreme:
    value, record = max(zip(values, records, strict=True), key=lambda pair: pair[0])
    return Extreme(value=value, index=record.index, source=record.source, rank=record.rank)


def _padding_time_share(records: Sequence[PassRecord]) -> float | None:
    costs = [
        (sum_phase_seconds(r) * (1 - r.input.real_tokens / r.input.fed_tokens), sum_phase_seconds(r))
        for r in records
        if r.input.fed_tokens
    ]
    whole = sum(seconds for _, seconds in costs)
    return sum(padding for padding, _ in costs) / whole if whole else None


def _wait_share(records: Sequence[PassRecord]) -> float | None:
    waits = [
        (r.cost.wait_seconds, r.cost.seconds) for r in records if r.cost.wait_seconds is not None and r.cost.seconds
    ]
    return sum(wait for wait, _ in waits) / sum(whole for _, whole in waits) if waits else None
