"""Find the passes in which the ranks of a recording would not have entered the same collectives.

Each rule compares the ranks pass by pass, and returns the first pass in which they differ. Where the captures of a rank
do not have a number, the rule does not compare it: what a recording left out is no difference.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from capture.file_format.listing import format_ranges
from capture.file_format.optimizer_step import OptimizerStep
from replay.output.text import pluralise
from replay.post_mortem.schedule import PlannedPass, RankSchedule, Schedule, list_optimizer_steps

# A job is taken to do the same in all passes if it does so in this many, and in this share of them.
MIN_ALIKE = 3
MIN_SHARE_ALIKE = 2 / 3
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleDifference:
    """A pass in which the ranks do not do the same, so that their collectives would not have matched.

    kind       `passes`, `order`, `backward`, `steps`, `gradients`, `trained`, `clipping`, `shapes`, `inputs` or `dtype`
    number     of the pass, from 0 on
    ranks      the ranks to look at: those that do less, or something else than most
    text       what they do, in words
    remedy     the option or the change in the job that makes the ranks do the same
    exception  in which jobs the collectives would have matched in spite of it
    """

    kind: str
    number: int
    ranks: tuple[int, ...]
    text: str
    remedy: str
    exception: str = ""


def find_schedule_differences(
    schedule: Schedule,
    *,
    equal_shapes: bool = False,
    was_cut_short: bool = False,
    ended_loops: Collection[int] = (),
) -> list[ScheduleDifference]:
    """Return the first difference of each kind, in the order of their passes.

    equal_shapes   the job needs equal shapes on all ranks in each pass; False: assume so only where the ranks have
                   padded to the longest row of all of them
    was_cut_short  the job died or was ended from outside, so that how far each rank came tells nothing
    ended_loops    the ranks of such a job whose loop was over all the same, so that others went on without them
    """
    if len(schedule.ranks) < 2:
        return []
    complete = ended_loops if was_cut_short else [rank.rank for rank in schedule.ranks]
    rules: tuple[Callable[[Schedule], ScheduleDifference | None], ...] = (
        _compare_order,
        _compare_step_counts,
        _compare_backwards,
        _compare_gradients,
        _compare_trained_parameters,
        _compare_clipping,
        _compare_inputs,
        _compare_dtypes,
        *(() if was_cut_short else (_compare_final_step_counts,)),
        partial(_compare_pass_counts, complete=complete),
    )
    differences = [difference for rule in rules if (difference := rule(schedule)) is not None]
    if (difference := _compare_shapes(schedule, equal_shapes)) is not None:
        differences.append(difference)
    first_order = min((difference.number for difference in differences if difference.kind == "order"), default=None)
    if first_order is not None:
        # From there on, one number means different passes on different ranks.
        differences = [
            difference
            for difference in differences
            if difference.number < first_order or difference.kind in ("order", "passes")
        ]
    return sorted(differences, key=lambda difference: (difference.number, difference.kind == "passes"))


def _iterate_common_passes(schedule: Schedule) -> Iterator[tuple[int, list[tuple[int, PlannedPass]]]]:
    """Yield each number that several ranks have, with these ranks' passes."""
    for number in range(schedule.num_passes):
        passes = [(rank.rank, rank.passes[number]) for rank in schedule.ranks if number in rank.passes]
        if len(passes) > 1:
            yield number, passes


class UnusualRanks(NamedTuple, Generic[ValueT]):
    """Ranks whose value is not that of most ranks, in a tie not that of the first; the first one's, and the usual."""

    ranks: tuple[int, ...]
    value: ValueT
    usual: ValueT


def _find_unusual_ranks(values: Iterable[tuple[int, ValueT | None]]) -> UnusualRanks[ValueT] | None:
    """Find the ranks of another value among those whose value is known; None if there are none."""
    known = [(rank, value) for rank, value in values if value is not None]
    if len(known) < 2:
        return None
    usual, _ = Counter(value for _, value in known).most_common(1)[0]
    unusual = [(rank, value) for rank, value in known if value != usual]
    return UnusualRanks(tuple(rank for rank, _ in unusual), unusual[0][1], usual) if unusual else None


