"""Compare the gradient of a job's optimizer step with that of a replay's window.

A window is the passes, of all data ranks, that one optimizer step takes its gradient from. The job may have recorded
the gradient's norm, single elements of it, and the parameters that had no gradient.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from capture.file_format.optimizer_step import OptimizerStep
from replay.output.text import pluralise
from replay.runlog.records import PassRecord
from replay.tolerances.difference import absolute_difference, as_share, is_coarse, relative_difference
from replay.tolerances.job_bounds import GRAD_NORM, GRADIENT, LOSS, SAME_SHARES
from replay.verdict.dropout_masks import MaskComparison, leave_out_other_masks
from replay.verdict.findings import (
    ROUNDING_HIDES,
    Finding,
    FindingStatus,
    VerdictSettings,
    choose_worst,
    judge_number,
    list_dtypes,
    make_unjudged_finding,
    report_other_settings,
    report_other_weighting,
    root_mean_square,
)
from replay.verdict.gradient_evidence import GradientEvidence, compare_signatures
from replay.verdict.gradient_samples import GradientSamples
from replay.verdict.optimizer_comparison import list_setting_differences
from replay.verdict.pass_windows import group_into_windows, sum_loss_weights
from replay.verdict.recorded_pass import (
    RecordedPass,
    ReplayedPass,
    WeightComparison,
)
from replay.verdict.sample_pairs import do_some_samples_agree, find_least_floor, pair_samples
from replay.verdict.signature_findings import do_some_signatures_agree, judge_signatures
from replay.verdict.state_findings import compare_states
from replay.verdict.trained_parameters import find_missing_gradients, find_trained_parameters, is_among

UNKNOWN_OBJECTIVE = "the gradient is of the job's objective, which the replay may not compute"
ANOTHER_LOSS = "the job differentiated another loss than the one that its model returned"
AVERAGED_MEANS = "the job averaged means"
UNKNOWN_ROUTER_LOSS = "the job's loop may have added the routers' loss of its model"
LEFT_OUT = "came after padding, which predicts none here"
MAX_NAMED = 4
MAX_FORWARDS = 8
# Relative: how near the inverse of a loss scale is to the factor of the gradients.
SAME_SCALE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedPass:
    """One pass of one rank: what the job recorded, what the replay computed, and what their comparison found.

    findings                of the pass alone, without the gradient
    weight_comparison       what is known of the weights that the pass ran on
    previous_pass_has_grad_norm  the same rank's pass just before it has a recorded gradient norm
    masks                   what the ends of the random generators tell of the dropout masks
    has_job_dropout_masks   the replay drew the job's masks, as these ends show, or, without them, its numbers
    window_findings         of the gradient of the window that this pass ends, and of the optimizer's state before its
                            step
    step_findings           of the weights after that step
    """

    record: PassRecord
    recorded: RecordedPass
    replayed: ReplayedPass
    findings: Sequence[Finding]
    weight_comparison: WeightComparison
    previous_pass_has_grad_norm: bool
    masks: MaskComparison = MaskComparison()
    has_job_dropout_masks: bool = False
    window_findings: Sequence[Finding] = ()
    step_findings: Sequence[Finding] = ()

    @property
    def place(self) -> tuple[int, int]:
        return self.record.index, self.record.rank

    @property
    def loss(self) -> Finding | None:
        return next((finding for finding in self.findings if finding.name == LOSS), None)


def list_step_differences(window: Sequence[ComparedPass], settings: VerdictSettings, number: int) -> list[str]:
    """List what makes step `number` of a replay with --step another one than the job's; empty if nothing does."""
    assert settings.stepping_actor is not None
    steps = list_steps(window)
    if not steps:
        return ["the replay has stepped since, so its weights are known before the first step alone"]
    if reason := _explain_other_window(window, steps, settings):
        return [reason]
    job_norm = next((norm for _, norm in _list_job_norms(window, steps)), None)
    replay_norm = window[-1].record.result.grad_norm
    last = (
        steps[-1] if settings.job_code_clip_norm is None else replace(steps[-1], max_norm=settings.job_code_clip_norm)
    )
    return list_setting_differences(
        last,
        settings.stepping_actor,
        number,
        (job_norm, replay_norm),
        loaded_counts=settings.loaded_counts,
        setting_names_from_job=settings.setting_names_from_job,
    )


def list_steps(window: Sequence[ComparedPass]) -> list[OptimizerStep]:
    """List what each rank recorded of the optimizer step that ended the window."""
    steps = [compared_pass.recorded.step_after for compared_pass in window]
    return [step for step in steps if step is not None]


