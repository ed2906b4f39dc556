"""Tell why a gradient is another one though the forward before it was the job's."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

from replay.output.text import name_some
from replay.tolerances.job_bounds import GRADIENT_QUANTITIES
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.clipping import (
    clips_parts,
    clips_under_scale,
    find_clipping_of_parts,
    find_clipping_of_shards,
    find_other_norm,
    find_round_number,
    name_clipping_before_reduction,
    name_early_clipping,
)
from replay.verdict.causes.evidence import CauseEvidence, CauseRule, name_time
from replay.verdict.causes.factors import (
    explain_loss_scale,
    explain_padding,
    explain_share,
    find_uniform_factor,
    may_come_of_reduction,
)
from replay.verdict.causes.mix_rules import advise_weights
from replay.verdict.causes.model_rules import GRADIENT_KINDS, OTHER_FORWARD_KINDS, describe_model_difference
from replay.verdict.causes.route_rules import find_gradient_without_router_loss
from replay.verdict.causes.wrong_gradient import (
    GRADIENT_FINDINGS,
    SAME_COSINE,
    SAME_RATIO,
    WrongGradient,
    find_factor,
    find_farthest,
    find_wrong_gradient,
    name_parameters,
)
from replay.verdict.cleared_passes import find_cleared_passes
from replay.verdict.dropout_masks import MaskStatus
from replay.verdict.gradient_evidence import ComparedGradient
from replay.verdict.gradient_findings import (
    ANOTHER_LOSS,
    AVERAGED_MEANS,
    UNKNOWN_OBJECTIVE,
    ComparedPass,
    compute_job_weights,
    list_steps,
)
from replay.verdict.model_facts import ModelDifferenceKind as Kind
from replay.verdict.outcomes import PassVerdict
from replay.verdict.recorded_pass import MOVED, WEIGHTING

# A factor on some gradients that is farther from 1 comes of no term that the loop adds to the model's loss.
LEAST_FACTOR = 0.1
# What else changes gradients where the recording states no hook: nobody sees such a term.
OR_A_TERM = "; or for a term that the loop adds to the model's loss, such as a penalty or a z-loss"


def find_ranks_own_gradients(evidence: CauseEvidence) -> Cause | None:
    """Tell that ranks stepped parameters, each of which every rank holds whole, with gradients of their own."""
    wrong = find_wrong_gradient(evidence)
    if wrong is None or len(wrong.gradient.ranks) < 2:
        return None
    by_rank = wrong.gradient.ranks
    ranks = sorted(by_rank)
    names = [name for name in by_rank[ranks[0]] if all(name in by_rank[rank] for rank in ranks)]
    own = [name for name in names if not _are_equal([by_rank[rank][name] for rank in ranks])]
    if not own:
        return None
    norms = "the norm is " + name_some(
        [f"{math.hypot(*(by_rank[rank][name].job_norm or 0.0 for name in own)):.6g} on rank {rank}" for rank in ranks],
        4,
    )
    what = name_parameters(own, list(wrong.gradient.parameters))
    time = name_time(wrong.verdict)
    is_clipped = all(step.max_norm is not None for step in list_steps(wrong.window))
    is_shared = evidence.have_ranks_same_weights_after(wrong.window)
    if is_shared and is_clipped:
        return name_clipping_before_reduction(wrong.window, norms, wrong.verdict)
    if is_shared:
        return Cause(
            name=CauseName.NOT_REDUCED,
            sureness=Sureness.PROBABLY,
            sentence=f"the ranks average the gradients of {what} only in the optimizer's step, or its weights after "
            f"it, {time}: before it {norms}, and the weights after it are the same on all ranks",
            try_next="average the gradients before the step; what the ranks do in it or after it is not replayed",
            explains=(*GRADIENT_FINDINGS, WEIGHTING),
        )
    return Cause(
        name=CauseName.NOT_REDUCED,
        # What is clipped is recorded before that. The ranks may average behind it, and no weights tell.
        sureness=Sureness.PROBABLY if is_clipped and is_shared is None else Sureness.IS,
        sentence=f"the ranks do not average the gradients of {what}, {time}: each steps with its own, and {norms}",
        try_next="look for parameters in no group of the wrapper, as where fully_shard was not called on the root"
        if len(names) < len(wrong.gradient.parameters)
        else "look for no_sync, a communication hook, or parameters that the wrapper was told to ignore, or that were "
        "frozen when it was made",
        explains=(*GRADIENT_FINDINGS, WEIGHTING),
    )


def _are_equal(gradients: Sequence[ComparedGradient]) -> bool:
    """Tell whether several ranks recorded one gradient. Averaged gradients are equal to the last bits of fp32."""
    first = gradients[0]
    for other in gradients[1:]:
        for value, other_value in ((first.job_norm, other.job_norm), (first.scale, other.scale)):
            if value is not None and other_value is not None and not math.isclose(value, other_value, rel_tol=1e-3):
                return False
    return True


def find_scaled_loss(evidence: CauseEvidence) -> Cause | None:
    """Tell that the job multiplied its losses, all by the same number, before it differentiated them.

    What it multiplied them by is recorded. That the gradient is as many times the replay's shows that no other
    factor undoes it.
    """
    wrong = evidence.find_wrong_window(*GRADIENT_QUANTITIES)
    weights = None if wrong is None else compute_job_weights(wrong[2])
    if wrong is None or weights is None:
        return None
    verdict, finding, window = wrong
    replay_weights = [compared.record.result.weight for compared in window]
    replay_total = math.fsum(replay_weights) / len(replay_weights)
    factor = math.fsum(weights) / replay_total if replay_total else 1.0
    seen_factor = finding.recorded / finding.replayed if finding.replayed else math.nan
    if abs(factor - 1) < 1e-4 or not math.isclose(seen_factor, factor, rel_tol=0.1):
        return None
    right_weights = [weight / math.fsum(replay_weights) for weight in replay_weights]
    if _is_weighted_otherwise(verdict) and any(map(partial(math.isclose, rel_tol=1e-3), weights, right_weights)):
        # A pass weighs what it should, so the factor is what the others' weights make of the sum.
        return None
    if explain_loss_scale(factor) and clips_under_scale(window):
        return name_early_clipping(factor, verdict)
    num_tokens = sum(compared.recorded.num_tokens for compared in window)
    divisors = {compared.recorded.divisor for compared in window}
    divisor = divisors.pop() if len(divisors) == 1 else None
    if divisor is not None and math.isclose(factor, num_tokens / divisor, rel_tol=1e-4):
        return _name_loss_factor(
            CauseName.GRADIENTS_SCALED,
            sentence=f"the job's loss is divided by {divisor:g} tokens (num_items_in_batch), and {num_tokens} of the "
            f"step have one, {name_time(verdict)}",
            try_next="count the labels that the model's shift leaves: those behind each row's first token",
        )
    num_passes = len(window)
    usual_number = max(map(len, evidence.windows))
    if num_passes < usual_number and math.isclose(factor, num_passes / usual_number, rel_tol=1e-3):
        return _name_loss_factor(
            CauseName.WINDOW_WEIGHTS,
            sentence=f"each loss is divided by the {usual_number} passes of a full step, and the job's step "
            f"{(verdict.optimizer_step or 0) + 1} has {num_passes}: its gradient is {seen_factor:.4g} times the loss's",
            try_next="divide by the passes that a step really has, as at the end of an epoch",
        )
    cleared = find_cleared_passes(compared.recorded for compared in evidence.passes)
    if cleared is not None and math.isclose(factor, num_passes / cleared.num_passes, rel_tol=1e-3):
        return _name_loss_factor(
            CauseName.WINDOW_WEIGHTS,
            sentence=f"{cleared.describe()}; the losses of the others are divided by {cleared.num_passes}, "
            f"{name_time(verdict)}",
            try_next="call zero_grad once a step, behind optimizer.step()",
        )
    if num_passes > 1 and math.isclose(factor, num_passes, rel_tol=1e-3):
        return _name_loss_factor(
            CauseName.WINDOW_WEIGHTS,
            sentence=f"the losses of a step's {num_passes} passes are added up and not averaged, "
            f"{name_time(verdict)}: the gradient is {seen_factor:.4g} times that of their mean",
            try_next="divide each loss by the number of passes of a step before its backward",
        )
    return _name_loss_factor(
        CauseName.GRADIENTS_SCALED,
        sentence=f"the job differentiates {factor:.6g} times its loss"
        f"{explain_loss_scale(factor) or explain_share(factor, window)}, {name_time(verdict)}",
        try_next="look for a factor on the loss between the model and the backward",
    )


def _is_weighted_otherwise(verdict: PassVerdict) -> bool:
    """Tell whether the job gave the passes of a window other shares of its gradient, which changes all of that."""
    return any(finding.is_wrong and finding.name == WEIGHTING for finding in verdict.findings)


def _name_loss_factor(name: CauseName, *, sentence: str, try_next: str) -> Cause:
    """Name what the job multiplied its losses by: the recording has the factor, and the gradient shows it."""
    explains = (*GRADIENT_FINDINGS, WEIGHTING)
    return Cause(name=name, sureness=Sureness.IS, sentence=sentence, try_next=try_next, explains=explains)


def _find_round_norm(wrong: WrongGradient) -> float | None:
    """Find the norm of the job's whole gradient if it is a number that a person would clip to; None if it is not."""
    return find_round_number(
        math.hypot(*(parameter.job_norm or 0.0 for parameter in wrong.gradient.parameters.values()))
    )


