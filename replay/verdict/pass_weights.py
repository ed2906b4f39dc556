"""Conclude from samples, of all passes together, whether each pass ran on the weights that the job had.

A capture samples a part of the weights. Passes between the same two optimizer steps ran on the same weights, so their
samples are put together; where the replay updates the weights too (--step), they follow from its steps.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace

from actor_init.declarations.backends import list_whole_backend
from replay.output.text import pluralise
from replay.tolerances.difference import is_coarse
from replay.verdict.findings import (
    Finding,
    FindingStatus,
    VerdictSettings,
    list_dtypes,
    report_miscounted_steps,
    report_settings_of_ranks,
    report_unmoved_weights,
    report_weights_of_ranks,
)
from replay.verdict.gradient_findings import (
    ComparedPass,
    explain_unjudged_gradient,
    list_step_differences,
)
from replay.verdict.optimizer_comparison import describe_difference_of_ranks, find_step_dtype
from replay.verdict.optimizer_facts import read_step_count
from replay.verdict.pass_windows import group_into_windows
from replay.verdict.rank_weights import find_ranks_that_began_apart
from replay.verdict.recorded_pass import RecordedPass, WeightComparison
from replay.verdict.stepped_weights import compare_stepped_weights
from replay.verdict.weight_movement import did_any_move


def merge_weight_samples(compared_passes: Sequence[ComparedPass]) -> list[ComparedPass]:
    """Give each pass the comparison of all samples that were taken of the weights it ran on.

    A capture has samples of some of a model's parameters, and each rank of a sharded job samples its own shards. So
    first merge what all passes on the same weights sampled. Then a pass may still lack a sample of a parameter that
    differed from the job's in another pass of the same model: `_infer_unsampled_parameters` concludes what it can.
    """
    recorded_passes = [compared_pass.recorded for compared_pass in compared_passes]
    keys = [_make_weights_key(recorded, number) for number, recorded in enumerate(recorded_passes)]
    passes_of: dict[Hashable, list[RecordedPass]] = {}
    for key, recorded in zip(keys, recorded_passes, strict=True):
        passes_of.setdefault(key, []).append(recorded)
    # A loop that steps copies of the parameters, such as fp32 masters of its own, moves them between passes of one step
    # count. Such a count tells nothing.
    miscounted = {key for key, members in passes_of.items() if did_any_move(members)}
    keys = [
        _make_weights_key(replace(recorded, num_steps_before=None), number) if key in miscounted else key
        for number, (key, recorded) in enumerate(zip(keys, recorded_passes, strict=True))
    ]
    by_key: dict[Hashable, list[WeightComparison]] = {}
    for key, compared_pass in zip(keys, compared_passes, strict=True):
        by_key.setdefault(key, []).append(compared_pass.recorded.weight_comparison)
    # A single comparison of a shard is merged too: merging adds a doubt if it sampled nothing.
    merged = {
        key: merge_comparisons(comparisons) if len(comparisons) > 1 or comparisons[0].is_sharded else comparisons[0]
        for key, comparisons in by_key.items()
    }
    differing: dict[int | None, list[tuple[int, str]]] = {}
    for key, compared_pass in zip(keys, compared_passes, strict=True):
        recorded = compared_pass.recorded
        in_model = differing.setdefault(_find_model_rank(recorded), [])
        in_model += [(recorded.forward_number or 0, name) for name in merged[key].differing]
    return [
        replace(
            compared_pass,
            weight_comparison=_infer_unsampled_parameters(
                merged[key],
                compared_pass.recorded.forward_number or 0,
                differing[_find_model_rank(compared_pass.recorded)],
            ),
        )
        for key, compared_pass in zip(keys, compared_passes, strict=True)
    ]


def _find_model_rank(recorded: RecordedPass) -> int | None:
    """Find the rank whose whole model a pass ran on; None where the ranks of the job shard one model."""
    return None if recorded.weight_comparison.is_sharded else recorded.rank


def _make_weights_key(recorded: RecordedPass, number: int) -> Hashable:
    """Make a key that is equal for passes on the same weights.

    Without a known optimizer step only the ranks of one forward of a sharded job share a key.
    """
    if recorded.num_steps_before is not None:
        return "step", _find_model_rank(recorded), recorded.num_steps_before
    return ("pass", recorded.forward_number) if recorded.weight_comparison.is_sharded else ("alone", number)


def _infer_unsampled_parameters(
    weights: WeightComparison, forward: int, differing: Sequence[tuple[int, str]]
) -> WeightComparison:
    """Conclude whether parameters that this pass did not sample, and that differ in other passes, differ in it too.

    A parameter that differed in an earlier pass differs in this pass too. But if this pass sampled any parameter that
    differs elsewhere, and found it to be the job's, then the job has moved its weights in between. That leaves a doubt,
    as a difference in a later pass does.

    forward    the number of this pass in the job
    differing  of the same model: the number of a pass, and the parameter that differed in it
    """
    unsampled = [(other_forward, name) for other_forward, name in differing if name not in weights.compared]
    if not unsampled or not weights.are_same:
        return weights
    earlier = tuple(dict.fromkeys(name for other_forward, name in unsampled if other_forward <= forward))
    if earlier and not any(name in weights.compared for _, name in differing):
        return replace(weights, differing=earlier)
    doubt = f"in another pass {unsampled[0][1]} is not the job's, and this one has no sample of it"
    return replace(weights, doubt=doubt)


def merge_comparisons(comparisons: Sequence[WeightComparison]) -> WeightComparison:
    """Merge what several passes sampled of the same weights."""
    doubt = next((weights.doubt for weights in comparisons if weights.doubt is not None), None)
    compared_names = tuple(dict.fromkeys(name for weights in comparisons for name in weights.compared))
    if doubt is None and not compared_names:
        doubt = "the ranks whose passes were replayed hold no samples of the job's sharded weights"
    return WeightComparison(
        compared=compared_names,
        differing=tuple(dict.fromkeys(name for weights in comparisons for name in weights.differing)),
        num_parameters=max(weights.num_parameters for weights in comparisons),
        first=next((weights.first for weights in comparisons if weights.first is not None), None),
        is_sharded=comparisons[0].is_sharded,
        doubt=doubt,
    )


def widen_bounds_after_rounded_step(
    passes: Sequence[tuple[int, RecordedPass]], settings: VerdictSettings
) -> VerdictSettings:
    """Give passes after a step that the optimizer rounds to a coarse dtype the bounds of that dtype.

    For this the settings get the dtype, and how many steps the job had taken before the first pass (`list_dtypes` reads
    both). They lose the step floors of the passes after the first step: two trainings that differ in rounding alone
    part in steps of that coarse rounding, so no floor holds. If the optimizer rounds no step, or the replay takes none,
    the settings are returned as they are.

    passes  the replay's index of each pass, and what the job recorded of it
    """
    steps = [recorded.step_after for _, recorded in passes if recorded.step_after is not None]
    step_dtype = find_step_dtype(steps)
    if step_dtype is None or not settings.follows_steps:
        return settings
    first = min((recorded.num_steps_before or 0 for _, recorded in passes), default=0)
    before = {index for index, recorded in passes if recorded.num_steps_before == first}
    step_floors = {index: floors for index, floors in settings.step_floors.items() if index in before}
    return replace(settings, step_dtype=step_dtype, num_steps_before=first, step_floors=step_floors)


def infer_weights_after_steps(compared_passes: Sequence[ComparedPass], settings: VerdictSettings) -> list[ComparedPass]:
    """Infer whether passes after a step of the replay ran on the job's weights, from the first window and the steps.

    Samples are compared with the weights that the replay starts from, so those of later passes tell nothing. Instead:
    where the first weights were the job's, they are the job's again after each step that equalled the job's step.
    A step whose gradient could not be judged may have been another one, and leaves a doubt. So does a step from which
    on the job trained other parameters than before: those that the replay trains stay the same.
    """
    windows = group_into_windows(compared_passes)
    if not windows:
        return list(compared_passes)
    initial = merge_comparisons([compared_pass.weight_comparison for compared_pass in windows[0]])
    steps = [window for window in windows if window[-1].record.result.has_stepped]
    reasons = [
        list_step_differences(window, settings, number) or explain_unjudged_gradient(window)
        for number, window in enumerate(steps)
    ]
    stepped = compare_stepped_weights(steps, compared_passes, settings)
    other_step = next((number for number, finding in stepped.items() if finding.status is FindingStatus.DIFFERS), None)
    by_end = {steps[number][-1].place: finding for number, finding in stepped.items()}
    in_steps = {
        (compared_pass.recorded.rank, number)
        for compared_pass in compared_passes
        if compared_pass.recorded.step_after is not None
        for number in compared_pass.recorded.step_after.passes
    }
    inferred = []
    for compared_pass in compared_passes:
        num_steps = compared_pass.record.result.num_steps
        change = _explain_changed_training(compared_pass.recorded, settings)
        if (finding := by_end.get(compared_pass.place)) is not None:
            compared_pass = replace(compared_pass, step_findings=[finding])
        if not num_steps and change is None:
            inferred.append(compared_pass)
            continue
        if change is None and other_step is not None and other_step < num_steps:
            differing = compared_pass.recorded.weight_comparison.differing or initial.compared
            inferred.append(replace(compared_pass, weight_comparison=replace(initial, differing=differing)))
            continue
        # Weights that agree after a step leave no doubt of the steps before.
        num_proven = max(
            (number + 1 for number in stepped if number < num_steps and stepped[number].is_evidence), default=0
        )
        doubt = next((step_reasons[0] for step_reasons in reasons[num_proven:num_steps] if step_reasons), None)
        other_count = _explain_step_count(compared_pass.recorded, windows[0], num_steps, in_steps)
        if other_count is not None and settings.steps_unasked:
            # The steps were followed no further, and the weights are those of an earlier step.
            differing = compared_pass.recorded.weight_comparison.differing or initial.compared
            inferred.append(
                replace(compared_pass, weight_comparison=replace(initial, differing=differing, doubt=other_count))
            )
            continue
        doubt = change or doubt or other_count
        if settings.why_no_floors is not None and is_coarse(list_dtypes(compared_pass.recorded, settings)):
            doubt = doubt or f"how far rounding takes two trainings apart is not known: {settings.why_no_floors}"
        weights = replace(initial, doubt=initial.doubt if doubt is None else doubt)
        inferred.append(replace(compared_pass, weight_comparison=weights))
    return inferred


def _explain_changed_training(recorded: RecordedPass, settings: VerdictSettings) -> str | None:
    """Say that the job trained other parameters by a pass than in its first one; None where it is not known to."""
    for difference in settings.model_differences:
        if difference.forward is not None and (recorded.forward_number or 0) >= difference.forward:
            why = f"{difference.where} is {difference.job} in the job, and the replay does not follow that"
            others = [] if settings.stepping_actor is None else list_whole_backend(settings.stepping_actor)
            return f"{why}. Try: --backend {others[0].value}" if others else why
    return None


def _explain_step_count(
    recorded: RecordedPass,
    first_window: Sequence[ComparedPass],
    num_steps: int,
    in_steps: Collection[tuple[int | None, int]],
) -> str | None:
    """Say that the job had taken another number of steps before a pass than the replay; None if it had not.

    That happens where some of the job's passes were not recorded, and where a pass is in no step: it is replayed last.

    in_steps  the rank and the number of each pass that a step of the job is known to have taken
    """
    initial_step = first_window[0].recorded.num_steps_before
    if (
        recorded.num_steps_before is None
        or initial_step is None
        or recorded.num_steps_before - initial_step == num_steps
    ):
        return None
    job_steps = pluralise(recorded.num_steps_before - initial_step, "step")
    number = recorded.forward_number
    if in_steps and number is not None and (recorded.rank, number) not in in_steps:
        steps = pluralise(num_steps, "step")
        return (
            f"no step of the job took this pass, so it was replayed last, after {steps}; in the job after {job_steps}"
        )
    return f"the job had taken {job_steps} before this pass, the replay {num_steps}"


def explain_unfollowed_steps(compared_passes: Sequence[ComparedPass]) -> list[ComparedPass]:
    """Say of passes with other weights, before which the job had stepped, that a replay without steps has not."""
    numbers = [each.recorded.num_steps_before for each in compared_passes if each.recorded.num_steps_before is not None]
    has_first = any(
        each.recorded.num_steps_before == min(numbers, default=0) and each.weight_comparison.are_same
        for each in compared_passes
    )
    explained = []
    for compared_pass in compared_passes:
        weights, num_steps = compared_pass.weight_comparison, compared_pass.recorded.num_steps_before
        if has_first and weights.differing and num_steps is not None and num_steps > min(numbers):
            doubt = f"the job had taken {pluralise(num_steps - min(numbers), 'step')} before this pass, the replay none"
            compared_pass = replace(compared_pass, weight_comparison=replace(weights, doubt=doubt))
        explained.append(compared_pass)
    return explained


def choose_weights_to_show(compared_passes: Sequence[ComparedPass]) -> WeightComparison | None:
    """Choose the weights to show: those of the first pass with other ones, else all passes' samples together."""
    comparisons = [compared_pass.weight_comparison for compared_pass in compared_passes]
    if not comparisons:
        return None
    other = next((weights for weights in comparisons if weights.first is not None), None)
    return merge_comparisons(comparisons) if other is None else other