def _find_first_unusual(
    schedule: Schedule, read: Callable[[PlannedPass], ValueT | None]
) -> tuple[int, UnusualRanks[ValueT]] | None:
    """Find the first pass in which `read` returns another value for some ranks: its number, and those ranks."""
    for number, passes in _iterate_common_passes(schedule):
        unusual = _find_unusual_ranks((rank, read(planned)) for rank, planned in passes)
        if unusual is not None:
            return number, unusual
    return None


def _compare_order(schedule: Schedule) -> ScheduleDifference | None:
    if (found := _find_first_unusual(schedule, lambda planned: planned.trains)) is None:
        return None
    number, (ranks, trains, _) = found
    return ScheduleDifference(
        kind="order",
        number=number,
        ranks=ranks,
        text=f"{_format_ranks(ranks)} {'trains' if trains else 'runs without autograd'}, and others do not",
        remedy="call the model in the same order on every rank: training and rollout passes alike",
        exception="under DDP it hangs only if the model has buffers",
    )


def _compare_pass_counts(schedule: Schedule, *, complete: Collection[int]) -> ScheduleDifference | None:
    """Compare how many passes each rank has; those of `complete` would have no further one."""
    most = schedule.num_passes
    fewest = min((rank.num_passes for rank in schedule.ranks if rank.rank in complete), default=most)
    if fewest >= most:
        return None
    ranks = tuple(rank.rank for rank in schedule.ranks if rank.rank in complete and rank.num_passes == fewest)
    all_ended = all(rank.end is not None for rank in schedule.ranks)
    return ScheduleDifference(
        kind="passes",
        number=fewest,
        ranks=ranks,
        text=f"{_format_ranks(ranks)} {_has(ranks)} {fewest} passes, and others up to {most}"
        + ("" if all_ended else " (as far as captured)")
        + _describe_further_pass(schedule, fewest),
        remedy="give every rank as many batches: drop_last=True in the sampler, or a pass of weight 0; DDP also: "
        "with model.join()",
    )


def _describe_further_pass(schedule: Schedule, number: int) -> str:
    """Describe the first rank's pass of this number, which others do not have; nothing where it was not captured."""
    for rank in schedule.ranks:
        if (planned := rank.passes.get(number)) is not None:
            rows = "" if planned.shape is None else f"{planned.shape[0]} rows of {planned.shape[1]}, "
            return f"; the next one of rank {rank.rank} is {rows}{planned.source}"
    return ""


def _compare_step_counts(schedule: Schedule) -> ScheduleDifference | None:
    """Compare how many optimizer steps each rank had made before each training pass."""
    begins: dict[int, int] = {}
    for number, passes in _iterate_common_passes(schedule):
        if not any(planned.trains for _, planned in passes):
            continue
        steps = [(rank, planned.optimizer_step) for rank, planned in passes if planned.optimizer_step is not None]
        # A rank may have begun its recording at another step than the others.
        counts = [(rank, step - begins.setdefault(rank, step)) for rank, step in steps]
        if (unusual := _find_unusual_ranks(counts)) is not None:
            return _describe_step_difference(number, *unusual)
    return None


def _compare_final_step_counts(schedule: Schedule) -> ScheduleDifference | None:
    """Compare how many optimizer steps each rank had made in the end, if all ranks made the same number of passes."""
    if _compare_step_counts(schedule) is not None:
        return None
    ends = [(rank.rank, rank.end.num_steps) for rank in schedule.ranks if rank.end is not None]
    step_counts = [(rank, steps) for rank, steps in ends if steps is not None]
    is_as_long = len({rank.num_passes for rank in schedule.ranks}) == 1
    unusual = _find_unusual_ranks(step_counts) if is_as_long and len(step_counts) == len(schedule.ranks) else None
    unusual = unusual or _find_unusual_ranks(_list_last_steps(schedule))
    return None if unusual is None else _describe_step_difference(schedule.num_passes - 1, *unusual)


def _list_last_steps(schedule: Schedule) -> list[tuple[int, int]]:
    """List for each rank the steps after the last pass, 0 or 1; none unless all ranks with steps have that pass."""
    with_steps = [rank for rank in schedule.ranks if any(True for _ in list_optimizer_steps(rank))]
    last = schedule.num_passes - 1
    if len(with_steps) < 2 or any(last not in rank.passes or not rank.passes[last].trains for rank in with_steps):
        return []
    return [(rank.rank, int(rank.passes[last].step is not None)) for rank in with_steps]