def find_summed_gradients(evidence: CauseEvidence) -> Cause | None:
    """Tell that every gradient is as many times the mean over the ranks as there are ranks."""
    wrong = find_wrong_gradient(evidence)
    num_ranks = 1 if wrong is None else wrong.window[0].recorded.world_size or 1
    factor = None if wrong is None else find_uniform_factor(wrong)
    if wrong is None or num_ranks == 1 or factor is None:
        return None
    if not math.isclose(factor, num_ranks, rel_tol=2 * SAME_RATIO[wrong.is_coarse]):
        return None
    return Cause(
        name=CauseName.SUMMED,
        sureness=Sureness.PROBABLY,
        sentence=f"the gradients of {num_ranks} ranks are added up and not averaged, {name_time(wrong.verdict)}: each "
        f"is {factor:.4g} times the mean over the ranks, and the job differentiated the loss itself",
        try_next="look for a reduction by sum, a divide factor of 1 or a communication hook",
        explains=GRADIENT_FINDINGS,
    )


def find_scaled_gradients(evidence: CauseEvidence) -> Cause | None:
    """Tell that the gradients of all parameters, or of some, are those of the loss times a number."""
    wrong = find_wrong_gradient(evidence)
    if wrong is None or clips_parts(wrong.window) or find_scaled_loss(evidence) is not None:
        return None
    parameters = wrong.gradient.parameters
    uniform = find_uniform_factor(wrong)
    if uniform is not None and uniform < 1 and (limit := _find_round_norm(wrong)) is not None:
        return Cause(
            name=CauseName.CLIPPING,
            sureness=Sureness.PROBABLY,
            sentence=f"the job's gradient has a norm of {limit:g}, {name_time(wrong.verdict)}, {uniform:.4g} times the "
            "loss's: code of its own clipped it to that norm before it was recorded",
            try_next="clip with torch.nn.utils.clip_grad_norm_, whose gradients are recorded before they are clipped",
            explains=GRADIENT_FINDINGS,
        )
    # Around 1 the factors of a coarse dtype spread so far that some parameters may be off all the same.
    if uniform is not None and abs(uniform - 1) > 2 * SAME_RATIO[wrong.is_coarse]:
        if explain_loss_scale(uniform) and clips_under_scale(wrong.window):
            return name_early_clipping(uniform, wrong.verdict)
        is_sure = wrong.is_sure(parameters.values(), uniform, is_off=False)
        is_sure &= not may_come_of_reduction(uniform, wrong.window)
        padding = explain_padding(uniform, wrong)
        why = padding or explain_loss_scale(uniform) or explain_share(uniform, wrong.window)
        return Cause(
            name=CauseName.GRADIENTS_SCALED,
            sureness=Sureness.IS if is_sure and not padding else Sureness.PROBABLY,
            sentence=f"each gradient is {uniform:.4g} times that of the loss{why}, {name_time(wrong.verdict)}",
            try_next="divide the sum of a pass's losses by the number of tokens that have one, and not by all positions"
            if padding
            else "look for what multiplies gradients: a hook, a loss scale that is left in, a division",
            explains=GRADIENT_FINDINGS,
        )
    off = wrong.list_off()
    known = [factor for parameter in off if (factor := find_factor(parameter))]
    if not off or len(known) < len(off):
        return None
    if not all(wrong.is_scaled(parameter) for parameter in off):
        return None
    if not all(math.isclose(factor, known[0], rel_tol=4 * SAME_RATIO[wrong.is_coarse]) for factor in known):
        return None
    names = [parameter.name for parameter in off]
    # A stated value of the forward, as a cap of attention's scores, may change some gradients by one factor nearly.
    is_other_forward = any(difference.kind in OTHER_FORWARD_KINDS for difference in evidence.settings.model_differences)
    hooks = (difference for difference in evidence.settings.model_differences if difference.kind is Kind.PARAMETER_HOOK)
    own = [f"; {describe_model_difference(hook)}" for hook in hooks if wrong.is_confined_to(hook.where)]
    # A term that the loop adds to the model's loss may change some gradients by more than their bounds, and others by
    # less. It makes none of them twice as long.
    is_sure = wrong.is_sure(off, is_off=True) and bool(own or abs(known[0] - 1) > LEAST_FACTOR)
    return Cause(
        name=CauseName.GRADIENTS_SCALED,
        sureness=Sureness.IS if is_sure and not is_other_forward else Sureness.PROBABLY,
        sentence=f"the gradient of {name_parameters(names, list(parameters))} is {known[0]:.4g} times that of the "
        f"loss, {name_time(wrong.verdict)}; the others are the loss's, within their bounds{''.join(own)}",
        try_next="look for what multiplies these gradients: a hook on these parameters or on their module"
        + ("" if is_sure else OR_A_TERM),
        explains=GRADIENT_FINDINGS,
    )


