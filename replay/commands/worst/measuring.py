"""Measure a few inputs in an ordinary replay, in processes of its own: what it wrote counts, however it ended."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replay.campaign.campaign import Campaign, Job
from replay.options.spec import Order, ReplaySpec
from replay.profiling.prediction import Cost
from replay.runlog.reader import log_below
from replay.runlog.records import PassRecord
from replay.runlog.summary import reason_to_leave_out

NUM_COUNTING = 3  # repetitions of an input
MOST_IN_A_WINDOW = 2  # passes: the second one holds the first one's gradient, as every later one does


@dataclass(frozen=True, kw_only=True, slots=True)
class Measuring:
    """What a run measured, by the place of an input among those that it was given."""

    costs: Mapping[int, Cost]
    fed_tokens: Mapping[int, int]  # on the rank where they are most
    failed: Mapping[int, str]  # errors of passes
    overhead: float  # the most that the allocator reserved, as a share of the most that it gave out
    ended: str  # why the run ended early; empty: it did not
    log: str  # the run's folder; empty if it did not get that far


def measure(
    campaign: Campaign[Any], spec: ReplaySpec, numbers: Sequence[int], *, num_data_ranks: int = 1, window: int = 1
) -> Measuring:
    """Replay the inputs with these numbers in this order, each a few times in a row, unless `campaign` knows it.

    window   passes in one gradient

    Of the repetitions those count that end an accumulation window and bring nothing new, such as a kernel that is
    loaded; if none does, the last. Seconds are the least of them, which others on the machine disturb least; a peak is
    the most. Of ranks the most counts.
    """
    window = min(window, MOST_IN_A_WINDOW)
    num_repeats = NUM_COUNTING * window if window > 1 else 1 + NUM_COUNTING
    picks = [str(number) for number in numbers for _ in range(num_repeats)]
    run = replace(
        spec,
        actor=replace(spec.actor, grad_accumulation=window),
        inputs=replace(spec.inputs, order=Order.RECORDED, pick_inputs=",".join(picks)),
        measure=replace(spec.measure, noise_floor=False),
    )
    num_processes = num_data_ranks * spec.actor.parallel.tp * spec.actor.parallel.ring
    child = campaign.run(Job(home="runs", spec=run, num_processes=num_processes))
    folder, run_file, records = log_below(child.logs)
    counting: dict[int, list[list[PassRecord]]] = {}
    for index, ranks in _whole_passes(records, num_processes):
        if (index + 1) % window == 0:
            counting.setdefault(index // num_repeats, []).append(ranks)
    failed: dict[int, str] = {}
    for record in records:
        if record.error is not None:
            failed.setdefault(record.index // num_repeats, f"{record.error_type}: {record.error}")
    is_whole = child.exit_code in (0, 1) and run_file is not None and run_file.exit_code is not None
    return Measuring(
        costs={place: _cost(repeated) for place, repeated in counting.items()},
        fed_tokens={place: max(one.input.fed_tokens for one in repeated[-1]) for place, repeated in counting.items()},
        failed=failed,
        overhead=_overhead(records),
        ended="" if is_whole else child.error or f"no end in its log, see {child.output}",
        log=str(folder) if folder is not None else "",
    )


def _whole_passes(records: Sequence[PassRecord], num_ranks: int) -> Iterator[tuple[int, list[PassRecord]]]:
    """Yield the passes that all ranks made without an error: index and records, in order."""
    passes: dict[int, list[PassRecord]] = {}
    for record in records:
        passes.setdefault(record.index, []).append(record)
    for index, ranks in sorted(passes.items()):
        if len(ranks) == num_ranks and all(one.error is None for one in ranks):
            yield index, ranks


def _cost(repeated: Sequence[Sequence[PassRecord]]) -> Cost:
    clean = [ranks for ranks in repeated if reason_to_leave_out(ranks) is None] or repeated[-1:]
    phases = clean[-1][0].cost.phases
    return Cost(
        seconds={name: min(max(one.cost.phases[name].seconds for one in ranks) for ranks in clean) for name in phases},
        peaks={
            name: float(max(one.cost.phases[name].peak_allocated_bytes for ranks in clean for one in ranks))
            for name in phases
        },
    )


def _overhead(records: Sequence[PassRecord]) -> float:
    costs = [cost for record in records for cost in record.cost.phases.values()]
    reserved = max((cost.peak_reserved_bytes or 0 for cost in costs), default=0)
    return max(1.0, reserved / max((cost.peak_allocated_bytes for cost in costs), default=1)) if reserved else 1.0