def _describe_step_difference(number: int, ranks: tuple[int, ...], steps: int, usual: int) -> ScheduleDifference:
    return ScheduleDifference(
        kind="steps",
        number=number,
        ranks=ranks,
        text=f"{_format_ranks(ranks)} {_has(ranks)} made {pluralise(steps, 'optimizer step')} by then, "
        f"and others {usual}",
        remedy="step after as many passes on every rank: by a count that all ranks share, not by tokens or by what is "
        "left of a rank's own data",
        exception="under DDP with no_sync it does not hang: passes without a step wait for no rank",
    )


def _iterate_common_steps(schedule: Schedule) -> Iterator[list[tuple[RankSchedule, OptimizerStep]]]:
    """Yield what each rank recorded of an optimizer step, for the steps that took the same passes on these ranks."""
    by_rank = [(rank, {step.number: step for step in list_optimizer_steps(rank)}) for rank in schedule.ranks]
    numbers = sorted({number for _, steps in by_rank for number in steps})
    for number in numbers:
        parts = [(rank, steps[number]) for rank, steps in by_rank if number in steps]
        if len(parts) > 1 and len({step.passes for _, step in parts}) == 1:
            yield parts


def _compare_backwards(schedule: Schedule) -> ScheduleDifference | None:
    """Compare for which passes a loss was differentiated, among ranks that recorded it for any pass."""
    with_losses = {
        rank.rank
        for rank in schedule.ranks
        if any(share is not None for step in list_optimizer_steps(rank) for share in step.shares)
    }
    for parts in _iterate_common_steps(schedule):
        for position, number in enumerate(parts[0][1].passes):
            has_backward = {
                rank.rank: step.shares[position] is not None for rank, step in parts if rank.rank in with_losses
            }
            ranks = tuple(rank for rank, has in has_backward.items() if not has)
            if ranks and any(has_backward.values()):
                return ScheduleDifference(
                    kind="backward",
                    number=number,
                    ranks=ranks,
                    text=f"{_format_ranks(ranks)} {'makes' if len(ranks) == 1 else 'make'} no backward, and others do",
                    remedy="make a backward on every rank; without a loss one of 0 * output.sum()",
                    exception="under DDP it does not hang if this backward is under no_sync, and a later one is not",
                )
    return None


def _compare_gradients(schedule: Schedule) -> ScheduleDifference | None:
    for parts in _iterate_common_steps(schedule):
        with_gradient = {
            rank.rank: {sample.name for sample in step.gradients.samples} if step.gradients is not None else set()
            for rank, step in parts
        }
        for rank, step in parts:
            for name in step.without_gradient:
                others = [other for other, names in with_gradient.items() if name in names]
                if others and with_gradient[rank.rank]:
                    ranks = tuple(other.rank for other, part in parts if name in part.without_gradient)
                    return ScheduleDifference(
                        kind="gradients",
                        number=step.passes[-1],
                        ranks=ranks,
                        text=f"{name} has no gradient on {_format_ranks(ranks)}, and one on {_format_ranks(others)}",
                        remedy="DDP: find_unused_parameters=True; else let every parameter into each pass, as by "
                        "0 * parameter.sum() in the loss, also of experts without tokens and heads that are not used",
                    )
    return None


def _compare_trained_parameters(schedule: Schedule) -> ScheduleDifference | None:
    if (found := _find_first_unusual(schedule, lambda planned: planned.num_trained)) is None:
        return None
    number, (ranks, num_trained, usual) = found
    return ScheduleDifference(
        kind="trained",
        number=number,
        ranks=ranks,
        text=f"{_format_ranks(ranks)} {'trains' if len(ranks) == 1 else 'train'} {num_trained} parameters, "
        f"and others {usual}",
        remedy="set requires_grad alike on every rank, before the model is wrapped",
    )


