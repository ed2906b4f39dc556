"""Say which of an optimizer's steps, rates and movements a recording lacks: no step, rate 0, weights that stay."""

from collections.abc import Sequence

from capture.file_format.optimizer_step import OptimizerStep
from replay.output.text import pluralise
from replay.verdict.optimizer_facts import count_stepped_parameters, keeps_state
from replay.verdict.recorded_pass import RecordedPass
from replay.verdict.weight_movement import find_moved_parameters


def list_step_remarks(passes: Sequence[RecordedPass], *, is_whole: bool, is_stillness_told: bool) -> list[str]:
    """List what the steps lack; nothing where the recording tells nothing of steps.

    is_whole           these are all passes of the recording, so that a step that is not among them was not seen
    is_stillness_told  it is said elsewhere that a step moved no weight
    """
    by_forward = {
        (recorded.rank, recorded.forward_number): recorded
        for recorded in passes
        if recorded.trains and recorded.num_steps_before is not None
    }
    trained = list(by_forward.values())
    steps = [recorded.step_after for recorded in trained if recorded.step_after is not None]
    if steps:
        remarks = (
            _check_learning_rate(steps),
            None if is_stillness_told else _check_movement(trained, steps),
            _check_share(trained, steps),
            _check_untaken(trained) if is_whole else None,
        )
        return [remark for remark in remarks if remark is not None]
    has_stepped = any(recorded.num_steps_before for recorded in trained)
    return [_describe_missing_steps(trained)] if is_whole and len(trained) > 1 and not has_stepped else []


def _describe_missing_steps(trained: Sequence[RecordedPass]) -> str:
    text = f"no optimizer step was recorded in {pluralise(len(trained), 'training pass')}"
    if any(recorded.tokens is not None and recorded.tokens.num_not_finite for recorded in trained):
        return f"{text}: gradients were not finite, and an engine or a scaler leaves out such a step"
    moved, unmoved = find_moved_parameters(trained)
    if moved:
        return f"{text}, though {moved[0]} moved: what stepped has other parameters than the model's own"
    if not unmoved:
        return text
    return (
        f"{text}, and none of {pluralise(len(unmoved), 'sampled parameter')} moved. Does the optimizer have the "
        "model's parameters? One that was made before fully_shard or load_state_dict(assign=True) has others"
    )


def _check_learning_rate(steps: Sequence[OptimizerStep]) -> str | None:
    rates = [group.get("lr") for step in steps for group in step.settings]
    if not rates or any(rate != 0 for rate in rates):
        return None
    return f"the learning rate was 0 in {_describe_steps(steps)}"


def _check_movement(trained: Sequence[RecordedPass], steps: Sequence[OptimizerStep]) -> str | None:
    """Say so if no weight moved, not even one that was given a gradient, though the learning rate was not 0."""
    with_gradient = {sample.name for step in steps if step.gradients is not None for sample in step.gradients.samples}
    moved, unmoved = find_moved_parameters(trained)
    if moved or not with_gradient.intersection(unmoved) or _check_learning_rate(steps) is not None:
        return None
    number = len({step.number for step in steps})
    return f"none of {pluralise(len(unmoved), 'sampled parameter')} moved in {pluralise(number, 'recorded step')}"


def holds_no_trained_parameter(passes: Sequence[RecordedPass]) -> bool:
    """Tell whether the optimizer holds none of the parameters that are trained: they have gradients, and never move.

    An optimizer makes its state for what has a gradient. One that has none after several steps got no gradient, or is
    made anew for each step, whose weights move.
    """
    steps = [recorded.step_after for recorded in passes if recorded.step_after is not None]
    if len({step.number for step in steps}) < 2 or not all(
        step.has_state is False and keeps_state(step) for step in steps
    ):
        return False
    with_gradient = {sample.name for step in steps if step.gradients is not None for sample in step.gradients.samples}
    moved, unmoved = find_moved_parameters(passes)
    return not moved and bool(with_gradient.intersection(unmoved)) and _check_learning_rate(steps) is None


def has_only_emptied_gradients(passes: Sequence[RecordedPass]) -> bool:
    """Tell whether losses were differentiated, and no parameter had a gradient at any step: all were emptied before."""
    steps = [recorded.step_after for recorded in passes if recorded.step_after is not None]
    return bool(steps) and all(
        step.without_gradient
        and not step.signatures
        and not (step.gradients is not None and step.gradients.samples)
        and any(step.shares)
        for step in steps
    )


def _check_share(trained: Sequence[RecordedPass], steps: Sequence[OptimizerStep]) -> str | None:
    """Say so if each step was of fewer parameters than are trainable."""
    num_trainable = max(recorded.weight_comparison.num_parameters - recorded.num_frozen for recorded in trained)
    most = count_stepped_parameters(steps, num_trainable)
    if most is None:
        return None
    return f"the job's optimizer stepped {most} of {num_trainable} trainable parameters in {_describe_steps(steps)}"


def _check_untaken(trained: Sequence[RecordedPass]) -> str | None:
    """Say so if more passes follow the last step than any step took: a job that was cut short leaves no more."""
    by_rank: dict[int | None, list[RecordedPass]] = {}
    for recorded in trained:
        by_rank.setdefault(recorded.rank, []).append(recorded)
    for passes in by_rank.values():
        ends = {recorded.forward_number or 0: step for recorded in passes if (step := recorded.step_after) is not None}
        most = max((len(step.passes) for step in ends.values()), default=0)
        untaken = sum(
            recorded.forward_number is not None and recorded.forward_number > max(ends, default=0)
            for recorded in passes
        )
        if untaken > most > 0:
            return (
                f"the last {untaken} of {pluralise(len(passes), 'training pass')} go into no step: the job took none "
                f"after step {len(ends)}, and at most {pluralise(most, 'pass')} went into one before. "
                "Is there a guard that leaves steps out?"
            )
    return None


def _describe_steps(steps: Sequence[OptimizerStep]) -> str:
    number = len({step.number for step in steps})
    return "the 1 recorded step" if number == 1 else f"all {number} recorded steps"
