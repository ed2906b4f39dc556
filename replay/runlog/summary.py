"""Compute statistics over the records of a run.

A pass counts if it counts on every rank: no warm-up, no new graph or other first use, no error, not traced. Ranks wait
for each other within a pass, so one rank's compilation slows them all.
"""

from collections import Counter
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
    """Statistics of one phase over all counted passes and ranks.

    Quantiles are those of `statistics.quantiles`, inclusive: never outside the measured range.
    """

    median_seconds: float
    p95_seconds: float
    iqr_seconds: float
    peak_allocated_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Extreme:
    """The largest value of all passes and ranks, and the input and rank that it belongs to."""

    value: float
    index: int
    source: str
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """The statistics of a run. Everything but the counts is None or empty if no pass counted.

    left_out                number of passes by the reason why they do not count
    median_seconds          of forward, backward and step together, as p95_seconds and iqr_seconds are
    real_tokens_per_second  of all ranks together; a pass takes as long as its slowest rank
    padding_share           of all tokens in the inputs
    padding_time_share      of the ranks' time, if every token costs the same
    wait_share              of the ranks' time, that they waited for the slowest; None with one rank
    """

    num_passes: int
    num_counted: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    phases: Mapping[str, PhaseStatistics] = field(default_factory=dict)
    median_seconds: float | None = None
    p95_seconds: float | None = None
    iqr_seconds: float | None = None
    real_tokens_per_second: float | None = None
    slowest: Extreme | None = None  # seconds
    highest_peak: Extreme | None = None  # bytes
    padding_share: float | None = None
    padding_time_share: float | None = None
    wait_share: float | None = None


def sum_phase_seconds(record: PassRecord) -> float:
    return sum(cost.seconds for cost in record.cost.phases.values())


def find_peak_bytes(record: PassRecord) -> int:
    return max((cost.peak_allocated_bytes for cost in record.cost.phases.values()), default=0)


def summarize(records: Sequence[PassRecord]) -> Statistics:
    """Compute statistics over the records of all ranks."""
    passes: dict[int, list[PassRecord]] = {}
    for record in sorted(records, key=lambda record: (record.index, record.rank)):
        passes.setdefault(record.index, []).append(record)
    reasons = {index: find_reason_to_leave_out(ranks) for index, ranks in passes.items()}
    reason_order = dict.fromkeys((FAILED, TRACED, WARMUP, NEW_GRAPH, *FIRST_USES.values(), *reasons.values()))
    counts = Counter(reasons.values())
    left_out = {reason: counts[reason] for reason in reason_order if reason is not None and counts[reason]}
    counted = [ranks for index, ranks in passes.items() if reasons[index] is None]
    if not counted:
        return Statistics(num_passes=len(passes), num_counted=0, left_out=left_out)

    flat = [record for ranks in counted for record in ranks]
    seconds = [sum_phase_seconds(record) for record in flat]
    pass_seconds = sum(
        max(sum_phase_seconds(record) + (record.cost.wait_seconds or 0.0) for record in ranks) for ranks in counted
    )
    # Tp and ring peers share one micro-batch, which is counted once.
    micro_batches = list({(record.index, record.data_rank): record.input for record in flat}.values())
    num_real = sum(micro_batch.real_tokens for micro_batch in micro_batches)
    return Statistics(
        num_passes=len(passes),
        num_counted=len(counted),
        left_out=left_out,
        phases=_summarize_phases(flat),
        median_seconds=median(seconds),
        p95_seconds=percentile_95(seconds),
        iqr_seconds=inter_quartile_range(seconds),
        real_tokens_per_second=num_real / pass_seconds if pass_seconds else None,
        slowest=_find_largest(flat, seconds),
        highest_peak=_find_largest(flat, [find_peak_bytes(record) for record in flat]),
        padding_share=1 - num_real / sum(micro_batch.padded_tokens for micro_batch in micro_batches),
        padding_time_share=_compute_padding_time_share(flat),
        wait_share=_compute_wait_share(flat),
    )


def find_reason_to_leave_out(ranks: Sequence[PassRecord]) -> str | None:
    """Find why a pass, given its records of all ranks, is not counted; None if it is."""
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


def _summarize_phases(records: Sequence[PassRecord]) -> dict[str, PhaseStatistics]:
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


def _compute_padding_time_share(records: Sequence[PassRecord]) -> float | None:
    padding_seconds = total_seconds = 0.0
    for record in records:
        if record.input.fed_tokens:
            seconds = sum_phase_seconds(record)
            padding_seconds += seconds * (1 - record.input.real_tokens / record.input.fed_tokens)
            total_seconds += seconds
    return padding_seconds / total_seconds if total_seconds else None


def _compute_wait_share(records: Sequence[PassRecord]) -> float | None:
    costs = [record.cost for record in records]
    waits = [(cost.wait_seconds, cost.seconds) for cost in costs if cost.wait_seconds is not None and cost.seconds]
    return sum(wait for wait, _ in waits) / sum(seconds for _, seconds in waits) if waits else None