def find_redrawn_masks(evidence: CauseEvidence) -> Cause | None:
    """Tell that most gradients have another direction in a model with dropout, whose forward drew the job's masks."""
    wrong = find_wrong_gradient(evidence)
    dropout = evidence.settings.dropout
    if wrong is None or not dropout or any(member.masks.status is not MaskStatus.SAME for member in wrong.window):
        return None
    # The gradient of an objective that the replay does not compute has another direction, too.
    if any(finding.doubt == UNKNOWN_OBJECTIVE for finding in wrong.verdict.findings):
        return None
    parameters = wrong.gradient.parameters
    turned = [name for name, parameter in parameters.items() if not wrong.is_scaled(parameter)]
    if 2 * len(turned) < len(parameters):
        return None
    return Cause(
        name=CauseName.DROPOUT,
        sureness=Sureness.PROBABLY,
        sentence=f"the backward has other dropout masks than the forward, {name_time(wrong.verdict)}: the forward is "
        f"the job's, and the gradient of {name_parameters(turned, list(parameters))} is not that of the loss; the "
        f"model has {', '.join(dropout)}",
        try_next="where layers are recomputed (gradient checkpointing), keep the random state: preserve_rng_state=True",
        explains=GRADIENT_FINDINGS,
    )


def find_changed_gradients(evidence: CauseEvidence) -> Cause | None:
    """Tell that some parameters have another gradient, while the others have the loss's."""
    wrong = find_wrong_gradient(evidence)
    if wrong is None or find_scaled_gradients(evidence) is not None or find_ranks_own_gradients(evidence) is not None:
        return None
    if not (off := wrong.list_off()):
        return None
    worst = find_farthest(off)
    how = f"of {worst.ratio:.4g} times the length" if worst.ratio is not None else "of another length"
    if worst.cosine is not None and worst.cosine >= SAME_COSINE[False] and not wrong.is_scaled(worst):
        how += ", and the elements that were sampled of it are the loss's: other rows or columns are not"
    elif worst.cosine is not None:
        how += f" and a cosine of {worst.cosine:.3g}"
    # What the recording states of the model may explain it better, or another rule.
    stated = [difference for difference in evidence.settings.model_differences if difference.kind in GRADIENT_KINDS]
    others = (find_redrawn_masks, find_gradient_without_router_loss)
    of_module = [difference for difference in stated if wrong.is_confined_to(difference.where)]
    of_setting = f"; {describe_model_difference(of_module[0])}" if of_module else ""
    explains_more = len(of_module) < len(stated)
    may_be_other = explains_more or any(find(evidence) is not None for find in others)
    is_sure = bool(of_module) and wrong.is_sure(off, is_off=True)
    ordered = sorted(off, key=lambda parameter: parameter.difference or 0.0, reverse=True)
    what = name_parameters([parameter.name for parameter in ordered], list(wrong.gradient.parameters))
    return Cause(
        name=CauseName.GRADIENTS_CHANGED,
        sureness=Sureness.IS if is_sure and not may_be_other else Sureness.PROBABLY,
        sentence=f"the gradient of {what} is not that of the loss, {name_time(wrong.verdict)}: that of {worst.name} is "
        f"{how}; the gradients of other parameters are the loss's, within their bounds{of_setting}",
        try_next=f"take the {of_module[0].key} of {of_module[0].where} out of the job, or give it to the model here"
        if of_module
        else f"see whether it comes of this: {describe_model_difference(stated[0])}"
        if stated
        else "look for a hook on these parameters, or for an autograd function of the job's own on the way to them"
        + OR_A_TERM,
        explains=GRADIENT_FINDINGS,
    )


