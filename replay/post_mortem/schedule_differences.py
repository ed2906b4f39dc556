"""Find where ranks of a recording part: the passes in which they would not have entered the same collectives.

Each rule compares the ranks pass by pass and returns the first pass in which they part. A number that some rank's
captures do not have says nothing, so what a recording left out is no alarm.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from capture.file_format.listing import format_ranges
from capture.file_format.optimizer_step import OptimizerStep
from replay.post_mortem.schedule import PlannedPass, RankSchedule, Schedule, windows_of

MIN_ALIKE = 3  # passes that show what a job does in all of them
MIN_SHARE_ALIKE = 2 / 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleDifference:
    """A pass in which ranks do not do the same.

    kind    `passes`, `order`, `backward`, `borders`, `gradients`, `trained`, `clipping`, `shapes`, `inputs` or `dtype`
    number  of the pass
    ranks   those to look at: with fewer, or other than most
    text    what they do, in words
    meets   what would have met all the same
    mend    option or change that mends it
    """

    kind: str
    number: int
    ranks: tuple[int, ...]
    text: str
    mend: str
    meets: str = ""


def schedule_differences(
    schedule: Schedule, *, equal_shapes: bool = False, was_cut_short: bool = False
) -> list[ScheduleDifference]:
    """Return the first difference of each kind, in the order of their passes.

    equal_shapes  each pass needs equal shapes on all ranks; without it only where the ranks are seen to pad to the
                  longest row of all
    was_cut_short  the job was ended from outside or died: how far each rank came says nothing
    """
    if len(schedule.ranks) < 2:
        return []
    rules: tuple[Callable[[Schedule], ScheduleDifference | None], ...] = (
        *(_order, _borders, _backward, _gradients, _trained, _clipping, _inputs, _dtype),
        *(() if was_cut_short else (_last_border, _passes)),
    )
    found = [difference for rule in rules if (difference := rule(schedule)) is not None]
    if (difference := _shapes(schedule, equal_shapes)) is not None:
        found.append(difference)
    first = min((one.number for one in found if one.kind == "order"), default=None)
    if first is not None:  # behind it the numbers of the ranks mean different passes
        found = [one for one in found if one.number < first or one.kind in ("order", "passes")]
    return sorted(found, key=lambda one: (one.number, one.kind == "passes"))


def _common(schedule: Schedule) -> Iterator[tuple[int, list[tuple[int, PlannedPass]]]]:
    """Yield each number that several ranks have, with these ranks' passes."""
    for number in range(schedule.num_passes):
        there = [(rank.rank, rank.passes[number]) for rank in schedule.ranks if number in rank.passes]
        if len(there) > 1:
            yield number, there


def _others(values: Sequence[tuple[int, object]]) -> tuple[int, ...]:
    """Return the ranks whose value is not that of most ranks; in a tie, not that of the first."""
    usual, _ = Counter(value for _, value in values).most_common(1)[0]
    return tuple(rank for rank, value in values if value != usual)


def _order(schedule: Schedule) -> ScheduleDifference | None:
    for number, there in _common(schedule):
        kinds = [(rank, one.trains) for rank, one in there]
        if ranks := _others(kinds):
            does = "trains" if dict(kinds)[ranks[0]] else "runs without autograd"
            return ScheduleDifference(
                kind="order",
                number=number,
                ranks=ranks,
                text=f"{_names(ranks)} {does}, and others do not",
                mend="call the model in the same order on every rank: training and rollout passes alike",
                meets="DDP meets in rollout passes only where the model has buffers",
            )
    return None


def _passes(schedule: Schedule) -> ScheduleDifference | None:
    counts = [(rank.rank, rank.num_passes) for rank in schedule.ranks]
    fewest, most = min(count for _, count in counts), max(count for _, count in counts)
    if fewest == most:
        return None
    ranks = tuple(rank for rank, count in counts if count == fewest)
    known = all(rank.end is not None for rank in schedule.ranks)
    return ScheduleDifference(
        kind="passes",
        number=fewest,
        ranks=ranks,
        text=f"{_names(ranks)} {_has(ranks)} {fewest} passes, and others up to {most}"
        + ("" if known else " (as far as captured)"),
        mend="give every rank as many batches: drop_last=True in the sampler, or a pass of weight 0; DDP also: "
        "with model.join()",
    )


def _borders(schedule: Schedule) -> ScheduleDifference | None:
    """Compare how many optimizer steps each rank had made before each training pass."""
    begins: dict[int, int] = {}
    for number, there in _common(schedule):
        if not any(one.trains for _, one in there):
            continue
        steps = [(rank, one.optimizer_step) for rank, one in there if one.optimizer_step is not None]
        made = []
        for rank, step in steps:
            assert step is not None
            made.append((rank, step - begins.setdefault(rank, step)))
        if len(made) > 1 and (ranks := _others(made)):
            return _border(number, ranks, dict(made)[ranks[0]], next(step for rank, step in made if rank not in ranks))
    return None


