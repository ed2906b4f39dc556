"""Say beside the verdict that a job's training was probably not what was meant: no steps, or labels shifted twice.

note       trained: no optimizer step was recorded in 6 training passes, and none of 21 sampled parameters moved: ...

Such a job can be reproduced all the same: the replay computes the same passes, and no number tells what they were meant
to train.
"""

from collections.abc import Sequence

from capture.file_format.optimizer_step import OptimizerStep, Sample
from replay.output.text import Pairs, name_some, pluralise
from replay.runlog.records import PassRecord
from replay.tolerances.difference import relative_difference
from replay.tolerances.job_bounds import LOSS
from replay.verdict.judge import PassEvidence
from replay.verdict.optimizer_facts import find_facts_of_ranks
from replay.verdict.outcomes import Outcome, PassVerdict, Verdict
from replay.verdict.pass_windows import group_into_windows
from replay.verdict.rank_weights import have_same_weights_after
from replay.verdict.recorded_pass import MOVED, NEXT_TOKENS, WEIGHTS_OF_RANKS, RecordedPass, match_parameter_name
from replay.verdict.step_remarks import (
    has_only_emptied_gradients,
    holds_no_trained_parameter,
    list_step_remarks,
)

LABEL = "trained"
# A relative difference: averaged gradients are equal on all ranks, but may have been added up in another order.
SAME_ON_RANKS = 1e-3
# Passes whose numbers of tokens are no further apart are as good as equal.
UNEQUAL_NUMBERS = 0.05


def list_training_remarks(passes: Sequence[PassEvidence], verdict: Verdict, *, is_whole: bool) -> Pairs:
    """List what the job's training lacks; nothing where the recording tells nothing of steps.

    is_whole  these are all passes of the recording, so that a step that is not among them was not seen
    """
    recorded_passes = [recorded for _, recorded, _ in passes if recorded is not None]
    # The verdict has reported already that a single step moved no weight.
    is_told = any(finding.name == MOVED for window in verdict.windows for finding in window.findings)
    remarks = list_step_remarks(recorded_passes, is_whole=is_whole, is_stillness_told=is_told)
    steps = [(LABEL, remark) for remark in remarks]
    # What ranks that began with other weights differ in besides follows from that.
    began_apart = any(finding.name == WEIGHTS_OF_RANKS for window in verdict.windows for finding in window.findings)
    of_ranks = [] if began_apart else compare_ranks(passes) or compare_forwards_of_ranks(passes, verdict.passes)
    return [
        *_check_labels(verdict),
        *of_ranks,
        *steps,
        *_check_optimizer_state(passes),
    ]


def _check_optimizer_state(passes: Sequence[PassEvidence]) -> Pairs:
    """Say so where the optimizer's own count of steps is not that of the steps that were recorded."""
    recorded_passes = [recorded for _, recorded, _ in passes if recorded is not None]
    facts = find_facts_of_ranks(recorded_passes)
    # An optimizer that steps nothing, or is given no gradient, has lost no state.
    if not facts or holds_no_trained_parameter(recorded_passes) or has_only_emptied_gradients(recorded_passes):
        return []
    others = f", and {pluralise(len(facts) - 1, 'more such fact')}" if facts[1:] else ""
    return [("optimizer", f"{facts[0].describe()}{others}")]


def describe_weighting(passes: Sequence[PassEvidence]) -> Pairs:
    """Say so where each pass weighed the same here, as in the job, though they have other numbers of tokens."""
    ran = [member for member in passes if member.recorded is not None and member.record.error is None]
    for window in group_into_windows(ran):
        numbers = [recorded.num_tokens for _, recorded, _ in window if recorded is not None]
        # A loss of the job's own weights of tokens is a sum that these weights have made already.
        has_own_weights = any(recorded.has_job_weights_of_tokens for _, recorded, _ in window if recorded is not None)
        has_equal = len(window) > 1 and all(record.result.weight == 1 for record, _, _ in window)
        has_equal &= not has_own_weights
        is_whole = window[-1].record.result.grad_norm is not None
        if is_whole and has_equal and min(numbers) and max(numbers) / min(numbers) > 1 + UNEQUAL_NUMBERS:
            times = max(numbers) / min(numbers)
            few, many = (window[numbers.index(number)].record for number in (min(numbers), max(numbers)))
            light, heavy = (_name_pass(record, window) for record in (many, few))
            by_tokens = f"a token of {heavy} weighs {times:.3g} times as much as one of {light}"
            text = f"each pass weighs the same, as in the job, whatever its tokens: {by_tokens}"
            return [("note", f"window: {text}. Short micro-batches weigh more per token")]
    return []


def _name_pass(record: PassRecord, window: Sequence[PassEvidence]) -> str:
    has_ranks = len({other.rank for other, _, _ in window}) > 1
    return f"pass {record.index + 1}" + (f" of rank {record.rank}" if has_ranks else "")


