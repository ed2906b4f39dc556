"""Tell when the replay did not run on the weights that the job had."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from capture.file_format.name_patterns import format_patterns
from capture.file_format.optimizer_step import OptimizerStep, parse_numbers
from replay.output.text import name_some, pluralise
from replay.tolerances.difference import FP32_SPACING
from replay.tolerances.job_bounds import STEPPED
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.dtype_rules import HALVES, LEAST_VALUES
from replay.verdict.causes.evidence import CauseEvidence, CauseRule, name_time
from replay.verdict.causes.step_rules import EXPLAINED, is_followed_by_wrong_number
from replay.verdict.frozen_weights import FrozenChange, find_frozen_changes
from replay.verdict.gradient_findings import list_steps
from replay.verdict.outcomes import OTHER_WEIGHTS, Outcome, PassVerdict
from replay.verdict.pass_windows import sum_loss_weights
from replay.verdict.rank_weights import find_ranks_that_began_apart
from replay.verdict.recorded_pass import WEIGHTS_OF_RANKS, SteppedSample
from replay.verdict.stepped_weights import measure_drift
from replay.verdict.weight_movement import Samples, did_come_back

# Half of the parameters off by so many times what a step moved them.
OTHER_MASTERS = 4.0
# So many elements for each unknown of a fit, at least: fewer would fit anything.
LEAST_ELEMENTS = 8
# What a fit may leave, as a share of what it explains: samples are of fp32, and a step may move them by little.
MAX_RESIDUAL = 0.02


def find_other_weights(evidence: CauseEvidence) -> Cause | None:
    """Name the weights that are not the job's, if that keeps every pass from being judged."""
    judged = [verdict for verdict in evidence.verdicts if verdict.outcome is not Outcome.CANNOT_TELL]
    other = next(iter(evidence.verdicts), None)
    # Later passes have other weights in any job whose steps are not replayed, so the first pass decides.
    if judged or other is None or other.reason != OTHER_WEIGHTS:
        return None
    weights = next(compared.weight_comparison for compared in evidence.passes if compared.weight_comparison.differing)
    first = weights.first
    element = (
        ""
        if first is None
        else f": element {first.index} of {first.name} is {first.recorded:.6g} in the job, {first.replayed:.6g} here"
    )
    step = next(
        (
            compared.recorded.num_steps_before
            for compared in evidence.passes
            if compared.record.index == other.index and compared.recorded.num_steps_before is not None
        ),
        None,
    )
    patterns = format_patterns(weights.differing, weights.compared)
    # A job that loaded this folder has none of its weights elsewhere, or all of them.
    is_part = not step and 2 * len(weights.differing) < len(weights.compared)
    check_loading = "if the job loaded this folder, see what that left out (strict=False?); else " if is_part else ""
    of_step = f", which the job had after {pluralise(step, 'step')}" if step else ""
    why_random = "; those here are random, since --weights was not given" if evidence.settings.lacks_weights else ""
    option = "--weights" if evidence.settings.has_user_model else "--model"
    return Cause(
        name=CauseName.OTHER_WEIGHTS,
        sureness=Sureness.IS,
        sentence=f"the replay runs on other weights than pass {other.index + 1} did{of_step}: "
        f"{name_some(patterns, 2)} {'differs' if len(weights.differing) == 1 else 'differ'}{element}{why_random}",
        try_next=f"{check_loading}{option} FOLDER, with the weights that the job had before this pass",
    )


def find_ranks_with_other_weights(evidence: CauseEvidence) -> Cause | None:
    """Name a rank of the job that began with other weights than the first one, though each holds a whole model."""
    difference = find_ranks_that_began_apart(compared.recorded for compared in evidence.passes)
    if difference is None or not any(compared.weight_comparison.differing for compared in evidence.passes):
        return None
    first, other = difference.ranks
    return Cause(
        name=CauseName.OTHER_WEIGHTS,
        # Ranks that share experts have others under the same names.
        sureness=Sureness.PROBABLY if evidence.settings.is_mixture else Sureness.IS,
        sentence=f"the job's ranks train other models: rank {other} does not begin with the weights of rank {first}: "
        f"{difference.describe()}",
        try_next="load weights before the model is wrapped in DDP, which gives all ranks rank 0's, or on all ranks",
        explains=(WEIGHTS_OF_RANKS, STEPPED, *EXPLAINED),
    )