def find_unmoved_weights(
    window: Sequence[ComparedPass], compared_passes: Sequence[ComparedPass], settings: VerdictSettings
) -> list[Finding]:
    """Report that the job's bf16 weights are the same after a step that had a gradient and a learning rate."""
    last = window[-1]
    step = last.recorded.step_after
    rate = max((float(group.get("lr", 0)) for group in step.settings), default=0.0) if step is not None else 0.0
    if step is None or step.gradients is None or not rate:
        return []
    has_gradient = any(value for sample in step.gradients.samples for value in sample.values)
    if not has_gradient or any(sample.dtype != "bfloat16" for sample in step.gradients.samples):
        return []
    next_step = (last.recorded.num_steps_before or 0) + 1
    next_pass = next(
        (compared_pass for compared_pass in compared_passes if compared_pass.recorded.num_steps_before == next_step),
        None,
    )
    if next_pass is None:
        return []
    # Both samples are compared with the weights that the replay began with: if both are the same, the job's did not
    # move. Where the replay steps, the weights of a pass are concluded from the steps, and not from its samples.
    before, after = last.weight_comparison, next_pass.weight_comparison
    if settings.follows_steps:
        before, after = (_merge_samples_at(compared_passes, number) for number in (next_step - 1, next_step))
    if not after.are_same or not before.are_same:
        return []
    return [report_unmoved_weights(len(after.compared), rate)]


