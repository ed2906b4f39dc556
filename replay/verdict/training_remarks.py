"""Say beside the verdict that a job's training was probably not what was meant: no steps, or labels shifted twice.

trained    no optimizer step was recorded in 6 training passes, and none of 21 sampled parameters moved: ...

Such a job can be reproduced all the same: the replay computes the same passes, and no number tells what they were meant
to train.
"""

from collections.abc import Sequence
from itertools import combinations

from capture.file_format.optimizer_step import OptimizerStep, Sample
from replay.output.text import Pairs, pluralise
from replay.tolerances.difference import relative_difference
from replay.tolerances.job_bounds import LOSS, SAME_SHARES
from replay.verdict.judge import PassEvidence
from replay.verdict.optimizer_facts import count_stepped_parameters, find_facts_of_ranks
from replay.verdict.outcomes import Verdict
from replay.verdict.pass_values import MOVED, NEXT_TOKENS, RecordedPass, match_parameter_name

LABEL = "trained"
# A relative difference: averaged gradients are equal on all ranks, but may have been added up in another order.
SAME_ON_RANKS = 1e-3
# So many shares of a window are shown.
MAX_SHARES = 8


def list_training_remarks(passes: Sequence[PassEvidence], verdict: Verdict, *, is_whole: bool) -> Pairs:
    """List what the job's training lacks; nothing where the recording tells nothing of steps.

    is_whole  these are all passes of the recording, so that a step that is not among them was not seen
    """
    steps = [(LABEL, remark) for remark in _check_steps(passes, verdict, is_whole=is_whole)]
    return [
        *_check_labels(verdict),
        *_compare_ranks(passes),
        *_check_weighting(passes),
        *steps,
        *_check_optimizer_state(passes),
    ]


def _check_optimizer_state(passes: Sequence[PassEvidence]) -> Pairs:
    """Say so where the optimizer's own count of steps is not that of the steps that were recorded."""
    steps_by_rank: dict[int | None, list[OptimizerStep]] = {}
    for _, recorded, _ in passes:
        if recorded is not None and recorded.step_after is not None:
            steps_by_rank.setdefault(recorded.rank, []).append(recorded.step_after)
    facts = find_facts_of_ranks(steps_by_rank.values())
    if not facts:
        return []
    others = f", and {pluralise(len(facts) - 1, 'more such fact')}" if facts[1:] else ""
    return [("optimizer", f"{facts[0].describe()}{others}")]


def _check_weighting(passes: Sequence[PassEvidence]) -> Pairs:
    """Say so where each pass weighed the same here, as in the job, though they have other numbers of tokens."""
    window: list[tuple[float, int]] = []
    for record, recorded, _ in passes:
        if recorded is None or not recorded.trains or record.error is not None:
            continue
        window.append((record.result.weight, recorded.num_tokens))
        if record.result.grad_norm is None:
            continue
        total = sum(num_tokens for _, num_tokens in window)
        shares = [num_tokens / total for _, num_tokens in window] if total else []
        has_equal = len(window) > 1 and all(weight == 1 for weight, _ in window)
        if has_equal and any(abs(share - 1 / len(window)) > SAME_SHARES for share in shares):
            by_tokens = ", ".join(f"{share:.3g}" for share in shares[:MAX_SHARES])
            return [
                ("window", f"the means of passes are averaged, as in the job; by tokens they would weigh {by_tokens}")
            ]
        window = []
    return []


def _compare_ranks(passes: Sequence[PassEvidence]) -> Pairs:
    """Say so where two ranks of the job that hold whole models had other weights, or other gradients, at one step."""
    whole = [
        recorded
        for _, recorded, _ in passes
        if recorded is not None and not recorded.weights.is_sharded and recorded.num_steps_before is not None
    ]
    steps = [(recorded, recorded.step_after) for recorded in whole if recorded.step_after is not None]
    weights = _find_difference_of_ranks([(recorded, recorded.samples) for recorded in whole], least=0.0)
    gradients = _find_difference_of_ranks(
        [(recorded, step.gradients.samples) for recorded, step in steps if step.gradients is not None],
        least=SAME_ON_RANKS,
    )
    differences = [("weights before", weights), ("gradients, which were not averaged, in", gradients)]
    by_step = sorted((difference[0], what, difference[1]) for what, difference in differences if difference is not None)
    return [("ranks", f"the job's ranks had different {what} step {step}: {text}") for step, what, text in by_step]


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
        compared = set(recorded.weights.compared)
        for sample in rank_samples:
            if match_parameter_name(sample.name, compared) is None:
                continue
            key = (recorded.num_steps_before, sample.name, sample.start)
            rank, values = seen.setdefault(key, (recorded.rank, sample.values))
            pairs = enumerate(zip(values, sample.values, strict=False))
            position = next((position for position, pair in pairs if relative_difference(*pair) > least), None)
            if rank != recorded.rank and position is not None:
                text = (
                    f"{sample.name}, element {sample.start + position}, is {values[position]:.6g} on rank {rank} and "
                    f"{sample.values[position]:.6g} on rank {recorded.rank}"
                )
                return (recorded.num_steps_before or 0) + 1, text
    return None


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