def find_weights_of_earlier_step(evidence: CauseEvidence) -> Cause | None:
    """Tell that the job went back to weights that it had before: they were loaded again in the midst of training."""
    if evidence.first_wrong is None:
        return None
    for by_step in _collect_samples(evidence).values():
        steps = sorted(by_step)
        for place, step in enumerate(steps[2:], start=2):
            earlier = next(
                (
                    old
                    for number, old in enumerate(steps[: place - 1])
                    if did_come_back(
                        by_step[old], by_step[step], [by_step[between] for between in steps[number + 1 : place]]
                    )
                ),
                None,
            )
            if earlier is not None:
                return Cause(
                    name=CauseName.WEIGHTS_CHANGED,
                    sureness=Sureness.IS,
                    sentence=f"the job's weights before step {step + 1} are again those before step {earlier + 1}: "
                    "they were loaded or copied back",
                    try_next="look for what loads or copies weights between these steps",
                    explains=(STEPPED, *EXPLAINED),
                )
    return None


def find_changed_frozen_weights(evidence: CauseEvidence) -> Cause | None:
    """Name the frozen weights that the job changed: no step of an optimizer does that."""
    changes = find_frozen_changes(evidence.passes, evidence.settings)
    if not changes or not is_followed_by_wrong_number(evidence, changes[0].step_before):
        return None
    first = changes[0]
    names = {sample.name for compared in evidence.passes for sample in compared.recorded.samples}
    patterns = format_patterns(list(dict.fromkeys(change.name for change in changes)), sorted(names))
    index, before, after = first.largest
    is_same_step = first.step_after == first.step_before + 1
    time = f"behind step {first.step_after}" if is_same_step else f"before step {first.step_after + 1}"
    half = next((half for half in HALVES.values() if _are_rounded(changes, half)), None)
    rounded = f"; most are values of {str(half).removeprefix('torch.')} now, and were not before" if half else ""
    is_held = _may_hold_frozen_weights(evidence)
    return Cause(
        name=CauseName.WEIGHTS_CHANGED,
        sureness=Sureness.PROBABLY if is_held and not rounded else Sureness.IS,
        sentence=f"frozen weights of the job are other ones {time}: {name_some(patterns, 3)} (element {index} of "
        f"{first.name} was {before:.7g}, and is {after:.7g}){rounded}",
        try_next="merge, cast and push a copy: an adapter that is merged and unmerged in place leaves its rounding"
        if rounded
        else "look for what merges, loads or averages weights in place"
        + (", or for gradients of 0 with which the optimizer decays them" if is_held else ""),
        explains=(STEPPED, *EXPLAINED),
    )


def _are_rounded(changes: Sequence[FrozenChange], half: torch.dtype) -> bool:
    """Tell whether most of these samples are of values of a 16-bit dtype behind the change, and were not before.

    An adapter that is unmerged from rounded weights leaves others, so not all of them need to be.
    """

    def is_of_half(values: Sequence[float]) -> bool:
        numbers = torch.tensor(values, dtype=torch.float64)
        return torch.equal(numbers.to(half).double(), numbers)

    rounded = [change for change in changes if is_of_half(change.after) and not is_of_half(change.before)]
    return 2 * len(rounded) > len(changes) and sum(len(change.after) for change in rounded) >= LEAST_VALUES


def _may_hold_frozen_weights(evidence: CauseEvidence) -> bool:
    """Tell whether the job's optimizer may hold more than the parameters that are trained."""
    for compared in evidence.passes:
        step, recorded = compared.recorded.step_after, compared.recorded
        if step is not None:
            num_held = sum(group["num_parameters"] for group in step.settings)
            if not num_held or num_held > recorded.weight_comparison.num_parameters - recorded.num_frozen:
                return True
    return False


def _collect_samples(evidence: CauseEvidence) -> Mapping[int, Mapping[int, Samples]]:
    """Collect the job's samples of its weights: by rank, by the number of steps before them, by parameter and place."""
    by_rank: dict[int, dict[int, dict[tuple[str, int], Sequence[float]]]] = {}
    for compared in evidence.passes:
        recorded = compared.recorded
        if recorded.num_steps_before is not None:
            by_step = by_rank.setdefault(recorded.rank or 0, {})
            samples = by_step.setdefault(recorded.num_steps_before, {})
            samples.update({(sample.name, sample.start): sample.values for sample in recorded.samples})
    return by_rank