def find_earlier_gradients(evidence: CauseEvidence) -> Cause | None:
    """Tell that a step's gradient holds that of the step before: it was not cleared, or is a step late."""
    wrong = find_wrong_gradient(evidence)
    if wrong is None:
        return None
    ends = [window[-1].record.index for window in evidence.windows]
    place = ends.index(wrong.verdict.index)
    if not place:
        return None
    before = evidence.windows[place - 1]
    pairs = _pair_with_earlier(wrong.window, before)
    shares = _fit_two(pairs)
    if shares is None:
        return None
    own, earlier, residual = shares
    if residual > (0.1 if wrong.is_coarse else 1e-4) or abs(earlier) < 0.1:
        return None
    is_late = abs(own) < 0.05
    what = "is that of the step before" if is_late else "still holds that of the step before"
    return Cause(
        # A gradient that was not cleared has the step's own in it, too.
        name=CauseName.GRADIENTS_CHANGED if is_late else CauseName.NOT_CLEARED,
        sureness=Sureness.PROBABLY if is_late else Sureness.IS,
        sentence=f"the gradient {what}, {name_time(wrong.verdict)}: it is {own:.3g} times the step's own and "
        f"{earlier:.3g} times that of the step before",
        try_next="look for gradients that are kept, or a step that is taken before its own backward has ended"
        if is_late
        else "call zero_grad() after each step",
        explains=GRADIENT_FINDINGS,
    )