def _compare_clipping(schedule: Schedule) -> ScheduleDifference | None:
    """Compare which ranks computed a norm of sharded gradients, which is a collective."""
    for parts in _iterate_common_steps(schedule):
        if not any(step.is_part_of_norm or _is_sharded(rank) for rank, step in parts):
            continue
        clipped = [(rank.rank, step.grad_norm is not None or step.max_norm is not None) for rank, step in parts]
        if any(was for _, was in clipped) and (ranks := tuple(rank for rank, was in clipped if not was)):
            return ScheduleDifference(
                kind="clipping",
                number=parts[0][1].passes[-1],
                ranks=ranks,
                text=f"{_format_ranks(ranks)} {'does' if len(ranks) == 1 else 'do'} not clip sharded gradients, "
                "and others do",
                remedy="clip on every rank: the norm of shards is a collective",
            )
    return None


def _is_sharded(rank: RankSchedule) -> bool:
    return any(planned.is_sharded for planned in rank.passes.values())


def _compare_dtypes(schedule: Schedule) -> ScheduleDifference | None:
    if (found := _find_first_unusual(schedule, lambda planned: planned.computed_in)) is None:
        return None
    number, (ranks, dtype, usual) = found
    return ScheduleDifference(
        kind="dtype",
        number=number,
        ranks=ranks,
        text=f"{_format_ranks(ranks)} {'computes' if len(ranks) == 1 else 'compute'} in {dtype}, and others in {usual}",
        remedy="use the same autocast and weights' dtype on every rank",
        exception="under DDP it does not hang if the gradients have one dtype",
    )


def _compare_inputs(schedule: Schedule) -> ScheduleDifference | None:
    """Find ranks that are fed the same tokens in most passes, as tp and ring peers are, and others in one."""
    common = [dict(passes) for _, passes in _iterate_common_passes(schedule)]
    numbers = [number for number, _ in _iterate_common_passes(schedule)]
    ranks = [rank.rank for rank in schedule.ranks]
    for position, rank in enumerate(ranks):
        for other in ranks[position + 1 :]:
            shared = [
                (number, passes[rank].digest, passes[other].digest)
                for number, passes in zip(numbers, common, strict=True)
                if rank in passes and other in passes
            ]
            equal = [digest for _, digest, other_digest in shared if digest == other_digest and digest is not None]
            if len(set(equal)) < MIN_ALIKE or len(equal) < MIN_SHARE_ALIKE * len(shared):
                continue
            number_apart = next((number for number, digest, other_digest in shared if digest != other_digest), None)
            if number_apart is not None:
                return ScheduleDifference(
                    kind="inputs",
                    number=number_apart,
                    ranks=(rank, other),
                    text=f"{_format_ranks((rank, other))} are fed other tokens, and the same in {len(equal)} passes",
                    remedy="feed tp and ring peers the same micro-batch: select by the data rank, not by the rank",
                )
    return None


def _compare_shapes(schedule: Schedule, equal_shapes: bool) -> ScheduleDifference | None:
    found = _find_first_unusual(schedule, lambda planned: planned.shape)
    if found is None or not (equal_shapes or _pads_across_ranks(schedule)):
        return None
    number, (ranks, shape, usual) = found
    return ScheduleDifference(
        kind="shapes",
        number=number,
        ranks=ranks,
        text=f"{_format_ranks(ranks)} {_has(ranks)} {shape[0]} rows of {shape[1]}, and others {usual[0]} of {usual[1]}",
        remedy="pad to the longest row of all ranks before tensors are gathered (accelerate: "
        "pad_across_processes), and drop or fill batches of fewer rows",
        exception="a job whose collectives are of weights and gradients alone does not hang by it",
    )


def _pads_across_ranks(schedule: Schedule) -> bool:
    """Tell whether the job pads to the longest row of all ranks.

    Then the padded lengths change from pass to pass, are equal on all ranks, and fit the longest row of one rank, while
    other ranks would have needed less.
    """
    padded, lengths, num_passes = 0, set(), 0
    for _, passes in _iterate_common_passes(schedule):
        shapes = [planned.shape for _, planned in passes]
        longest = [planned.longest for _, planned in passes]
        num_passes += 1
        if None in shapes or None in longest or len(set(shapes)) > 1 or shapes[0] is None:
            continue
        needed = [length for length in longest if length is not None]
        if max(needed) == shapes[0][1] > min(needed):
            padded += 1
            lengths.add(shapes[0][1])
    return len(lengths) >= MIN_ALIKE and padded >= MIN_SHARE_ALIKE * num_passes


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