def _check_steps(passes: Sequence[PassEvidence], verdict: Verdict, *, is_whole: bool) -> list[str]:
    by_forward = {
        (recorded.rank, recorded.forward): recorded
        for _, recorded, _ in passes
        if recorded is not None and recorded.trains and recorded.num_steps_before is not None
    }
    trained = list(by_forward.values())
    steps = [recorded.step_after for recorded in trained if recorded.step_after is not None]
    if steps:
        # The verdict has reported already that a single step moved no weight.
        is_reported = any(finding.name == MOVED for window in verdict.windows for finding in window.findings)
        remarks = (
            _check_learning_rate(steps),
            None if is_reported else _check_movement(trained, steps),
            _check_share(trained, steps),
        )
        return [remark for remark in remarks if remark is not None]
    has_stepped = any(recorded.num_steps_before for recorded in trained)
    return [_describe_missing_steps(trained)] if is_whole and len(trained) > 1 and not has_stepped else []


def _describe_missing_steps(trained: Sequence[RecordedPass]) -> str:
    text = f"no optimizer step was recorded in {pluralise(len(trained), 'training pass')}"
    moved, unmoved = _find_moved_parameters(trained)
    if moved:
        return f"{text}, though {moved[0]} moved: what stepped has other parameters than the model's own"
    if not unmoved:
        return text
    return (
        f"{text}, and none of {pluralise(len(unmoved), 'sampled parameter')} moved. Does the optimizer have the "
        "model's parameters? One that was made before fully_shard has others"
    )


def _check_learning_rate(steps: Sequence[OptimizerStep]) -> str | None:
    rates = [group.get("lr") for step in steps for group in step.settings]
    if not rates or any(rate != 0 for rate in rates):
        return None
    return f"the learning rate was 0 in {_describe_steps(steps)}"


def _check_movement(trained: Sequence[RecordedPass], steps: Sequence[OptimizerStep]) -> str | None:
    """Say so if no weight moved, not even one that was given a gradient, though the learning rate was not 0."""
    with_gradient = {sample.name for step in steps if step.gradients is not None for sample in step.gradients.samples}
    moved, unmoved = _find_moved_parameters(trained)
    if moved or not with_gradient.intersection(unmoved) or _check_learning_rate(steps) is not None:
        return None
    number = len({step.number for step in steps})
    return f"none of {pluralise(len(unmoved), 'sampled parameter')} moved in {pluralise(number, 'recorded step')}"


def _check_share(trained: Sequence[RecordedPass], steps: Sequence[OptimizerStep]) -> str | None:
    """Say so if each step was of fewer parameters than are trainable."""
    num_trainable = max(recorded.weights.num_parameters - recorded.num_frozen for recorded in trained)
    most = count_stepped_parameters(steps, num_trainable)
    if most is None:
        return None
    return f"the job's optimizer stepped {most} of {num_trainable} trainable parameters in {_describe_steps(steps)}"


def _describe_steps(steps: Sequence[OptimizerStep]) -> str:
    number = len({step.number for step in steps})
    return "the 1 recorded step" if number == 1 else f"all {number} recorded steps"


def _find_moved_parameters(trained: Sequence[RecordedPass]) -> tuple[list[str], list[str]]:
    """Name the parameters that were sampled before and after a step, or twice where no step was recorded.

    Returns those whose samples differ, and those whose samples are the same.
    """
    by_element: dict[tuple[int | None, str, int], list[tuple[int | None, Sequence[float]]]] = {}
    has_stepped = any(recorded.num_steps_before for recorded in trained)
    for recorded in trained:
        for sample in recorded.samples:
            values = by_element.setdefault((recorded.rank, sample.name, sample.start), [])
            values.append((recorded.num_steps_before, sample.values))
    moved: dict[str, None] = {}
    unmoved: dict[str, None] = {}
    for (_, name, _), samples in by_element.items():
        pairs = [pair for pair in combinations(samples, 2) if pair[0][0] != pair[1][0] or not has_stepped]
        if pairs:
            has_moved = any(before != after for (_, before), (_, after) in pairs)
            (moved if has_moved else unmoved)[name] = None
    return list(moved), [name for name in unmoved if name not in moved]