def find_miscounted_steps(
    window: Sequence[ComparedPass], compared_passes: Sequence[ComparedPass], settings: VerdictSettings
) -> list[Finding]:
    """Report that the optimizer counts more steps by the next one than it was seen to take, if none is replayed.

    A replay that steps has the weights after the job's step, which tell more.
    """
    recorded = window[-1].recorded
    step = recorded.step_after
    if step is None or settings.follows_steps:
        return []
    following = next(
        (
            other.recorded.step_after
            for other in compared_passes
            if other.recorded.step_after is not None
            and other.recorded.rank == recorded.rank
            and other.recorded.step_after.number == step.number + 1
        ),
        None,
    )
    if following is None:
        return []
    counted, counted_later = read_step_count(step), read_step_count(following)
    if counted is None or counted_later is None:
        return []
    return [report_miscounted_steps(step.number, counted, counted_later)] if counted_later > counted + 1 else []


def find_settings_of_ranks(window: Sequence[ComparedPass]) -> list[Finding]:
    """Report that ranks which hold whole models stepped them with other settings: the models come apart."""
    if any(compared.recorded.weight_comparison.is_sharded for compared in window):
        return []
    steps = {
        compared.recorded.rank: compared.recorded.step_after
        for compared in window
        if compared.recorded.step_after is not None
    }
    by_rank = [(rank, step) for rank, step in steps.items() if rank is not None and step is not None]
    difference = describe_difference_of_ranks(by_rank)
    return [] if difference is None else [report_settings_of_ranks(by_rank[0][1].number, difference)]


def find_weights_of_ranks(
    window: Sequence[ComparedPass], compared_passes: Sequence[ComparedPass], settings: VerdictSettings
) -> list[Finding]:
    """Report before their first step that ranks which hold whole models began with weights of their own."""
    # Ranks that share experts have others under the same names.
    if settings.is_mixture or not any(compared.weight_comparison.differing for compared in window):
        return []
    difference = find_ranks_that_began_apart(compared.recorded for compared in compared_passes)
    is_first = difference is not None and window[0].recorded.num_steps_before == difference.step
    return [report_weights_of_ranks(difference.describe())] if difference is not None and is_first else []


def _merge_samples_at(compared_passes: Sequence[ComparedPass], num_steps: int) -> WeightComparison:
    """Merge what the passes sampled before which the job had taken this number of steps."""
    recorded_passes = [compared_pass.recorded for compared_pass in compared_passes]
    return merge_comparisons(
        [recorded.weight_comparison for recorded in recorded_passes if (recorded.num_steps_before or 0) == num_steps]
    )