def explain_unjudged_gradient(window: Sequence[ComparedPass]) -> list[str]:
    """Say why nobody knows whether the gradient of a step was the job's; empty where it is known.

    A step at a learning rate of 0 moves nothing, whatever its gradient.
    """
    rates = [group.get("lr") for step in list_steps(window) for group in step.settings]
    if rates and not any(rates):
        return []
    findings = window[-1].window_findings
    if any(
        finding.is_evidence and finding.status in (FindingStatus.AGREES, FindingStatus.DIFFERS) for finding in findings
    ):
        return []
    reason = next((finding.doubt for finding in findings if finding.doubt is not None), "the job recorded none of it")
    number = window[-1].recorded.num_steps_before
    step_name = "the step before" if number is None else f"the job's step {number + 1}"
    return [f"the gradient of {step_name} could not be judged: {reason}"]


def collect_gradient_evidence(window: Sequence[ComparedPass]) -> GradientEvidence | None:
    """Hold the job's gradient of a window beside the replay's, by parameter and kind; None where either is not known.

    It says nothing of whether the two should be equal: see the window's findings for that.
    """
    gradient = _merge_gradients(window)
    return None if gradient is None else compare_signatures([member.recorded for member in window], gradient)


def add_window_findings(compared_passes: Sequence[ComparedPass], settings: VerdictSettings) -> list[ComparedPass]:
    """Compare what the job recorded of each window's gradient with the replay's; its last pass gets the findings."""
    findings_by_end = {
        window[-1].place: _compare_window(window, settings) for window in group_into_windows(compared_passes)
    }
    return [
        replace(compared_pass, window_findings=findings_by_end.get(compared_pass.place, ()))
        for compared_pass in compared_passes
    ]


def _compare_window(window: Sequence[ComparedPass], settings: VerdictSettings) -> list[Finding]:
    """Compare one window; empty where the job recorded nothing of its gradient."""
    members = [(compared_pass.recorded, compared_pass.replayed) for compared_pass in window]
    masks = [compared_pass.masks for compared_pass in window]
    return [
        # Nothing can be said of the gradient where a pass of the window drew other dropout masks.
        *leave_out_other_masks(_compare_gradient(window, settings), masks, settings),
        *_compare_optimizer(window, settings),
        *compare_states(members, window[-1].record.index, settings),
    ]


def _compare_optimizer(window: Sequence[ComparedPass], settings: VerdictSettings) -> list[Finding]:
    if not settings.follows_steps or not list_steps(window) or not window[-1].record.result.has_stepped:
        return []
    differences = list_step_differences(window, settings, window[0].record.result.num_steps)
    return [report_other_settings(differences)] if differences else []


