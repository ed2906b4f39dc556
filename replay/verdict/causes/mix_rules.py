"""Tell which passes a step's gradient is of, from the gradients of its passes alone."""

from collections.abc import Sequence
from dataclasses import replace

from replay.tolerances.difference import is_coarse
from replay.tolerances.job_bounds import GRADIENT_QUANTITIES
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.clipping import CLIP_ONCE, clips_parts
from replay.verdict.causes.evidence import CauseEvidence, CauseRule, name_time
from replay.verdict.findings import list_dtypes
from replay.verdict.gradient_findings import list_steps
from replay.verdict.gradient_mix import GradientMix, SinglePassGradient, find_mixes
from replay.verdict.recorded_pass import WEIGHTING

EXPLAINED = (*GRADIENT_QUANTITIES, WEIGHTING)
# What is left over of a gradient that is the sum found, and how near its weights come to theirs.
MOST_LEFT = {False: 1e-4, True: 0.1}
SAME_SHARE = {False: 0.01, True: 0.1}


def advise_weights(*, has_equal_weights: bool) -> str:
    """Say how a job's passes are to be weighed, and how the replay weighs as the job where that gave each the same."""
    mend = "weigh each pass by its share of the step's tokens, as num_items_in_batch does"
    return (
        f"--window mean-of-means here, which weighs as the job does; in the job {mend}" if has_equal_weights else mend
    )


def find_other_mix(evidence: CauseEvidence) -> Cause | None:
    """Name the passes, or the ranks, whose gradients count for nothing, or for more than they should."""
    gradients = evidence.single_pass_gradients
    wrong = evidence.find_wrong(*EXPLAINED)
    window = None if wrong is None else evidence.find_window(wrong[0])
    if not gradients or wrong is None or window is None or window[-1].record.index != gradients[-1].index:
        return None
    mixes = find_mixes([compared.recorded for compared in window], gradients)
    has_rounding = is_coarse(
        [dtype for compared in window for dtype in list_dtypes(compared.recorded, evidence.settings)]
    )
    if not mixes or any(mix.residual > MOST_LEFT[has_rounding] for mix in mixes):
        return None
    tolerance = SAME_SHARE[has_rounding]
    left_out = {mix.rank: [abs(share) <= tolerance for share in mix.shares] for mix in mixes}
    time = name_time(wrong[0])
    ranks = sorted({gradient.rank for gradient in gradients})
    is_alike = all(flags == left_out[mixes[0].rank] for flags in left_out.values())
    is_shared = evidence.have_ranks_same_weights_after(window)
    if is_shared and not is_alike:
        # The ranks averaged what was recorded of each: `find_ranks_own_gradients` tells it.
        return None
    if any(any(flags) for flags in left_out.values()):
        cause = _describe_left_out(gradients, left_out, ranks, time)
        may_average_later = is_shared is None and not is_alike and list_steps(window)[0].max_norm is not None
        return replace(cause, sureness=Sureness.PROBABLY) if may_average_later else cause
    if _has_other_shares(mixes, tolerance):
        if clips_parts(window):
            return Cause(
                name=CauseName.CLIPPED_EARLY,
                sureness=Sureness.IS,
                sentence=f"the job clips its gradients before the last of a step's passes, {time}: the passes count "
                f"{_list_shares(mixes[0])} times what they should",
                try_next=CLIP_ONCE,
                explains=EXPLAINED,
            )
        return Cause(
            name=CauseName.WINDOW_WEIGHTS,
            sureness=Sureness.IS,
            sentence=f"the passes of a step count {_list_shares(mixes[0])} times what they should, {time}",
            try_next=advise_weights(has_equal_weights=_weigh_alike(mixes[0], gradients, tolerance)),
            explains=EXPLAINED,
        )
    share = sum(mixes[0].shares) / len(mixes[0].shares)
    if len(ranks) > 1 and abs(share - len(ranks)) <= tolerance * len(ranks):
        return Cause(
            name=CauseName.SUMMED,
            sureness=Sureness.PROBABLY,
            sentence=f"the gradients of {len(ranks)} ranks are added up and not averaged, {time}",
            try_next="look for a reduction by sum, a divide factor of 1 or a communication hook",
            explains=EXPLAINED,
        )
    return None