def _last_border(schedule: Schedule) -> ScheduleDifference | None:
    """Compare how many optimizer steps each rank had made in the end, if all made as many passes."""
    if _borders(schedule) is not None:
        return None
    ends = [(rank.rank, rank.end.num_steps) for rank in schedule.ranks if rank.end is not None]
    known = [(rank, steps) for rank, steps in ends if steps is not None]
    is_as_long = len({rank.num_passes for rank in schedule.ranks}) == 1
    if is_as_long and len(known) == len(schedule.ranks) and (ranks := _others(known)):
        usual = next(steps for rank, steps in known if rank not in ranks)
        return _border(schedule.num_passes - 1, ranks, dict(known)[ranks[0]], usual)
    last = _last_windows(schedule)
    if last and (ranks := _others(last)):
        return _border(schedule.num_passes - 1, ranks, int(dict(last)[ranks[0]]), int(not dict(last)[ranks[0]]))
    return None


def _last_windows(schedule: Schedule) -> list[tuple[int, bool]]:
    """Tell for each rank whether a step followed the last pass; nothing unless all ranks with steps have that pass."""
    with_steps = [rank for rank in schedule.ranks if any(True for _ in windows_of(rank))]
    last = schedule.num_passes - 1
    if len(with_steps) < 2 or any(last not in rank.passes or not rank.passes[last].trains for rank in with_steps):
        return []
    return [(rank.rank, rank.passes[last].step is not None) for rank in with_steps]


def _border(number: int, ranks: tuple[int, ...], steps: int, usual: int) -> ScheduleDifference:
    return ScheduleDifference(
        kind="borders",
        number=number,
        ranks=ranks,
        text=f"{_names(ranks)} {_has(ranks)} made {steps} optimizer steps by then, and others {usual}",
        mend="step after as many passes on every rank: by a count that all ranks share, not by tokens or by what is "
        "left of a rank's own data",
        meets="passes of a window without a step meet under DDP with no_sync alone",
    )


def _steps_in_common(schedule: Schedule) -> Iterator[list[tuple[RankSchedule, OptimizerStep]]]:
    """Yield the ranks' parts of each optimizer step, with what went into it as they saw it."""
    by_rank = [(rank, {step.number: step for step in windows_of(rank)}) for rank in schedule.ranks]
    numbers = sorted({number for _, steps in by_rank for number in steps})
    for number in numbers:
        parts = [(rank, steps[number]) for rank, steps in by_rank if number in steps]
        if len(parts) > 1 and len({step.passes for _, step in parts}) == 1:
            yield parts


def _backward(schedule: Schedule) -> ScheduleDifference | None:
    """Compare for which passes a loss was differentiated, among ranks whose losses are seen at all."""
    seen = {
        rank.rank for rank in schedule.ranks if any(one is not None for step in windows_of(rank) for one in step.shares)
    }
    for parts in _steps_in_common(schedule):
        for place, number in enumerate(parts[0][1].passes):
            done = [(rank.rank, step.shares[place] is not None) for rank, step in parts if rank.rank in seen]
            if ranks := tuple(rank for rank, was in done if not was) if any(was for _, was in done) else ():
                return ScheduleDifference(
                    kind="backward",
                    number=number,
                    ranks=ranks,
                    text=f"{_names(ranks)} {'makes' if len(ranks) == 1 else 'make'} no backward, and others do",
                    mend="make a backward on every rank; without a loss one of 0 * output.sum()",
                    meets="DDP meets where the window has a later backward and this one is under no_sync",
                )
    return None


def _gradients(schedule: Schedule) -> ScheduleDifference | None:
    for parts in _steps_in_common(schedule):
        with_gradient = {
            rank.rank: {sample.name for sample in step.gradients.samples} if step.gradients is not None else set()
            for rank, step in parts
        }
        for rank, step in parts:
            for name in step.without_gradient:
                others = [other for other, names in with_gradient.items() if name in names]
                if others and with_gradient[rank.rank]:
                    ranks = tuple(r.rank for r, s in parts if name in s.without_gradient)
                    return ScheduleDifference(
                        kind="gradients",
                        number=step.passes[-1],
                        ranks=ranks,
                        text=f"{name} has no gradient on {_names(ranks)}, and one on {_names(tuple(others))}",
                        mend="DDP: find_unused_parameters=True; else let every parameter into each pass, as by "
                        "0 * parameter.sum() in the loss, also of experts without tokens and heads that are not used",
                    )
    return None


def _trained(schedule: Schedule) -> ScheduleDifference | None:
    for number, there in _common(schedule):
        counts = [(rank, one.num_trained) for rank, one in there if one.num_trained is not None]
        if len(counts) > 1 and (ranks := _others(counts)):
            usual = next(count for rank, count in counts if rank not in ranks)
            return ScheduleDifference(
                kind="trained",
                number=number,
                ranks=ranks,
                text=f"{_names(ranks)} {'trains' if len(ranks) == 1 else 'train'} {dict(counts)[ranks[0]]} parameters, "
                f"and others {usual}",
                mend="set requires_grad alike on every rank, before the model is wrapped",
            )
    return None