def _pair_with_earlier(
    window: Sequence[ComparedPass], before: Sequence[ComparedPass]
) -> list[tuple[float, float, float]]:
    """Pair each signed element of the job's gradient with the replay's, and with the job's own of the step before."""
    own_values = _list_signatures(window)
    earlier = {
        (compared.recorded.rank, signature.name, signature.start): signature.values
        for compared in before
        if compared.recorded.step_after is not None
        for signature in compared.recorded.step_after.signatures
    }
    triples: list[tuple[float, float, float]] = []
    for compared in window:
        step = compared.recorded.step_after
        for signature in step.signatures if step is not None else ():
            earlier_values = earlier.get((compared.recorded.rank, signature.name, signature.start), ())
            for (name, start), values in own_values.items():
                if start != signature.start or not _is_named(signature.name, name):
                    continue
                if len(values) == len(signature.values) == len(earlier_values):
                    triples += zip(signature.values, values, earlier_values, strict=True)
    return triples


def _list_signatures(window: Sequence[ComparedPass]) -> Mapping[tuple[str, int], tuple[float, ...]]:
    gradients = [compared.replayed.gradient for compared in window if compared.replayed.gradient is not None]
    return {key: values for gradient in gradients for key, values in gradient.signatures.items()}


def _is_named(job_name: str, name: str) -> bool:
    return job_name == name or job_name.endswith(f".{name}")


