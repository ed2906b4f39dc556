"""Tell which other loss the job computed in place of the objective that the replay computes."""

from collections.abc import Sequence

from replay.output.text import pluralise
from replay.tolerances.difference import is_coarse
from replay.tolerances.job_bounds import LOG_PROBS, TOKEN_LOG_PROBS
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.evidence import CauseEvidence, CauseRule, name_time
from replay.verdict.causes.trial import NEAREST, NEAREST_SHARE, SURE_GAIN_A_TRIAL
from replay.verdict.causes.trial_rules import EXPLAINED, MANY_VALUES, SURE_GAIN
from replay.verdict.findings import list_dtypes
from replay.verdict.gradient_findings import ComparedPass
from replay.verdict.tried_losses import TriedLoss, TriedLosses

# How far the gradient of a job's logits may be from that of the loss that it computed: in fp32, and in 16-bit dtypes.
GRADIENT_APART = {False: 1e-3, True: 0.03}
# Of losses that give the same numbers.
MAX_NAMED = 3


def find_other_objective(evidence: CauseEvidence) -> Cause | None:
    """Name the loss that has the job's value, and the gradient of its logits, in each pass that was tried."""
    first = evidence.first_wrong
    # After a step with another gradient the replay's weights are not the job's, and no loss of theirs says anything.
    judged = {(verdict.index, verdict.rank) for verdict, _ in evidence.wrong if not verdict.is_window}
    tried = [(compared, compared.replayed.tried_losses) for compared in evidence.passes if compared.place in judged]
    wrong = [
        (compared, losses)
        for compared, losses in tried
        if losses is not None and _is_forward_right(compared) and not _agrees(compared, losses.own, evidence)
    ]
    if first is None or not wrong:
        return None
    by_name = [{variant.name: variant for variant in losses.others} for _, losses in wrong]
    fitting = [
        [variants[name] for variants in by_name]
        for name in by_name[0]
        if all(
            name in variants and _agrees(compared, variants[name], evidence)
            for (compared, _), variants in zip(wrong, by_name, strict=True)
        )
    ]
    if not fitting:
        return None
    # Two changes that do what one does are no rival of it.
    fewest = min(variants[0].num_changes for variants in fitting)
    fitting = [variants for variants in fitting if variants[0].num_changes == fewest]
    gains = [_measure_gain(wrong, variants) for variants in fitting]
    best = max(gains)
    # What is much farther from the job than the best variant is not told from rounding.
    chosen = [variants for variants, gain in zip(fitting, gains, strict=True) if gain * SURE_GAIN >= best]
    num_gradients = sum(losses.num_gradients for _, losses in wrong)
    is_sure = best >= SURE_GAIN if num_gradients >= MANY_VALUES else best >= SURE_GAIN_A_TRIAL * len(by_name[0])
    also = "".join(f"; or it {variants[0].says}, which gives the same numbers" for variants in chosen[1:MAX_NAMED])
    also += f"; {len(chosen) - MAX_NAMED} more do" if chosen[MAX_NAMED:] else ""
    numbers = f"computed so, the loss is the job's in {pluralise(len(wrong), 'pass')}"
    if num_gradients:
        apart = max(variant.gradient_apart or 0.0 for variant in chosen[0])
        numbers += f", and so is the gradient of the logits at {pluralise(num_gradients, 'token')}, to {apart:.1g}"
    return Cause(
        name=CauseName.OBJECTIVE,
        sureness=Sureness.IS if is_sure and len(chosen) == 1 else Sureness.PROBABLY,
        sentence=f"the job's loss {chosen[0][0].says}{also}: {numbers}, {name_time(first)}",
        try_next=chosen[0][0].try_next,
        explains=EXPLAINED,
    )


def _is_forward_right(compared: ComparedPass) -> bool:
    return not any(finding.is_wrong and finding.name in (TOKEN_LOG_PROBS, LOG_PROBS) for finding in compared.findings)


def _agrees(compared: ComparedPass, tried: TriedLoss, evidence: CauseEvidence) -> bool:
    """Tell whether a loss has the job's value within the pass's bound, and its gradient, as far as these are known.

    True if neither is known.
    """
    if tried.gradient_apart is None and tried.is_fitted:
        return False
    distance = _measure_loss_distance(compared, tried)
    if distance is not None and not distance[0] <= distance[1]:
        return False
    coarse = is_coarse(list_dtypes(compared.recorded, evidence.settings))
    return tried.gradient_apart is None or tried.gradient_apart <= GRADIENT_APART[coarse]


def _measure_gain(wrong: Sequence[tuple[ComparedPass, TriedLosses]], variants: Sequence[TriedLoss]) -> float:
    """Measure how many times nearer to the job the variant is than the objective, in the pass where that is least."""
    gains: list[float] = []
    for (compared, losses), variant in zip(wrong, variants, strict=True):
        own = losses.own
        if own.gradient_apart is not None and own.gradient_apart > GRADIENT_APART[False]:
            gains.append(own.gradient_apart / max(variant.gradient_apart or 0.0, GRADIENT_APART[False] * NEAREST_SHARE))
            continue
        own_distance, distance = (_measure_loss_distance(compared, loss) for loss in (own, variant))
        if own_distance is not None and distance is not None:
            gains.append(own_distance[0] / max(distance[0], NEAREST_SHARE * distance[1], NEAREST))
    return min(gains, default=0.0)


def _measure_loss_distance(compared: ComparedPass, tried: TriedLoss) -> tuple[float, float] | None:
    """Return how far a loss is from the job's, and the bound of that; None where the job's was not judged."""
    finding = compared.loss
    if finding is None or finding.recorded is None or finding.bound is None:
        return None
    return abs(tried.loss - finding.recorded), finding.bound


def find_loss_outside_mask(evidence: CauseEvidence) -> Cause | None:
    """Tell that the job's loss is also of tokens that the mask of its objective leaves out."""
    first = evidence.first_wrong
    wrong = None if first is None else evidence.find_pass(first)
    traits = None if wrong is None else wrong.recorded.tokens
    if first is None or wrong is None or traits is None or not traits.num_outside_mask:
        return None
    if wrong.loss is None or not wrong.loss.is_wrong or not _is_forward_right(wrong):
        return None
    return Cause(
        name=CauseName.OTHER_TOKENS,
        sureness=Sureness.PROBABLY,
        sentence=f"the job's loss is also of tokens outside of the mask that the job gave for it: "
        f"{traits.num_outside_mask} of {pluralise(traits.num_with_gradient, 'position')} that it gives a gradient, "
        f"{name_time(first)}",
        try_next="apply the mask of the loss to the log-probs before they are added up, such as to the policy's sums",
        explains=EXPLAINED,
    )


RULES = (
    CauseRule(
        name=CauseName.OBJECTIVE,
        find=find_other_objective,
        means="the job's loss is another one than the objective, such as with a ratio of 1 or another KL",
        told_by="the values of other losses of the same log-probs, and the gradient of the job's logits",
        job="mean-of-rows",
    ),
    CauseRule(
        name=CauseName.OTHER_TOKENS,
        find=find_loss_outside_mask,
        means="the loss of an objective is also of tokens that its mask leaves out",
        told_by="the tokens that the job's loss gave a gradient, beside the mask",
        job="shifted-twice",
    ),
)
