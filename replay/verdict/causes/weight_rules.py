"""Tell when the replay did not run on the weights that the job had."""

from collections.abc import Sequence

from capture.file_format.name_patterns import format_patterns
from replay.output.text import name_some, pluralise
from replay.tolerances.job_bounds import STEPPED
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.evidence import CauseRule, Evidence, name_time
from replay.verdict.causes.step_rules import EXPLAINED
from replay.verdict.gradient_findings import list_steps
from replay.verdict.outcomes import OTHER_WEIGHTS, Outcome, PassVerdict
from replay.verdict.pass_values import SteppedSample
from replay.verdict.stepped_weights import measure_drift
from replay.verdict.weight_movement import are_same, did_most_move

# Half of the parameters off by so many times what a step moved them.
OTHER_MASTERS = 4.0


def find_other_weights(evidence: Evidence) -> Cause | None:
    """Name the weights that are not the job's, if that keeps every pass from being judged."""
    judged = [verdict for verdict in evidence.verdicts if verdict.outcome is not Outcome.CANNOT_TELL]
    other = next(iter(evidence.verdicts), None)
    # Later passes have other weights in any job whose steps are not replayed, so the first pass decides.
    if judged or other is None or other.reason != OTHER_WEIGHTS:
        return None
    weights = next(compared.weights for compared in evidence.passes if compared.weights.differing)
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
    option = "--weights" if evidence.settings.is_custom else "--model"
    return Cause(
        name=CauseName.OTHER_WEIGHTS,
        sureness=Sureness.IS,
        sentence=f"the replay runs on other weights than pass {other.index + 1} did{of_step}: "
        f"{name_some(patterns, 2)} {'differs' if len(weights.differing) == 1 else 'differ'}{element}{why_random}",
        try_next=f"{check_loading}{option} FOLDER, with the weights that the job had before this pass",
    )


def find_weights_of_earlier_step(evidence: Evidence) -> Cause | None:
    """Tell that the job went back to weights that it had before: they were loaded again in the midst of training."""
    if evidence.first_wrong is None:
        return None
    by_rank: dict[int, dict[int, dict[tuple[str, int], Sequence[float]]]] = {}
    for compared in evidence.passes:
        recorded = compared.recorded
        if recorded.num_steps_before is not None:
            by_step = by_rank.setdefault(recorded.rank or 0, {})
            samples = by_step.setdefault(recorded.num_steps_before, {})
            samples.update({(sample.name, sample.start): sample.values for sample in recorded.samples})
    for by_step in by_rank.values():
        steps = sorted(by_step)
        for place, step in enumerate(steps[2:], start=2):
            earlier = next((old for old in steps[: place - 1] if are_same(by_step[old], by_step[step])), None)
            # Weights that never moved are no sign of it.
            if earlier is not None and did_most_move(by_step[earlier], by_step[steps[place - 1]]):
                return Cause(
                    name=CauseName.WEIGHTS_CHANGED,
                    sureness=Sureness.IS,
                    sentence=f"the job's weights before step {step + 1} are again those before step {earlier + 1}: "
                    "they were loaded or copied back",
                    try_next="look for what loads or copies weights between these steps",
                    explains=(STEPPED, *EXPLAINED),
                )
    return None


def find_other_update(evidence: Evidence) -> Cause | None:
    """Tell that a step moved the weights otherwise than its gradient and its settings do."""
    wrong = evidence.find_wrong(STEPPED)
    if wrong is None or wrong[0] is not evidence.first_wrong:
        return None
    verdict, finding = wrong
    samples = _list_stepped(evidence, verdict)
    still = {sample.name for sample in samples if _stays_still(sample)}
    if still and len(still) < len({sample.name for sample in samples}):
        patterns = format_patterns(sorted(still), [sample.name for sample in samples])
        # Gradients are recorded when they are clipped, if they are. The loop may drop some between that and the step.
        window = evidence.find_window(verdict) or ()
        is_clipped = any(step.max_norm is not None for step in list_steps(window))
        return Cause(
            name=CauseName.OPTIMIZER,
            sureness=Sureness.PROBABLY,
            sentence=f"no step of the job moves {name_some(patterns, 3)}, {name_time(verdict)}: its optimizer was not "
            f"given what has a gradient there{', or had lost the gradient since the clipping' if is_clipped else ''}",
            try_next="make the optimizer after all that makes new parameters (resize_token_embeddings, "
            f"load_state_dict(assign=True), fully_shard){'; keep .grad until the step' if is_clipped else ''}",
            explains=(STEPPED, *EXPLAINED),
        )
    steps = evidence.settings.steps
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


def _list_stepped(evidence: Evidence, verdict: PassVerdict) -> list[SteppedSample]:
    """List the samples of the weights behind the replay's first step, if this is a verdict on it; else none."""
    window = evidence.find_window(verdict)
    if window is None or window[0].record.result.num_steps:
        return []
    return [
        sample
        for compared in evidence.passes
        if compared.record.result.num_steps == 1
        for sample in compared.replayed.stepped
    ]


def _stays_still(sample: SteppedSample) -> bool:
    """Tell whether the job's step left weights of fp32 as they were that the replay's moved, each of them."""
    triples = zip(sample.job_values, sample.replay_values, sample.initial_values, strict=True)
    return sample.dtype == "float32" and all(job == initial != replay for job, replay, initial in triples)


RULES = (
    CauseRule(
        name=CauseName.OTHER_WEIGHTS,
        find=find_other_weights,
        means="the replay does not run on the weights that the job had",
        told_by="samples of the weights in the capture",
        job="still-one-weight",
    ),
    CauseRule(
        name=CauseName.WEIGHTS_CHANGED,
        find=find_weights_of_earlier_step,
        means="the job's weights went back to those of an earlier step",
        told_by="samples of the weights before each step",
        job="trainer-weights-reloaded",
    ),
)
STEP_RULES = (
    CauseRule(
        name=CauseName.WEIGHTS_CHANGED,
        find=find_other_update,
        means="a step moved the weights otherwise than its gradient and its settings do",
        told_by="the weights behind each step, in the job and in the replay",
        job="average-swapped-in",
    ),
)