def _compare_gradient(window: Sequence[ComparedPass], settings: VerdictSettings) -> list[Finding]:
    """Compare the norm, the missing gradients and the sampled elements, and the shares of the passes.

    The plan: if the replay's window has other passes than the job's step, nothing can be judged. Otherwise ask whether
    a different gradient would prove anything (`doubt`): it would not if the job may have differentiated another loss,
    though gradient samples that agree show that it did not. Passes that were weighed otherwise than in the job are
    reported as such, and explain every other number. But no doubt of the weights of passes explains a parameter that
    has a gradient here and had none in the job, so those are found before.
    """
    steps = list_steps(window)
    job_norms = _list_job_norms(window, steps)
    has_samples = any(step.gradients or step.grad_norm is not None or step.without_gradient for step in steps)
    if not job_norms and not has_samples:
        return []
    replay_norm = window[-1].record.result.grad_norm
    why_not = _explain_other_window(window, steps, settings) or _explain_overflow(replay_norm, job_norms, settings)
    if why_not is not None or replay_norm is None:
        reason = why_not or "the replay ran no backward, or its window was cut short"
        findings = [make_unjudged_finding(GRAD_NORM, norm, reason, replay_norm) for _, norm in job_norms[:1]]
        largest = _list_largest_elements(steps)
        if largest:
            findings.append(make_unjudged_finding(GRADIENT, root_mean_square(largest), reason))
        return findings
    index = window[-1].record.index
    dtypes = [dtype for compared_pass in window for dtype in list_dtypes(compared_pass.recorded, settings)]
    gradient = _merge_gradients(window)
    doubt = _explain_doubt(window, steps)
    evidence = collect_gradient_evidence(window)
    if gradient is not None and doubt is not None and doubt.startswith(ANOTHER_LOSS):
        does_agree = do_some_samples_agree(steps, gradient, settings.choose_bound(GRADIENT, dtypes, 1, index))
        if does_agree or (evidence is not None and do_some_signatures_agree(evidence, settings, dtypes, index)):
            doubt = None
    if doubt is None and evidence is not None:
        doubt = _doubt_scale_of_weights(window, evidence)
    if doubt is None:
        doubt = _doubt_router_loss(window, evidence, settings, dtypes)
    missing = [] if gradient is None else find_missing_gradients(gradient, steps, doubt)
    weighting = _compare_weighting(window, job_norms, replay_norm) if doubt is None else None
    if weighting is not None:
        doubt = weighting.doubt
    norms = [
        _compare_norm(job_norm, rank, replay_norm, gradient, steps, window, settings, dtypes, doubt)
        for rank, job_norm in job_norms
    ]
    findings = [*_select_worst_norm(norms, job_norms), *missing]
    if gradient is not None:
        sample_doubt = _doubt_samples(window, settings, dtypes, doubt)
        num_passes = max((len(step.passes) for step in steps), default=1)
        signed: list[Finding] = []
        if evidence is not None:
            has_stepped = settings.follows_steps and window[0].record.index > 0
            signed = judge_signatures(
                evidence, settings, dtypes, index, sample_doubt, num_passes, has_stepped=has_stepped
            )
        elements = _compare_elements(gradient, window, settings, dtypes, sample_doubt)
        is_judged = any(finding.status is not FindingStatus.NOT_JUDGED for finding in signed)
        # Single elements that rounding hides are no open question where elements are judged together.
        findings += signed
        findings += [finding for finding in elements if finding.doubt != ROUNDING_HIDES or not is_judged]
    return findings if weighting is None else [*findings, weighting]


def _list_job_norms(window: Sequence[ComparedPass], steps: Sequence[OptimizerStep]) -> list[tuple[int, float]]:
    """List the job's global norms by rank. Where each rank recorded its part of the norm, they are added up."""
    parts = [step.grad_norm for step in steps if step.is_part_of_norm and step.grad_norm is not None]
    if parts:
        return [(0, math.sqrt(sum(part * part for part in parts)))]
    norms: dict[int, float] = {}
    for compared_pass in window:
        rank = compared_pass.recorded.rank or 0
        claims = [claim.values[0] for claim in compared_pass.recorded.claims if claim.name == GRAD_NORM]
        step = compared_pass.recorded.step_after
        if claims:
            norms[rank] = claims[0]
        elif step is not None and step.grad_norm is not None:
            norms[rank] = step.grad_norm
    return sorted(norms.items())