def _clipping(schedule: Schedule) -> ScheduleDifference | None:
    """Compare which ranks computed a norm of sharded gradients, which is a collective."""
    for parts in _steps_in_common(schedule):
        if not any(step.is_part_of_norm or _is_sharded(rank) for rank, step in parts):
            continue
        clipped = [(rank.rank, step.grad_norm is not None or step.max_norm is not None) for rank, step in parts]
        if any(was for _, was in clipped) and (ranks := tuple(rank for rank, was in clipped if not was)):
            return ScheduleDifference(
                kind="clipping",
                number=parts[0][1].passes[-1],
                ranks=ranks,
                text=f"{_names(ranks)} {'does' if len(ranks) == 1 else 'do'} not clip sharded gradients, and others do",
                mend="clip on every rank: the norm of shards is a collective",
            )
    return None


def _is_sharded(rank: RankSchedule) -> bool:
    return any(one.is_sharded for one in rank.passes.values())


def _dtype(schedule: Schedule) -> ScheduleDifference | None:
    for number, there in _common(schedule):
        dtypes = [(rank, one.computed_in) for rank, one in there if one.computed_in is not None]
        if len(dtypes) > 1 and (ranks := _others(dtypes)):
            usual = next(dtype for rank, dtype in dtypes if rank not in ranks)
            return ScheduleDifference(
                kind="dtype",
                number=number,
                ranks=ranks,
                text=f"{_names(ranks)} {'computes' if len(ranks) == 1 else 'compute'} in {dict(dtypes)[ranks[0]]}, "
                f"and others in {usual}",
                mend="use the same autocast and weights' dtype on every rank",
                meets="DDP meets where the gradients have one dtype",
            )
    return None


def _inputs(schedule: Schedule) -> ScheduleDifference | None:
    """Find ranks that are fed the same tokens in most passes, as tp and ring peers are, and others in one."""
    common = [dict(there) for _, there in _common(schedule)]
    numbers = [number for number, _ in _common(schedule)]
    ranks = [rank.rank for rank in schedule.ranks]
    for place, one in enumerate(ranks):
        for other in ranks[place + 1 :]:
            both = [
                (number, there[one].digest, there[other].digest)
                for number, there in zip(numbers, common, strict=True)
                if one in there and other in there
            ]
            alike = [digest for _, digest, others in both if digest == others and digest is not None]
            if len(set(alike)) < MIN_ALIKE or len(alike) < MIN_SHARE_ALIKE * len(both):
                continue
            apart = next((number for number, mine, theirs in both if mine != theirs), None)
            if apart is not None:
                return ScheduleDifference(
                    kind="inputs",
                    number=apart,
                    ranks=(one, other),
                    text=f"{_names((one, other))} are fed other tokens, and the same in {len(alike)} passes",
                    mend="feed tp and ring peers the same micro-batch: select by the data rank, not by the rank",
                )
    return None


def _shapes(schedule: Schedule, equal_shapes: bool) -> ScheduleDifference | None:
    if not (equal_shapes or _pads_across_ranks(schedule)):
        return None
    for number, there in _common(schedule):
        shapes = [(rank, one.shape) for rank, one in there if one.shape is not None]
        if len(shapes) > 1 and (ranks := _others(shapes)):
            usual = next(shape for rank, shape in shapes if rank not in ranks)
            own = dict(shapes)[ranks[0]]
            assert own is not None
            assert usual is not None
            return ScheduleDifference(
                kind="shapes",
                number=number,
                ranks=ranks,
                text=f"{_names(ranks)} {_has(ranks)} {own[0]} rows of {own[1]}, and others {usual[0]} of {usual[1]}",
                mend="pad to the longest row of all ranks before tensors are gathered (accelerate: "
                "pad_across_processes), and drop or fill batches of fewer rows",
                meets="collectives of weights and gradients alone meet whatever the rows are",
            )
    return None


def _pads_across_ranks(schedule: Schedule) -> bool:
    """Tell whether lengths change from pass to pass, are equal on all ranks, and fit the longest row of one rank."""
    padded, lengths, num_passes = 0, set(), 0
    for _, there in _common(schedule):
        shapes = [one.shape for _, one in there]
        longest = [one.longest for _, one in there]
        num_passes += 1
        if None in shapes or None in longest or len(set(shapes)) > 1 or shapes[0] is None:
            continue
        needed = [one for one in longest if one is not None]
        if max(needed) == shapes[0][1] > min(needed):
            padded += 1
            lengths.add(shapes[0][1])
    return len(lengths) >= MIN_ALIKE and padded >= MIN_SHARE_ALIKE * num_passes


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