def _fit_two(triples: Sequence[tuple[float, float, float]]) -> tuple[float, float, float] | None:
    """Fit the first numbers by multiples of the second and the third; return both multiples and the share left over."""
    if len(triples) < 16:
        return None
    aa = math.fsum(own * own for _, own, _ in triples)
    bb = math.fsum(other * other for _, _, other in triples)
    ab = math.fsum(own * other for _, own, other in triples)
    ja = math.fsum(job * own for job, own, _ in triples)
    jb = math.fsum(job * other for job, _, other in triples)
    jj = math.fsum(job * job for job, _, _ in triples)
    determinant = aa * bb - ab * ab
    if not jj or determinant <= 1e-9 * aa * bb:
        return None
    own, other = (ja * bb - jb * ab) / determinant, (jb * aa - ja * ab) / determinant
    left = math.fsum((job - own * a - other * b) ** 2 for job, a, b in triples)
    return own, other, left / jj


def find_other_weighting(evidence: CauseEvidence) -> Cause | None:
    """Tell that the job gave its passes other shares of a step's gradient than their numbers of tokens."""
    wrong = evidence.find_wrong(WEIGHTING)
    if wrong is None:
        return None
    verdict, finding = wrong
    why = str(finding.doubt).partition(". Try: ")[0]
    return Cause(
        name=CauseName.WINDOW_WEIGHTS,
        sureness=Sureness.IS,
        sentence=f"the passes of a step weigh {finding.values_as_text}, {name_time(verdict)}: {why}",
        try_next="look for a loss that is multiplied by 0, or left out"
        if " 0," in f" {finding.values_as_text},"
        else advise_weights(has_equal_weights=why.startswith(AVERAGED_MEANS)),
        explains=(WEIGHTING, *GRADIENT_FINDINGS),
        entails=(CauseName.GRADIENTS_CHANGED,),
    )


def find_other_loss(evidence: CauseEvidence) -> Cause | None:
    """Tell that what the job differentiated was not the loss that its model returned."""
    for verdict, finding in evidence.wrong:
        if finding.doubt is not None and finding.doubt.startswith(ANOTHER_LOSS):
            return Cause(
                name=CauseName.OBJECTIVE,
                sureness=Sureness.PROBABLY,
                sentence=f"{ANOTHER_LOSS}, {name_time(verdict)}",
                try_next="--loss FILE.py:function, with the loss that the job's loop differentiates",
                explains=GRADIENT_FINDINGS,
            )
    return None