def _describe_left_out(
    gradients: Sequence[SinglePassGradient], left_out: dict[int, list[bool]], ranks: Sequence[int], time: str
) -> Cause:
    """Say whose gradients are left out: those of other ranks, of one rank everywhere, or of some passes."""
    only_own = all(
        all(is_out == (gradient.rank != rank) for gradient, is_out in zip(gradients, flags, strict=True))
        for rank, flags in left_out.items()
    )
    if only_own and len(ranks) > 1:
        return Cause(
            name=CauseName.NOT_REDUCED,
            sureness=Sureness.IS,
            sentence=f"the ranks' gradients are not averaged, {time}: what rank {ranks[0]} steps with is the gradient "
            "of its own passes alone",
            try_next="look for no_sync, a communication hook, or a reduction that does not run",
            explains=EXPLAINED,
        )
    missing_ranks = [
        rank
        for rank in ranks
        if all(
            is_out
            for flags in left_out.values()
            for gradient, is_out in zip(gradients, flags, strict=True)
            if gradient.rank == rank
        )
    ]
    if missing_ranks and len(ranks) > 1:
        return Cause(
            name=CauseName.NOT_REDUCED,
            sureness=Sureness.IS,
            sentence=f"the gradient of rank {', '.join(map(str, missing_ranks))} is not in the step's gradient, {time}",
            try_next="look for what zeroes or drops the gradients of that rank before they are averaged",
            explains=EXPLAINED,
        )
    flags = next(flags for flags in left_out.values() if any(flags))
    missing = [gradient for gradient, is_out in zip(gradients, flags, strict=True) if is_out]
    counted = [gradient for gradient, is_out in zip(gradients, flags, strict=True) if not is_out]
    last = {gradient.rank: gradient for gradient in gradients}
    if len(missing) > 1 and counted == list(last.values()):
        what = f"of a step's {len(gradients) // len(ranks)} passes"
        what += " on each rank" if len(ranks) > 1 else ""
        sentence = f"{what} the last alone is in the step's gradient, {time}"
    else:
        passes = ", ".join(f"forward {gradient.forward} of rank {gradient.rank}" for gradient in missing)
        sentence = f"{passes} {'has' if len(missing) == 1 else 'have'} no part in the step's gradient, {time}"
    return Cause(
        name=CauseName.WINDOW_WEIGHTS,
        sureness=Sureness.IS,
        sentence=sentence,
        try_next="look for a backward that does not run, gradients that are cleared within a step, or a reduction that "
        "is off in some passes (no_sync, set_requires_gradient_sync, an engine that is not called in each pass)",
        explains=EXPLAINED,
    )


def _has_other_shares(mixes: Sequence[GradientMix], tolerance: float) -> bool:
    """Tell whether the passes count unlike each other."""
    return any(max(mix.shares) - min(mix.shares) > 2 * tolerance * max(map(abs, mix.shares)) for mix in mixes)


def _weigh_alike(mix: GradientMix, gradients: Sequence[SinglePassGradient], tolerance: float) -> bool:
    """Tell whether the passes weigh the same in the job, whatever their tokens, as `--window mean-of-means` has it."""
    weights = [share * gradient.weight for share, gradient in zip(mix.shares, gradients, strict=True)]
    return max(weights) - min(weights) <= 2 * tolerance * max(map(abs, weights))


def _list_shares(mix: GradientMix) -> str:
    return ", ".join(f"{share:.3g}" for share in mix.shares)


RULES = (
    CauseRule(
        name=CauseName.NOT_REDUCED,
        find=find_other_mix,
        means="gradients of a rank or of a pass that are not in the step's gradient, or that count too much",
        told_by="the gradients of the step's passes, replayed one by one: which sum of them is the job's",
        job="ddp-rank-dropped",
    ),
)