def _explain_other_window(
    window: Sequence[ComparedPass], steps: Sequence[OptimizerStep], settings: VerdictSettings
) -> str | None:
    """Say how the passes of the replay's window differ from those of the job's step; None if they are the same.

    The job's step took the same number of passes on each of its ranks.
    """
    first = window[0].recorded
    world_size = first.world_size or 1
    if not steps:
        # Nothing recorded the job's steps, but it noted a gradient norm beside passes. If its steps took one pass of
        # each rank, as `_explain_doubt` asks, a window of one pass of each rank is the same.
        is_whole = len(window) == world_size == len({compared_pass.recorded.rank for compared_pass in window})
        return None if is_whole and settings.grad_accumulation == 1 else "how many passes it was of was not recorded"
    replay_forwards: dict[int, list[int | None]] = {}
    job_forwards: dict[int, list[int]] = {}
    for compared_pass in window:
        recorded = compared_pass.recorded
        replay_forwards.setdefault(recorded.rank or 0, []).append(recorded.forward_number)
        if recorded.step_after:
            job_forwards[recorded.rank or 0] = list(recorded.step_after.passes)
    if len(job_forwards) == world_size and replay_forwards == job_forwards:
        return None
    job_size, replay_size = world_size * len(steps[-1].passes), len(window)
    ranks = f" of {world_size} ranks" if world_size > 1 else ""
    sizes = f"the job's step took {pluralise(job_size, 'pass')}{ranks}, and this gradient is of {replay_size}"
    grad_accumulation = max(job_size // settings.num_data_ranks, 1)
    if grad_accumulation != settings.grad_accumulation:
        return f"{sizes}. Try: --grad-accumulation {grad_accumulation}, without --max-inputs"
    replayed = _format_forwards(replay_forwards)
    differs = any(replay_forwards[rank] != forwards for rank, forwards in job_forwards.items())
    beside = f", in the job of {_format_forwards(job_forwards)}" if differs else ""
    return (
        f"{sizes}: of forward {replayed}{beside}. "
        "Try: all of the job's inputs in its order, without --max-inputs and --shuffle-inputs"
    )


def _format_forwards(by_rank: Mapping[int, Sequence[int | None]]) -> str:
    """Name the forwards of a step, as `0, 1 of rank 0; 0, 1 of rank 1`."""
    return "; ".join(
        f"{', '.join(map(str, forwards[:MAX_FORWARDS]))} of rank {rank}" for rank, forwards in sorted(by_rank.items())
    )


def _explain_doubt(window: Sequence[ComparedPass], steps: Sequence[OptimizerStep]) -> str | None:
    """Say why a different gradient would prove nothing; None if it would prove a difference."""
    if all(compared_pass.recorded.has_job_weights_of_tokens for compared_pass in window):
        num_left_out = sum(compared_pass.recorded.num_left_out for compared_pass in window)
        return f"{pluralise(num_left_out, 'target')} of the job's loss {LEFT_OUT}" if num_left_out else None
    if any(compared_pass.loss is None or not compared_pass.loss.is_evidence for compared_pass in window):
        return UNKNOWN_OBJECTIVE
    if any(share is None for step in steps for share in step.shares):
        shares = _as_shares([compared_pass.record.result.weight for compared_pass in window])
        if _largest_difference(shares, _equal_weights(window)) <= SAME_SHARES:
            return ANOTHER_LOSS
        return f"{ANOTHER_LOSS}, or weighed its passes otherwise"
    if not steps and not all(compared_pass.previous_pass_has_grad_norm for compared_pass in window):
        return "one gradient norm does not tell how many passes it was accumulated over"
    if len(window) > 1 and compute_job_weights(window) is None:
        by_tokens = [compared_pass.recorded.num_tokens for compared_pass in window]
        if not sum(by_tokens) or _largest_difference(_as_shares(by_tokens), _equal_weights(window)) > SAME_SHARES:
            return "what each pass weighed in the job is not known. Try: --window mean-of-means"
    return None


def _compare_weighting(
    window: Sequence[ComparedPass], job_norms: Sequence[tuple[int, float]], replay_norm: float
) -> Finding | None:
    """Report that the job weighed its passes otherwise than the replay. Only shares count, not their sum."""
    weights = compute_job_weights(window) if len(window) > 1 else None
    if weights is None:
        return None
    job_shares = _as_shares(weights)
    replay_shares = _as_shares([compared_pass.record.result.weight for compared_pass in window])
    if _largest_difference(job_shares, replay_shares) <= SAME_SHARES:
        return None
    norm = f" (gradient norm {job_norms[0][1]:.6g})" if job_norms else ""
    if _largest_difference(job_shares, _equal_weights(window)) <= SAME_SHARES:
        why = f"{AVERAGED_MEANS}{norm}; by tokens the norm is {replay_norm:.6g}. Try: --window mean-of-means"
    else:
        why = f"the job weighed its passes otherwise{norm}; here the norm is {replay_norm:.6g}"
    return report_other_weighting(job_shares, replay_shares, why)


def _as_shares(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights] if total else list(weights)


def _equal_weights(window: Sequence[ComparedPass]) -> list[float]:
    return [1 / len(window)] * len(window)


def compute_job_weights(window: Sequence[ComparedPass]) -> list[float] | None:
    """Compute what each pass's mean loss weighed in the job's gradient, ranks averaged; None where it is not known."""
    shares: dict[tuple[int, int | None], float | None] = {}
    for compared_pass in window:
        recorded = compared_pass.recorded
        if recorded.step_after is not None:
            for forward, share in zip(recorded.step_after.passes, recorded.step_after.shares, strict=True):
                shares[recorded.rank or 0, forward] = share
    weights: list[float] = []
    for compared_pass in window:
        recorded = compared_pass.recorded
        share = shares.get((recorded.rank or 0, recorded.forward_number))
        if share is None:
            return None
        # The job differentiated share * (sum of the losses / divisor). As a multiple of the mean over the tokens that
        # is share * num_tokens / divisor.
        per_mean = 1.0 if recorded.divisor is None else recorded.num_tokens / recorded.divisor
        weights.append(share * per_mean / (recorded.world_size or 1))
    return weights


def _largest_difference(shares: Sequence[float], other_shares: Sequence[float]) -> float:
    return max(abs(share - other) for share, other in zip(shares, other_shares, strict=True))


def _merge_gradients(window: Sequence[ComparedPass]) -> GradientSamples | None:
    """Return the replay's gradient, with all elements that some rank of the job sampled."""
    gradients = [compared_pass.replayed.gradient for compared_pass in window]
    known = [gradient for gradient in gradients if gradient is not None]
    if not known:
        return None
    values = {position: value for gradient in known for position, value in gradient.values.items()}
    signatures = {position: value for gradient in known for position, value in gradient.signatures.items()}
    return GradientSamples(norms=known[0].norms, sizes=known[0].sizes, values=values, signatures=signatures)


def _compare_norm(
    job_norm: float,
    rank: int,
    replay_norm: float,
    gradient: GradientSamples | None,
    steps: Sequence[OptimizerStep],
    window: Sequence[ComparedPass],
    settings: VerdictSettings,
    dtypes: Sequence[str],
    doubt: str | None,
) -> Finding:
    """Compare a rank's norm of the job with the replay's, which is taken of the parameters that the job trained."""
    num_frozen = 0 if settings.follows_frozen else max(compared_pass.recorded.num_frozen for compared_pass in window)
    if num_frozen and gradient is not None and doubt is None:
        trained = find_trained_parameters(steps, num_frozen, gradient)
        if trained is None:
            doubt = f"the job did not train {pluralise(num_frozen, 'parameter')}, and not all that it trained is known"
        else:
            replay_norm = math.sqrt(sum(norm**2 for name, norm in gradient.norms.items() if is_among(name, trained)))
    elif num_frozen:
        doubt = doubt or f"the job did not train {pluralise(num_frozen, 'parameter')}"
    index = window[-1].record.index
    # Where the job's gradient is exactly zero, the replay's may be rounding: as a share of it, a bound can say so.
    difference = as_share(absolute_difference(replay_norm, job_norm), job_norm or replay_norm)
    return judge_number(
        GRAD_NORM,
        job_norm,
        replay_norm,
        difference=difference,
        bound=settings.choose_bound(GRAD_NORM, dtypes, 1, index),
        doubt=doubt or settings.doubt_expert_routes(GRAD_NORM, difference, dtypes, index),
        is_evidence=doubt is None,
        where=f"rank {rank}" if (window[0].recorded.world_size or 1) > 1 else None,
    )


def _doubt_scale_of_weights(window: Sequence[ComparedPass], evidence: GradientEvidence) -> str | None:
    """Say so where the job's own code took out of its gradients what it had multiplied its loss by.

    A loss scale that is no GradScaler's is in the recorded weights of the log-probs, and nothing tells that it left.
    """
    if not all(compared_pass.recorded.has_job_weights_of_tokens for compared_pass in window):
        return None
    total = sum_loss_weights(window)
    factor = None if evidence.whole is None else evidence.whole.ratio
    if not total or factor is None or math.isclose(total, 1, rel_tol=SAME_SCALE):
        return None
    if not math.isclose(factor, 1 / total, rel_tol=SAME_SCALE):
        return None
    return (
        f"the weights of the loss that the job differentiated add up to {total:.6g}, and its gradients are divided by "
        "as much: a loss scale of its own, perhaps"
    )


def _doubt_router_loss(
    window: Sequence[ComparedPass],
    evidence: GradientEvidence | None,
    settings: VerdictSettings,
    dtypes: Sequence[str],
) -> str | None:
    """Say so where the gradient may hold a routers' loss that the job's loop added, and the replay's does not.

    That loss reaches each router and what comes before the last one. So it is no reason where the routers' gradients
    agree, nor where that of the last router's experts or of the head differs.
    """
    all_losses = [member.replayed.router_loss_of_training_loop for member in window]
    losses = [loss for loss in all_losses if loss is not None]
    if all(loss.is_held for loss in losses):
        return None
    noted = "the noted loss does not tell, or does not hold it. Try: recorder.note(loss=...) with all that is added"
    advice = noted if all(loss.is_noted for loss in losses) else "no loss was noted. Try: recorder.note(loss=...)"
    doubt = f"{UNKNOWN_ROUTER_LOSS}: {advice}"
    routers = [flips.router for member in window for flips in member.replayed.router_flips]
    if evidence is None or not routers:
        return doubt

    def do_differ(names: Collection[str]) -> bool:
        compared = {name: own for name, own in evidence.parameters.items() if name in names}
        found = judge_signatures(
            GradientEvidence(parameters=compared), settings, dtypes, window[-1].record.index, doubt=None
        )
        return any(finding.status is FindingStatus.DIFFERS for finding in found)

    of_routers = [name for name in evidence.parameters if name.startswith(tuple(f"{router}." for router in routers))]
    mixture = f"{routers[-1].rpartition('.')[0]}."
    behind = [
        name
        for name in evidence.parameters
        if name not in of_routers and (name.startswith(mixture) or "lm_head" in name.split("."))
    ]
    return doubt if (do_differ(of_routers) or not of_routers) and not do_differ(behind) else None


def _explain_overflow(
    replay_norm: float | None, job_norms: Sequence[tuple[int, float]], settings: VerdictSettings
) -> str | None:
    """Say so where the replay's fp16 overflowed, and the job's, at a loss scale of its own, is not known to have."""
    if settings.dtype != "float16" or replay_norm is None or math.isfinite(replay_norm):
        return None
    if any(not math.isfinite(norm) for _, norm in job_norms):
        return None
    return "it overflowed here in fp16, at the replay's own loss scale"


def _list_largest_elements(steps: Sequence[OptimizerStep]) -> list[float]:
    """List the largest sampled element of each parameter's gradient in the job."""
    largest = {
        sample.name: max(sample.values, key=abs)
        for step in steps
        if step.gradients is not None
        for sample in step.gradients.samples
        if sample.values
    }
    return list(largest.values())


def _doubt_samples(
    window: Sequence[ComparedPass], settings: VerdictSettings, dtypes: Sequence[str], doubt: str | None
) -> str | None:
    """Say why other elements of a gradient would prove nothing; None if they would. `doubt` holds for any gradient."""
    if doubt is not None:
        return doubt
    if any(not step.is_unclipped for step in list_steps(window)):
        return "the job's gradients were clipped or scaled before they were sampled"
    if settings.why_no_floors is not None and is_coarse(dtypes):
        return f"no bound is known, as the effect of rounding could not be measured: {settings.why_no_floors}"
    return None


def _compare_elements(
    gradient: GradientSamples,
    window: Sequence[ComparedPass],
    settings: VerdictSettings,
    dtypes: Sequence[str],
    doubt: str | None,
) -> list[Finding]:
    """Compare the sampled elements, relative to the root mean square of their parameter's gradient; keep the worst.

    An agreement is evidence only if a gradient that vanished would not agree as well. It would if the bound is more
    than HIDING_BOUND, or if all sampled elements are smaller than the bound: then nothing is judged.
    """
    index = window[-1].record.index
    bound = settings.choose_bound(GRADIENT, dtypes, 1, index)
    has_ranks = (window[0].recorded.world_size or 1) > 1
    findings: list[Finding] = []
    can_tell = False
    for compared_pass in window:
        step = compared_pass.recorded.step_after
        for pair in pair_samples(step, gradient) if step is not None else ():
            rank = f", rank {compared_pass.recorded.rank}" if has_ranks else ""
            can_tell |= pair.shows_vanishing(bound)
            least_floor = find_least_floor(pair.name)
            findings.append(
                judge_number(
                    GRADIENT,
                    pair.job_value,
                    pair.replay_value,
                    difference=pair.difference,
                    bound=bound,
                    doubt=doubt
                    or settings.doubt_expert_routes(GRADIENT, pair.difference, dtypes, index, least_floor=least_floor),
                    is_evidence=True,
                    where=f"{pair.name}, element {pair.sample.start + pair.worst}{rank}",
                )
            )
    if not findings:
        return []
    worst = replace(choose_worst(findings), num_values=len(findings))
    if worst.agrees and not can_tell:
        return [replace(worst, status=FindingStatus.NOT_JUDGED, doubt=ROUNDING_HIDES, is_evidence=False)]
    return [worst]


def _select_worst_norm(findings: Sequence[Finding], job_norms: Sequence[tuple[int, float]]) -> list[Finding]:
    """Keep the farthest finding. All ranks should have one global norm; where they do not, say which rank has which."""
    if not findings:
        return []
    farthest = max(findings, key=lambda finding: finding.share_of_bound)
    if all(relative_difference(norm, job_norms[0][1]) <= (farthest.bound or 0.0) for _, norm in job_norms):
        return [farthest]
    norms = ", ".join(f"rank {rank} has {norm:.6g}" for rank, norm in job_norms[:MAX_NAMED])
    return [replace(farthest, where=f"{farthest.where}; the job's ranks have several norms: {norms}")]