def compare_ranks(passes: Sequence[PassEvidence]) -> Pairs:
    """Say so where two ranks of the job that hold whole models had other weights, or other gradients, at one step."""
    whole = [
        recorded
        for _, recorded, _ in passes
        if recorded is not None and not recorded.weight_comparison.is_sharded and recorded.num_steps_before is not None
    ]
    steps = [(recorded, recorded.step_after) for recorded in whole if recorded.step_after is not None]
    weights = _find_difference_of_ranks([(recorded, recorded.samples) for recorded in whole], least=0.0)
    gradients = _find_difference_of_ranks(
        [(recorded, step.gradients.samples) for recorded, step in steps if step.gradients is not None],
        least=SAME_ON_RANKS,
    )
    gradients = min(filter(None, (gradients, _find_other_norms(steps))), default=None)
    is_averaged = gradients is not None and have_same_weights_after(whole, gradients[0] - 1)
    when = "gradients, and the same weights after it, in" if is_averaged else "gradients, which were not averaged, in"
    differences = [("weights before", weights), (when, gradients)]
    by_step = sorted((difference[0], what, difference[1]) for what, difference in differences if difference is not None)
    return [("ranks", f"the job's ranks had different {what} step {step}: {text}") for step, what, text in by_step]


def compare_forwards_of_ranks(passes: Sequence[PassEvidence], judged_passes: Sequence[PassVerdict]) -> Pairs:
    """Say so where at the first wrong step every forward of some ranks is wrong, and none of the other ranks'."""
    verdicts = {(judged.index, judged.rank): judged for judged in judged_passes}
    is_wrong: dict[int, dict[int, set[bool]]] = {}
    for record, recorded, _ in passes:
        judged = verdicts.get((record.index, record.rank))
        if recorded is None or recorded.rank is None or recorded.num_steps_before is None or judged is None:
            continue
        findings = [finding for finding in judged.findings if finding.is_evidence]
        if (
            findings
            and not recorded.weight_comparison.is_sharded
            and judged.outcome in (Outcome.DIFFERS, Outcome.REPRODUCED)
        ):
            by_rank = is_wrong.setdefault(recorded.num_steps_before, {})
            by_rank.setdefault(recorded.rank, set()).add(judged.outcome is Outcome.DIFFERS)
    first = next((step for step in sorted(is_wrong) if {True} in is_wrong[step].values()), None)
    if first is None or {False} not in is_wrong[first].values() or {True, False} in is_wrong[first].values():
        return []
    wrong = [f"rank {rank}" for rank, answers in sorted(is_wrong[first].items()) if answers == {True}]
    text = (
        f"before step {first + 1} the forwards of {name_some(wrong, 3)} differ and those of the other ranks do not: "
        "did every rank begin with the same weights? Broadcast them from rank 0"
    )
    return [("ranks", text)]


def _find_other_norms(steps: Sequence[tuple[RecordedPass, OptimizerStep]]) -> tuple[int, str] | None:
    """Find the first gradient of a whole parameter whose norm is another one on two ranks, as samples are found."""
    seen: dict[tuple[int, str], tuple[int | None, float]] = {}
    for recorded, step in steps:
        compared = set(recorded.weight_comparison.compared)
        for signature in step.signatures:
            if signature.is_part or match_parameter_name(signature.name, compared) is None:
                continue
            rank, norm = seen.setdefault((step.number, signature.name), (recorded.rank, signature.norm))
            if relative_difference(norm, signature.norm) > SAME_ON_RANKS:
                norms = f"{norm:.6g} on rank {rank} and {signature.norm:.6g} on rank {recorded.rank}"
                return step.number + 1, f"that of {signature.name} has a norm of {norms}"
    return None


def _find_difference_of_ranks(
    samples: Sequence[tuple[RecordedPass, Sequence[Sample]]], *, least: float
) -> tuple[int, str] | None:
    """Find the first element that two ranks sampled at the same step and that is not the same.

    Returns the number of the step, from 1 on, and the element with both values.

    least  a relative difference up to which elements are the same
    """
    seen: dict[tuple[int | None, str, int], tuple[int | None, Sequence[float]]] = {}
    for recorded, rank_samples in samples:
        # A rank that held a slice of a parameter has other elements. Its shape is not this model's, so it was not
        # compared with this model's parameter either.
        compared = set(recorded.weight_comparison.compared)
        for sample in rank_samples:
            if match_parameter_name(sample.name, compared) is None:
                continue
            key = (recorded.num_steps_before, sample.name, sample.start)
            rank, values = seen.setdefault(key, (recorded.rank, sample.values))
            pairs = enumerate(zip(values, sample.values, strict=False))
            position = next((position for position, pair in pairs if relative_difference(*pair) > least), None)
            if rank != recorded.rank and position is not None:
                first, second = _format_apart(values[position], sample.values[position])
                text = (
                    f"{sample.name}, element {sample.start + position}, is {first} on rank {rank} and {second} on rank "
                    f"{recorded.rank}"
                )
                return (recorded.num_steps_before or 0) + 1, text
    return None


def _format_apart(first: float, second: float) -> tuple[str, str]:
    """Return two numbers with six digits, or as many more as show that they differ. Seventeen tell all doubles."""
    texts = ((f"{first:.{digits}g}", f"{second:.{digits}g}") for digits in range(6, 18))
    return next((pair for pair in texts if pair[0] != pair[1]), (f"{first:.6g}", f"{second:.6g}"))


def _check_labels(verdict: Verdict) -> Pairs:
    """Say so where the job's loss is that of labels which were shifted once more than they should be."""
    doubts = [
        finding.doubt
        for judged_pass in verdict.passes
        for finding in judged_pass.findings
        if finding.name == LOSS and finding.agrees
    ]
    if not any(doubt is not None and doubt.startswith(NEXT_TOKENS) for doubt in doubts):
        return []
    return [
        ("labels", f"{NEXT_TOKENS}, and the model shifted them once more: each token predicts the one after the next")
    ]