def find_other_update(evidence: CauseEvidence) -> Cause | None:
    """Tell that a step moved the weights otherwise than its gradient and its settings do."""
    wrong = evidence.find_wrong(STEPPED)
    if wrong is None or wrong[0] is not evidence.first_wrong:
        return None
    if evidence.settings.has_other_trained_parameters:
        # A step moves what is trained, so that tells the difference. The rules of the model name the parameter.
        return None
    verdict, finding = wrong
    samples = _list_stepped(evidence, verdict)
    still, names = _split_still(evidence, verdict)
    if still and len(still) < len(names):
        patterns = format_patterns(sorted(still), sorted(names))
        # Gradients are recorded when they are clipped, if they are. The loop may drop some between that and the step.
        window = evidence.find_window(verdict) or ()
        is_clipped = any(step.max_norm is not None for step in list_steps(window))
        return Cause(
            name=CauseName.OPTIMIZER,
            sureness=Sureness.PROBABLY,
            sentence=f"no step of the job moves {name_some(patterns, 3)}, {name_time(verdict)}: the "
            f"job's optimizer does not hold {'it' if len(still) == 1 else 'them'}"
            f"{', or the gradient was gone between the clipping and the step' if is_clipped else ''}",
            try_next="make the optimizer after all that makes new parameters (resize_token_embeddings, "
            f"load_state_dict(assign=True), fully_shard){'; keep .grad until the step' if is_clipped else ''}",
            explains=(STEPPED, *EXPLAINED),
        )
    steps = evidence.settings.stepping_actor
    if steps is not None and steps.custom_optimizer is not None:
        return Cause(
            name=CauseName.OPTIMIZER,
            sureness=Sureness.PROBABLY,
            sentence=f"the gradient is the job's, and the weights after it are not, {name_time(verdict)}"
            f"{'' if finding.where is None else f' ({finding.where})'}: the job's optimizer does not step as "
            f"{steps.optimizer} does, or something besides it changed them",
            try_next="hold what the job's class does in its first step against the class that your function builds",
            explains=(STEPPED, *EXPLAINED),
        )
    if num_shared := max(map(_count_shared_parameters, list_steps(evidence.find_window(verdict) or ())), default=0):
        return Cause(
            name=CauseName.OPTIMIZER,
            sureness=Sureness.PROBABLY,
            sentence=f"two optimizers of the job hold {pluralise(num_shared, 'parameter')} both, and each step moves "
            f"what both hold twice, {name_time(verdict)}",
            try_next="give each parameter to one optimizer",
            explains=(STEPPED, *EXPLAINED),
        )
    if (
        cause := _find_average(evidence, verdict)
        or _find_scaled_step(evidence, verdict, samples)
        or _find_decay(verdict, samples)
    ) is not None:
        return cause
    drifts = [drift.excess for sample in samples if (drift := measure_drift(sample)) is not None]
    if drifts and sorted(drifts)[len(drifts) // 2] > OTHER_MASTERS:
        return Cause(
            name=CauseName.WEIGHTS_CHANGED,
            sureness=Sureness.PROBABLY,
            sentence=f"the job has other weights behind the step, {name_time(verdict)}: most of {len(drifts)} samples "
            "are off by many times what a step moves them, so other weights than the pass had were stepped or put in",
            try_next="load weights before the optimizer or the engine is made, which keeps fp32 copies of its own",
            explains=(STEPPED, *EXPLAINED),
        )
    return Cause(
        name=CauseName.WEIGHTS_CHANGED,
        sureness=Sureness.PROBABLY,
        sentence=f"the gradient is the job's, and the weights after it are not, {name_time(verdict)}"
        f"{'' if finding.where is None else f' ({finding.where})'}: something besides the optimizer changed them, or "
        "clipped the gradient otherwise",
        try_next="look for weights that are loaded, averaged, tied or clipped by hand behind the step",
        explains=(STEPPED, *EXPLAINED),
    )


def _find_average(evidence: CauseEvidence, verdict: PassVerdict) -> Cause | None:
    """Name the average of the job's earlier weights that it has behind the step, as an EMA that was left in is one.

    Weights add up to 1 in an average, so the differences from the first weights are a sum of their differences.
    """
    window = evidence.find_window(verdict)
    if not window or (number := window[0].recorded.num_steps_before) is None or number < 1:
        return None
    by_step = _collect_samples(evidence).get(window[0].recorded.rank or 0, {})
    if not all(step in by_step for step in range(number + 1)):
        return None
    stepped = {
        (sample.name, sample.start): sample
        for compared in evidence.passes
        if compared.recorded.num_steps_before == number + 1 and compared.recorded.rank == window[0].recorded.rank
        for sample in compared.replayed.weights_before_pass
    }
    keys = [key for key in stepped if all(key in by_step[step] for step in range(number + 1))]
    columns = [[value for key in keys for value in by_step[step][key]] for step in range(number + 1)]
    columns.append([value for key in keys for value in stepped[key].replay_values])
    job = [value for key in keys for value in stepped[key].job_values]
    if len(job) < LEAST_ELEMENTS * number or any(len(column) != len(job) for column in columns):
        return None
    [first_N, *others] = [torch.tensor(column, dtype=torch.float64) for column in columns]
    job_N = torch.tensor(job, dtype=torch.float64) - first_N
    moved_NS = torch.stack([other_N - first_N for other_N in others], dim=1)
    shares_S = torch.linalg.lstsq(moved_NS, job_N).solution
    wrong = float((job_N - moved_NS[:, -1]).norm())
    shares = [1.0 - float(shares_S.sum()), *shares_S.tolist()]
    # A step of another size is a sum of the weights before it and behind it alone.
    has_earlier = any(share > MAX_RESIDUAL for share in shares[:-2])
    is_average = has_earlier and all(-MAX_RESIDUAL <= share <= 1 for share in shares)
    if not is_average or float((job_N - moved_NS @ shares_S).norm()) > MAX_RESIDUAL * wrong:
        return None
    parts = [f"{share:.3g} of those before step {step + 1}" for step, share in enumerate(shares[:-1])]
    parts.append(f"{shares[-1]:.3g} of those that the step gives")
    return Cause(
        name=CauseName.WEIGHTS_CHANGED,
        sureness=Sureness.PROBABLY,
        sentence=f"the weights behind {verdict.window_name} are an average of its earlier ones: {name_some(parts, 4)}",
        try_next="look for averaged weights (EMA) that are put in for an evaluation or a checkpoint, and not taken out",
        explains=(STEPPED, *EXPLAINED),
    )


def _find_scaled_step(evidence: CauseEvidence, verdict: PassVerdict, samples: Sequence[SteppedSample]) -> Cause | None:
    """Say by which factor a step moves all weights, if it is one; a loss scale that left too late gives its inverse."""
    job_N, replay_N = (
        torch.tensor(
            [
                value - initial
                for sample in samples
                for value, initial in zip(getattr(sample, name), sample.initial_values, strict=True)
            ],
            dtype=torch.float64,
        )
        for name in ("job_values", "replay_values")
    )
    size = float(replay_N.square().sum())
    if len(job_N) < LEAST_ELEMENTS or not size:
        return None
    times = float(job_N @ replay_N) / size
    # A small step moves a weight by a few of the numbers that fp32 has there.
    rounding = FP32_SPACING * math.hypot(*(value for sample in samples for value in sample.initial_values))
    residual = float((job_N - times * replay_N).norm())
    is_scaled = times > 0 and residual <= MAX_RESIDUAL * float(job_N.norm()) + rounding < 0.5 * float(job_N.norm())
    if not is_scaled or abs(times - 1) <= MAX_RESIDUAL:
        return None
    window = evidence.find_window(verdict) or ()
    has_scale = bool(window) and all(compared.recorded.has_job_weights_of_tokens for compared in window)
    is_clipped = any(step.max_norm is not None for step in list_steps(window))
    scale = sum_loss_weights(window)
    if has_scale and is_clipped and abs(times * scale - 1) <= MAX_RESIDUAL + rounding / float(job_N.norm()):
        return Cause(
            name=CauseName.CLIPPED_EARLY,
            sureness=Sureness.PROBABLY,
            sentence=f"gradients are clipped before they are unscaled, {name_time(verdict)}: the loss is multiplied by "
            f"{scale:.6g}, and the step moves the weights by the clipped gradient divided by {scale:.6g}",
            try_next="unscale the gradients (scaler.unscale_(optimizer)) before they are clipped",
            explains=(STEPPED, *EXPLAINED),
        )
    return Cause(
        name=CauseName.WEIGHTS_CHANGED,
        sureness=Sureness.PROBABLY,
        sentence=f"the step moves all weights {times:.4g} times as far as the gradient and the settings that were "
        f"recorded, {name_time(verdict)}",
        try_next="look for what multiplies gradients, the rate or the update between the clipping and the step",
        explains=(STEPPED, *EXPLAINED),
    )


def _count_shared_parameters(step: OptimizerStep) -> int:
    """Count the parameters that several groups of a step hold: several optimizers, since one refuses that."""
    counts = Counter(number for group in step.settings for number in set(parse_numbers(group.get("parameters", ""))))
    return sum(count > 1 for count in counts.values())


def _find_decay(verdict: PassVerdict, samples: Sequence[SteppedSample]) -> Cause | None:
    """Say by which factor the job multiplies weights besides the step, if it does so: it decays them by hand, say.

    The factor may act on some parameters alone, before the step or behind it.
    """
    elements = [
        (sample.name, job - replay, weight, replay)
        for sample in samples
        for job, replay, weight in zip(sample.job_values, sample.replay_values, sample.initial_values, strict=True)
    ]
    moved_names = {name for name, moved, weight, _ in elements if abs(moved) > 8 * FP32_SPACING * abs(weight)}
    moved_N, *bases = (
        torch.tensor([element[place] for element in elements if element[0] in moved_names], dtype=torch.float64)
        for place in (1, 2, 3)
    )
    if len(moved_N) < LEAST_ELEMENTS:
        return None
    fits = []
    for base_N in bases:
        share = float(moved_N @ base_N) / float(base_N.square().sum() or 1.0)
        fits.append((float((moved_N - share * base_N).norm()), share, float(base_N.norm())))
    residual, share, size = min(fits)
    if residual > MAX_RESIDUAL * float(moved_N.norm()) + FP32_SPACING * size:
        return None
    names = name_some(format_patterns(sorted(moved_names), sorted({name for name, *_ in elements})), 3)
    return Cause(
        name=CauseName.WEIGHTS_CHANGED,
        sureness=Sureness.PROBABLY,
        sentence=f"the job multiplies {names} by {1 + share:.6g} besides the step, {name_time(verdict)}",
        try_next="look for a weight decay by hand, or one of another code, beside the optimizer's own",
        explains=(STEPPED, *EXPLAINED),
    )


def _list_stepped(evidence: CauseEvidence, verdict: PassVerdict) -> list[SteppedSample]:
    """List the samples of the weights behind the replay's first step, if this is a verdict on it; else none."""
    window = evidence.find_window(verdict)
    if window is None or window[0].record.result.num_steps:
        return []
    return [
        sample
        for compared in evidence.passes
        if compared.record.result.num_steps == 1
        for sample in compared.replayed.weights_before_pass
    ]


def _split_still(evidence: CauseEvidence, verdict: PassVerdict) -> tuple[set[str], set[str]]:
    """Name the parameters of fp32 that no step of the job moves and this one of the replay does, and all sampled ones.

    A parameter may be sampled behind other steps only: those that the step moves are seen behind later ones, too.
    """
    window = evidence.find_window(verdict)
    if window is None:
        return set(), set()
    moved, still, names = set[str](), set[str](), set[str]()
    for compared in evidence.passes:
        is_behind = compared.record.result.num_steps > window[0].record.result.num_steps
        for sample in compared.replayed.weights_before_pass:
            triples = list(zip(sample.job_values, sample.replay_values, sample.initial_values, strict=True))
            if sample.dtype != "float32" or any(job != initial for job, _, initial in triples):
                moved.add(sample.name)
            elif is_behind and all(replay != initial for _, replay, initial in triples):
                still.add(sample.name)
            # What is frozen is still here, too.
            if is_behind and any(job != initial or replay != initial for job, replay, initial in triples):
                names.add(sample.name)
    return still - moved, names


RULES = (
    CauseRule(
        name=CauseName.OTHER_WEIGHTS,
        find=find_other_weights,
        means="the replay does not run on the weights that the job had",
        told_by="samples of the weights in the capture",
        job="still-one-weight",
    ),
    CauseRule(
        name=CauseName.OTHER_WEIGHTS,
        find=find_ranks_with_other_weights,
        means="ranks that hold whole models began with other weights",
        told_by="samples of the weights on each rank",
        job="ddp-loaded-on-one-rank",
    ),
    CauseRule(
        name=CauseName.WEIGHTS_CHANGED,
        find=find_weights_of_earlier_step,
        means="the job's weights went back to those of an earlier step",
        told_by="samples of the weights before each step",
        job="trainer-weights-reloaded",
    ),
    CauseRule(
        name=CauseName.WEIGHTS_CHANGED,
        find=find_changed_frozen_weights,
        means="frozen weights are other ones after a step",
        told_by="samples of frozen weights after each step",
        job="frozen-weights-rounded",
    ),
)
STEP_RULES = (
    CauseRule(
        name=CauseName.WEIGHTS_CHANGED,
        find=find_other_update,
        means="a step moved the weights otherwise than its gradient and its settings do",
        told_by="the weights after each step, in the job and in the replay",
        job="average-swapped-in",
    ),
)