def find_lost_steps(evidence: CauseEvidence) -> Cause | None:
    """Tell that steps in a 16-bit dtype moved no weight."""
    wrong = evidence.find_wrong(MOVED)
    if wrong is None or not str(wrong[1].values_as_text).startswith("none of"):
        return None
    verdict, finding = wrong
    return Cause(
        name=CauseName.DTYPE,
        sureness=Sureness.PROBABLY,
        sentence=f"{finding.values_as_text}, {name_time(verdict)}: "
        "in bf16 a step smaller than half a weight's spacing is lost",
        try_next="keep fp32 masters of the weights in the job",
        explains=(MOVED,),
    )


RULES = (
    CauseRule(
        name=CauseName.NOT_REDUCED,
        find=find_ranks_own_gradients,
        means="ranks that train one model step with gradients of their own",
        told_by="the ranks' gradients, which are not one",
        job="ddp-not-reduced",
    ),
    CauseRule(
        name=CauseName.WINDOW_WEIGHTS,
        find=find_other_weighting,
        means="the micro-batches of a step, or its ranks, weigh otherwise than by their tokens",
        told_by="what the job multiplied each loss by before the backward",
        job="mean-of-means",
    ),
    CauseRule(
        name=CauseName.CLIPPED_EARLY,
        find=find_clipping_of_parts,
        means="gradients are clipped after each pass, and not once before the step",
        told_by="the clippings that were recorded between the passes of a step",
        job="clipped-each-pass",
    ),
    CauseRule(
        name=CauseName.CLIPPING,
        find=find_clipping_of_shards,
        means="each rank clips by the norm of its own shards",
        told_by="the norms of the ranks' shards, which are one round number",
        job="fsdp2-clipped-by-shard",
    ),
    CauseRule(
        name=CauseName.CLIPPING,
        find=find_other_norm,
        means="the job clips by another norm than its gradient's",
        told_by="the recorded norm, beside the norms of each parameter's gradient",
        job="clipped-each",
    ),
    CauseRule(
        name=CauseName.GRADIENTS_SCALED,
        find=find_scaled_loss,
        means="the job differentiates its loss times a number",
        told_by="what the job multiplied each loss by, and that each gradient is as many times the replay's",
        job="loss-x10",
    ),
    CauseRule(
        name=CauseName.SUMMED,
        find=find_summed_gradients,
        means="gradients are added up over the ranks and not averaged",
        told_by="each gradient is as many times the replay's as the job has ranks",
        job="ddp-summed",
    ),
    CauseRule(
        name=CauseName.NOT_CLEARED,
        find=find_earlier_gradients,
        means="a step's gradient holds that of the step before",
        told_by="the gradient is a sum of multiples of this step's and of the last step's in the replay",
        job="zero-grad-forgotten",
    ),
    CauseRule(
        name=CauseName.GRADIENTS_SCALED,
        find=find_scaled_gradients,
        means="gradients, of all parameters or of some, are those of the loss times a number",
        told_by="the norm and the direction of each parameter's gradient",
        job="gradients-x10",
    ),
    CauseRule(
        name=CauseName.DROPOUT,
        find=find_redrawn_masks,
        means="layers are recomputed for the backward with other dropout masks than the forward drew",
        told_by="the forward is the job's, and most gradients have another direction, in a model with dropout",
        job="dropout-masks-anew",
    ),
    CauseRule(
        name=CauseName.GRADIENTS_CHANGED,
        find=find_changed_gradients,
        means="some parameters have a gradient of another direction than the loss's",
        told_by="the direction of each parameter's gradient",
        job="q-gradient-transposed",
    ),
    CauseRule(
        name=CauseName.OBJECTIVE,
        find=find_other_loss,
        means="the job differentiated another loss than the one that its model returned",
        told_by="the model's loss agrees, and no sampled gradient does",
        job="mean-of-rows",
    ),
    CauseRule(
        name=CauseName.DTYPE,
        find=find_lost_steps,
        means="weights in bf16 without fp32 masters: small steps are lost",
        told_by="samples of the weights before and after a step",
        job="bf16-masters",
    ),
)
