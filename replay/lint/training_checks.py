"""Check what a job trained, and how: steps, parameters, ranks, precision, dropout, passes that were not kept."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from actor_init.declarations.optimizers import read_job_group, recognise_group
from actor_init.option_values import OptimizerName
from capture.file_format.name_patterns import format_patterns
from capture.file_format.optimizer_step import OptimizerStep, parse_numbers
from replay.lint.remark import LintRemark, LintSubject, Weight
from replay.output.text import name_some, pluralise
from replay.tolerances.difference import relative_difference
from replay.tolerances.job_bounds import TOKEN_LOG_PROBS
from replay.verdict.causes.cause import CauseName
from replay.verdict.cleared_passes import find_cleared_passes
from replay.verdict.optimizer_facts import keeps_state, read_step_count
from replay.verdict.recorded_pass import RecordedPass
from replay.verdict.step_remarks import has_only_emptied_gradients, list_step_remarks
from replay.verdict.training_remarks import LABEL, SAME_ON_RANKS

_MAX_NAMED = 3
_ADAMS = ("Adam", "AdamW")
_L2_ADAMS = (OptimizerName.ADAM, OptimizerName.ADAM_8BIT)
_ALL_ADAMS = (*_L2_ADAMS, OptimizerName.ADAMW, OptimizerName.ADAMW_8BIT)
# No language model is trained with an Adam of these: it divides by eps alone, or moves each weight by 1 in a step.
_OUTWEIGHING_EPS, _HUGE_RATE = 1e-2, 1.0
_BF16 = "bfloat16"
_FP32 = "float32"
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Fewer moments than these may be numbers of bf16 by chance.
_MIN_MOMENTS = 4
# The mean of two values of bf16 is one, too, in about half of all cases.
_MIN_SUMS = 16
# One pass may be of a group of equal answers.
_MIN_WITHOUT_ADVANTAGE = 2
# Fewer steps show no schedule.
_MIN_RATES = 3
# By how many steps a schedule may be ahead of its optimizer.
_MAX_STEPS_AHEAD, _MAX_STEPS_AHEAD_OF_FP16 = 2, 32
# What torch.optim.AdamW has where nothing is given.
_ADAMW_DECAY = 0.01


def check_training(subject: LintSubject) -> Iterator[LintRemark]:
    """Check the steps and parameters of a recording."""
    yield from _check_unseen_steps(subject)
    for text in list_step_remarks(subject.passes, is_whole=subject.is_whole, is_stillness_told=False):
        yield LintRemark(topic=LABEL, text=text, weight=Weight.NO_TRAINING)
    if (cleared := find_cleared_passes(subject.passes)) is not None:
        yield LintRemark(
            topic="passes", text=cleared.describe(), weight=Weight.NO_TRAINING, cause=CauseName.WINDOW_WEIGHTS
        )
    yield from _check_config(subject)
    yield from _check_code(subject)
    yield from _check_ties(subject)
    yield from _check_norms(subject)
    yield from _check_schedule(subject)
    yield from _check_begin_of_schedule(subject)
    yield from _check_state_behind_schedule(subject)
    yield from _check_settings(subject)
    yield from _check_clipping(subject)
    yield from _check_missing_gradients(subject)
    yield from _check_mode(subject)
    yield from _check_rollouts(subject)
    yield from _check_reference(subject)
    yield from _check_advantages(subject)
    yield from _check_random_states(subject)
    yield from _check_random_states_of_ranks(subject)
    yield from _check_precision(subject)
    yield from _check_reduction(subject)
    yield from _check_missing_passes(subject)
    yield from _list_frozen(subject)
    yield from _list_decay(subject)
    yield from _check_decay_in_gradient(subject)
    yield from _check_rates_of_groups(subject)
    yield from _list_dtypes(subject)


def _check_unseen_steps(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where the optimizer stepped on gradients of no forward that the recorder saw."""
    ends = [end for end in subject.ends if end.num_unseen_steps]
    if ends:
        number = max(end.num_unseen_steps for end in ends)
        first = min(end.unseen_after or 0 for end in ends)
        yield LintRemark(
            topic="steps",
            text=f"the optimizer stepped {pluralise(number, 'time')} without a recorded forward, first after forward "
            f"{first}: the job called another module than the recorded one, as the one inside a wrapper, or stepped "
            "twice on one gradient",
            weight=Weight.NO_TRAINING,
        )


def _check_clipping(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where the job clipped after the step, or without a gradient and nothing else clipped to that norm."""
    steps = {step.number: step for step in _list_steps(subject)}
    if number := max((end.num_late_clippings for end in subject.ends), default=0):
        yield LintRemark(
            topic="clipping",
            text=f"gradients are clipped after the step, in {pluralise(number, 'step')}, and not before it, so the "
            "step is not clipped",
            weight=Weight.NO_TRAINING,
        )
    otherwise = [step for step in steps.values() if step.clips_otherwise]
    if otherwise:
        yield LintRemark(
            topic="clipping",
            text=f"gradients are clipped by another rule than to their length, in {len(otherwise)} of "
            f"{pluralise(len(steps), 'step')}: element by element (clip_grad_value_), or by a norm of another order "
            "(norm_type)",
            weight=Weight.OTHER_CONFIG,
        )
    idle = [step for step in steps.values() if step.unapplied_norm not in (None, step.max_norm)]
    if idle:
        engine = "" if idle[0].max_norm is None else f"; the gradient was clipped to {idle[0].max_norm:g} elsewhere"
        yield LintRemark(
            topic="clipping",
            text=f"clipping to a norm of {idle[0].unapplied_norm:g} found no gradient in {len(idle)} of "
            f"{pluralise(len(steps), 'step')} and changed nothing: it came before the backward, was given no parameter "
            f"(a generator that was used up), or an engine holds the gradients{engine}",
            weight=Weight.NO_TRAINING,
        )


def _check_config(subject: LintSubject) -> Iterator[LintRemark]:
    if subject.config_differences:
        yield LintRemark(
            topic="config",
            text=f"the model folder's is not the job's: {name_some(subject.config_differences, _MAX_NAMED, '; ')}",
            weight=Weight.OTHER_CONFIG,
            cause=CauseName.MODEL_CONFIG,
        )


def _check_code(subject: LintSubject) -> Iterator[LintRemark]:
    if subject.code_differences:
        yield LintRemark(
            topic="model",
            text=f"{name_some(subject.code_differences, _MAX_NAMED, '; ')}; yet all numbers that were judged agree",
            weight=Weight.OTHER_CONFIG,
        )


def _check_ties(subject: LintSubject) -> Iterator[LintRemark]:
    for trained, others in subject.broken_ties:
        names = " and ".join(trained)
        text = (
            f"{names} is trained by itself, and {' and '.join(others)}, which it is tied to in the model, is not"
            if others
            else f"{names}, which are tied in the model, are each trained by itself"
        )
        text += ": the tie is broken (PEFT keeps it with ensure_weight_tying)"
        yield LintRemark(topic="adapter", text=text, weight=Weight.OTHER_CONFIG)


def _check_norms(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where ranks that hold whole models had gradient norms of their own in one step."""
    by_step: dict[int, dict[int, float]] = {}
    shapes: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for recorded in subject.trained:
        step, rank = recorded.step_after, recorded.rank
        if step is None or rank is None or recorded.weight_comparison.is_sharded or step.is_part_of_norm:
            continue
        if step.grad_norm is not None:
            by_step.setdefault(step.number, {})[rank] = step.grad_norm
            for sample in recorded.samples:
                shapes.setdefault((sample.name, step.number), set()).add(sample.shape)
    # Ranks whose parameters have other shapes hold parts of them.
    if any(len(of_name) > 1 for of_name in shapes.values()):
        return
    differing = {
        number: norms
        for number, norms in sorted(by_step.items())
        if relative_difference(min(norms.values()), max(norms.values())) > SAME_ON_RANKS
    }
    if differing:
        number, norms = next(iter(differing.items()))
        # Of more ranks than can be named those that are farthest apart tell the most.
        ranks = norms if len(norms) <= _MAX_NAMED else {find(norms, key=norms.__getitem__) for find in (min, max)}
        rank_norms = ", ".join(f"{norms[rank]:.4g} on rank {rank}" for rank in sorted(ranks))
        yield LintRemark(
            topic="ranks",
            text=f"each rank had a gradient norm of its own in {len(differing)} of {pluralise(len(by_step), 'step')}, "
            f"as in step {number + 1}: {rank_norms}",
            weight=Weight.NO_TRAINING,
            cause=CauseName.NOT_REDUCED,
        )


def _list_steps(subject: LintSubject) -> list[OptimizerStep]:
    return [recorded.step_after for recorded in subject.trained if recorded.step_after is not None]


def _list_names(subject: LintSubject) -> list[str]:
    return list(dict.fromkeys(sample.name for recorded in subject.trained for sample in recorded.samples))


def _check_schedule(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where the schedule was stepped several times a step, as by each micro-batch, or by an engine as well."""
    steps = {step.number: step.num_schedule_steps for step in _list_steps(subject)}
    often = [number for number in steps.values() if number > 1]
    if often:
        text = (
            f"its schedule was stepped {often[-1]} times between two optimizer steps, in {len(often)} of {len(steps)}"
        )
        yield LintRemark(topic="learning rate", text=text, weight=Weight.NO_TRAINING)


def _check_begin_of_schedule(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where the rate rises from next to nothing though the optimizer has stepped before: a warm-up is repeated.

    A step that is not the recorder's first has steps of the same schedule before it.
    """
    steps = {step.number: step for step in _list_steps(subject) if step.settings}
    rates = [max(group.get("lr", 0.0) for group in steps[number].settings) for number in sorted(steps)]
    count = max(steps[0].state_steps, default=0) if 0 in steps else 0
    if not count or rates != sorted(rates) or (len(rates) > 1 and rates[0] == rates[-1]):
        return
    given = max(subject.given_rates, default=0.0)
    if rates[0] < given / 2 or (rates[0] == 0 and len(rates) > 1):
        of_state = f"{given:g} in the state" if given else "with the optimizer's state"
        yield LintRemark(
            topic="learning rate",
            text=f"it begins anew ({rates[0]:g} at the first step here, {of_state} of {pluralise(count, 'step')}): was "
            "the schedule restored?",
            weight=Weight.SETTING,
        )


def _check_state_behind_schedule(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where the schedule has counted more steps than the optimizer: a restart restored the one alone.

    A schedule may be stepped several times a step, such as once for each rank, but as often each time. It may be ahead
    by a step that the loop takes before the optimizer's first, and by steps that an overflow of fp16 left out.
    """
    by_number = {step.number: step for step in _list_steps(subject)}
    steps = [by_number[number] for number in sorted(by_number)]
    first = steps[0] if steps else None
    counted = None if first is None or not keeps_state(first) else read_step_count(first)
    counts = [(step, step.schedule_count) for step in steps if step.schedule_count is not None]
    if first is None or counted is None or not counts:
        return
    advances = {
        (later_count - count) / (later.number - step.number) for (step, count), (later, later_count) in pairwise(counts)
    } or {counts[0][0].num_schedule_steps}
    step, count = counts[0]
    counted += step.number - first.number
    is_scaled = any("float16" in recorded.dtypes for recorded in subject.trained)
    if len(advances) > 1 or not (advance := advances.pop()):
        return
    if count - advance * counted > advance * (_MAX_STEPS_AHEAD_OF_FP16 if is_scaled else _MAX_STEPS_AHEAD):
        yield LintRemark(
            topic="learning rate",
            text=f"its schedule had counted {pluralise(count, 'step')} before step {step.number + 1}, and the "
            f"optimizer {counted}: the job goes on in the midst of the schedule, and the optimizer's moments began "
            "anew. Was the optimizer's state restored?",
            weight=Weight.OTHER_CONFIG,
            cause=CauseName.OPTIMIZER_STATE,
        )


def _check_settings(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where an optimizer has settings that nobody means."""
    found: dict[str, None] = {}
    for step in _list_steps(subject):
        for settings in step.settings:
            group = read_job_group(settings, step.optimizer or "", step.library)
            family = recognise_group(group)
            if settings.get("maximize"):
                found[f"{group.class_name} maximises (maximize=True): each step makes the loss larger"] = None
            if family is None or family.option_value not in _ALL_ADAMS:
                continue
            first, second = settings.get("betas") or (0.0, 1.0)
            if first > second:
                found[f"the betas of {group.class_name} are {first:g} and {second:g}: are they swapped?"] = None
            if (eps := settings.get("eps") or 0.0) >= _OUTWEIGHING_EPS:
                found[f"eps of {group.class_name} is {eps:g}, more than the gradients that it is added to"] = None
            if (rate := settings.get("lr") or 0.0) >= _HUGE_RATE:
                found[f"the learning rate of {group.class_name} is {rate:g}: a step moves weights by as much"] = None
    for text in found:
        yield LintRemark(topic="settings", text=text, weight=Weight.SETTING)


def _check_missing_gradients(subject: LintSubject) -> Iterator[LintRemark]:
    """Say which parameters are trained and had a gradient in no recorded step."""
    steps = [step for step in _list_steps(subject) if step.gradients is not None or step.without_gradient]
    if has_only_emptied_gradients(subject.trained):
        yield LintRemark(
            topic="gradients",
            text=f"no parameter had a gradient in {pluralise(len({step.number for step in steps}), 'step')}, though "
            "the losses were differentiated: are gradients emptied (zero_grad) between the backward and the step?",
            weight=Weight.NO_TRAINING,
            cause=CauseName.NO_GRADIENT,
        )
        return
    with_gradient = {
        sample.name for step in steps if step.gradients is not None for sample in step.gradients.samples
    } | {signature.name for step in steps for signature in step.signatures}
    missing = dict.fromkeys(name for step in steps for name in step.without_gradient if name not in with_gradient)
    if missing:
        patterns = format_patterns(missing, [*_list_names(subject), *missing, *with_gradient])
        number = len({step.number for step in steps})
        yield LintRemark(
            topic="gradients",
            text=f"{pluralise(len(missing), 'trainable parameter')} had no gradient in {pluralise(number, 'step')}: "
            f"{name_some(patterns, _MAX_NAMED)}",
            weight=Weight.NO_TRAINING,
            cause=CauseName.NO_GRADIENT,
        )


def _check_mode(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where a model with dropout trained in eval mode, as a whole or in parts."""
    known = [recorded.training for recorded in subject.trained if recorded.training is not None]
    if not subject.dropout or not known or not _list_steps(subject):
        return
    if number := sum(not mode["model"] for mode in known):
        yield LintRemark(
            topic="dropout",
            text=f"the model was in eval mode in {number} of {pluralise(len(known), 'training pass')}, so its "
            f"{subject.dropout[0]} did nothing",
            weight=Weight.NO_TRAINING,
            cause=CauseName.DROPOUT,
        )
    parts = dict.fromkeys(part for mode in known if mode["model"] for part in mode["parts"])
    if parts:
        text = f"parts of the model were in eval mode while it trained: {name_some(list(parts), _MAX_NAMED)}"
        yield LintRemark(topic="dropout", text=text, weight=Weight.FACT, cause=CauseName.DROPOUT)


def _check_rollouts(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where passes without a gradient drew dropout masks: their log-probs are those of no policy that trains."""
    if subject.dropout and (number := sum(map(drew_masks_without_gradient, subject.passes))):
        total = sum(not recorded.trains for recorded in subject.passes)
        yield LintRemark(
            topic="dropout",
            text=f"passes without a gradient drew masks of {subject.dropout[0]}, {number} of {total} that were read: "
            "their log-probs differ from a training pass's by chance, so a ratio or a KL of the two is not that of the "
            "weights alone. Try: model.eval() for them, and no dropout where the policy trains",
            weight=Weight.OTHER_CONFIG,
        )


def _check_reference(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where an adapter's job has passes without a gradient whose log-probs are the policy's own.

    That is how old log-probs are computed too. A reference without the adapter has others once it has been stepped.
    """
    trained = {_make_pass_key(recorded): _list_token_values(recorded) for recorded in subject.trained}
    rollouts = [recorded for recorded in subject.passes if not recorded.trains and recorded.num_steps_before]
    pairs = [
        (_list_token_values(recorded), values)
        for recorded in rollouts
        if recorded.tokens is not None and (values := trained.get(_make_pass_key(recorded)))
    ]
    if subject.has_adapter and len(pairs) > 1 and all(own == values for own, values in pairs):
        yield LintRemark(
            topic="reference",
            text=f"{len(pairs)} of {pluralise(len(rollouts), 'pass')} without a gradient, behind the first step, have "
            "the log-probs of the training pass on the same tokens, to the last digit: they are the policy's. If they "
            "are meant for a reference, the adapter was on (`with model.disable_adapter():`)",
            weight=Weight.FACT,
        )


def _check_advantages(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where the advantages of passes are 0: all rewards of a group are alike, or the reward is constant."""
    known = [recorded.largest_advantage for recorded in subject.trained if recorded.largest_advantage is not None]
    number = sum(value == 0 for value in known)
    if number < _MIN_WITHOUT_ADVANTAGE or 2 * number < len(known):
        return
    yield LintRemark(
        topic="advantages",
        text=f"all are 0 in {number} of {pluralise(len(known), 'training pass')}, whose policy loss then trains "
        "nothing: does each answer of a prompt have one and the same reward?",
        # Some groups of answers are alike in sound jobs.
        weight=Weight.NO_TRAINING if number == len(known) else Weight.FACT,
    )


def _make_pass_key(recorded: RecordedPass) -> tuple[int | None, int | None, tuple[int | None, ...]]:
    """Make a key that is equal for passes of one rank, before one step, on the same rows."""
    rows = () if recorded.tokens is None else tuple(row.digest for row in recorded.tokens.rows)
    return recorded.rank, recorded.num_steps_before, rows


def _list_token_values(recorded: RecordedPass) -> list[float]:
    return [value for claim in recorded.claims if claim.name == TOKEN_LOG_PROBS for value in claim.values]


def is_in_eval_mode(recorded: RecordedPass) -> bool:
    """Tell whether the model, or a part of it, was in eval mode in a pass."""
    mode = recorded.training
    return mode is not None and (not mode["model"] or bool(mode["parts"]))


def drew_masks_without_gradient(recorded: RecordedPass) -> bool:
    """Tell whether a pass that trained nothing ran in training mode and drew random numbers."""
    is_training = recorded.training is not None and recorded.training["model"]
    return not recorded.trains and is_training and recorded.draws is not None and recorded.draws.has_any


def _check_random_states(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where passes of different steps drew the same random numbers: they began with one random state.

    Passes of one step may share a state on purpose, as where a part of a batch is computed again.
    """
    by_state: dict[tuple[int | None, frozenset[tuple[str, bytes]]], list[RecordedPass]] = {}
    for recorded in subject.trained:
        if recorded.draws is not None and recorded.draws.has_any:
            state = frozenset(recorded.draws.before.items())
            by_state.setdefault((recorded.rank, state), []).append(recorded)
    repeated = [passes for passes in by_state.values() if len({recorded.num_steps_before for recorded in passes}) > 1]
    if repeated:
        total = sum(len(passes) for passes in by_state.values())
        number = sum(map(len, repeated))
        forwards = ", ".join(str(recorded.forward_number) for recorded in repeated[0][:_MAX_NAMED])
        yield LintRemark(
            topic="dropout",
            text=f"{number} of {pluralise(total, 'pass')} that drew random numbers began with the random state of a "
            f"pass of another step, as forwards {forwards} did: masks repeat. Does something seed inside the loop?",
            weight=Weight.NO_TRAINING,
        )


def _check_random_states_of_ranks(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where ranks with rows of their own drew the same random numbers: one seed is set on all of them.

    Ranks of tensor parallelism are fed the same rows, and have to drop out alike.
    """
    by_state: dict[tuple[int | None, frozenset[tuple[str, bytes]]], dict[int | None, list[RecordedPass]]] = {}
    for recorded in subject.trained:
        if recorded.draws is not None and recorded.draws.has_any:
            key = recorded.num_steps_before, frozenset(recorded.draws.before.items())
            by_state.setdefault(key, {}).setdefault(recorded.rank, []).append(recorded)
    shared = {step: by_rank for (step, _), by_rank in by_state.items() if _have_other_rows(by_rank)}
    if shared:
        ranks = ", ".join(sorted(map(str, next(iter(shared.values())))))
        total = len({step for step, _ in by_state})
        yield LintRemark(
            topic="dropout",
            text=f"ranks {ranks}, which are fed other rows, began passes with one random state in {len(shared)} of "
            f"{pluralise(total, 'step')}, so that they drop out alike. Try: a seed for each rank",
            weight=Weight.SETTING,
        )


def _have_other_rows(by_rank: Mapping[int | None, Sequence[RecordedPass]]) -> bool:
    rows = {
        tuple(row.first_tokens for row in recorded.tokens.rows)
        for passes in by_rank.values()
        for recorded in passes
        if recorded.tokens is not None
    }
    return len(by_rank) > 1 and len(rows) > 1


def _check_precision(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where torch's Adam stepped weights in bf16 themselves: what is added to them is rounded to 2^-8.

    Its moments have the dtype of what it steps, and that of masters is fp32: so masters are told by moments that bf16
    does not hold.
    """
    trained = [recorded for recorded in subject.trained if recorded.step_after is not None]
    dtypes = {sample.dtype for recorded in trained for sample in recorded.samples}
    steps = _list_steps(subject)
    is_torch = all(step.library == "torch" and step.optimizer in _ADAMS for step in steps)
    moments = [
        value
        for step in steps
        for sample in step.state
        for name in _MOMENTS
        for value in sample.values.get(name, ())
        if value
    ]
    if is_torch and dtypes == {_BF16} and len(moments) >= _MIN_MOMENTS and _are_in_bf16(moments):
        yield LintRemark(
            topic="precision",
            text=f"{steps[0].optimizer} stepped bfloat16 weights without fp32 masters: a change of a weight by less "
            "than 2^-9 of it is lost",
            weight=Weight.PRECISION,
        )


def _check_reduction(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where fp32 gradients went through bf16: a sum in fp32 of several parts is rarely a value of bf16."""
    values: list[float] = []
    most_parts = 1
    for recorded in subject.trained:
        step = recorded.step_after
        num_parts = (recorded.world_size or 1) * (0 if step is None else len(step.passes))
        if step is None or step.gradients is None or num_parts < 2:
            continue
        most_parts = max(most_parts, num_parts)
        values += [
            value for sample in step.gradients.samples if sample.dtype == _FP32 for value in sample.values if value
        ]
    if len(values) >= _MIN_SUMS and _are_in_bf16(values):
        text = (
            f"fp32 gradients, sums of {most_parts} passes, are values of bfloat16: they were added up or reduced in it"
        )
        yield LintRemark(topic="gradient precision", text=text, weight=Weight.PRECISION)


def _are_in_bf16(values: Sequence[float]) -> bool:
    in_fp32 = torch.tensor(values, dtype=torch.float32)
    return torch.equal(in_fp32.bfloat16().float(), in_fp32)


def _check_missing_passes(subject: LintSubject) -> Iterator[LintRemark]:
    """Say how many of the passes that went into a recorded step were not kept."""
    if not subject.is_whole:
        return
    kept = {(recorded.rank, recorded.forward_number) for recorded in subject.passes}
    seen = {
        (recorded.rank, forward)
        for recorded in subject.trained
        if recorded.step_after is not None
        for forward in recorded.step_after.passes
    }
    missing = len(seen - kept)
    if missing > sum(subject.not_recorded.values()):
        yield LintRemark(
            topic="passes",
            text=f"{missing} of {pluralise(len(seen), 'training pass')} that went into recorded steps were not kept: "
            "settings of the recording, its limits or a slow disk left them out",
            weight=Weight.MISSING_PASSES,
        )


def _list_frozen(subject: LintSubject) -> Iterator[LintRemark]:
    if subject.has_adapter:
        return
    numbers = {
        recorded.forward_number or 0: recorded.num_frozen
        for recorded in subject.trained
        if recorded.weight_comparison.num_parameters
    }
    first, last = (numbers[find(numbers)] if numbers else 0 for find in (min, max))
    if first or last:
        total = max(recorded.weight_comparison.num_parameters for recorded in subject.trained)
        patterns = format_patterns(subject.frozen, _list_names(subject)) if subject.frozen else []
        named = f": {name_some(patterns, _MAX_NAMED)}" if patterns else ""
        at_first, later = ("", "") if first == last else (" at first", f"; {last} later")
        text = f"{first} of {pluralise(total, 'parameter')} were not trained{at_first}{named}{later}"
        yield LintRemark(topic="frozen", text=text, weight=Weight.FACT, cause=CauseName.FROZEN)
    if first == last:
        yield from _check_frozen_layers(subject)


def _check_frozen_layers(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where layers 10 to 19 are frozen with layer 1, and those between are trained: a name's beginning does so.

    `"layers.1" in name` holds for layers.10 too.
    """
    frozen, trained = set[int](), set[int]()
    for name in _list_names(subject):
        if (found := re.search(r"\.(\d+)\.", name)) is not None:
            (frozen if name in subject.frozen else trained).add(int(found[1]))
    wholly = frozen - trained
    longer = sorted(layer for layer in wholly if layer >= 10)
    begun = {
        layer for layer in wholly | trained if any(str(layer).startswith(str(short)) for short in wholly if short < 10)
    }
    if longer and wholly == begun and set(range(min(wholly), max(wholly))) & trained:
        layers = ", ".join(map(str, sorted(wholly)))
        yield LintRemark(
            topic="frozen",
            text=f"layers {layers} were not trained, and those between them were: the numbers begin alike, so was a "
            'name sought by its beginning ("layers.1" is in "layers.10" too)?',
            weight=Weight.NO_TRAINING,
            cause=CauseName.FROZEN,
        )


def _list_decay(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where norms and biases decay like other weights, or alone: a rule for names may have missed them."""
    groups = [group for step in _list_steps(subject) for group in step.settings]
    decays = {group.get("weight_decay") for group in groups}
    is_vector = {sample.name: len(sample.shape) == 1 for recorded in subject.trained for sample in recorded.samples}
    if len(decays) > 1:
        decaying = {
            subject.parameter_names[number]
            for group in groups
            if group.get("weight_decay")
            for number in parse_numbers(group.get("parameters", ""))
            if number < len(subject.parameter_names)
        }
        known = decaying & is_vector.keys()
        if known and all(is_vector[name] for name in known) and not all(is_vector.values()):
            patterns = name_some(format_patterns(sorted(known), _list_names(subject)), _MAX_NAMED)
            text = f"weight decay acts on norms or biases alone ({patterns}) and on no matrix: are the groups swapped?"
            yield LintRemark(topic="decay", text=text, weight=Weight.SETTING)
        return
    decay = decays.pop() if decays else None
    # Who leaves AdamW's decay as it is has no opinion on which parameters it is for.
    if decay and decay != _ADAMW_DECAY and any(is_vector.values()):
        vectors = [name for name in is_vector if is_vector[name]]
        patterns = name_some(format_patterns(vectors, _list_names(subject)), _MAX_NAMED)
        text = f"weight decay {decay:g} acts on all parameters, on {patterns}, too"
        yield LintRemark(topic="decay", text=text, weight=Weight.SETTING)


def _check_decay_in_gradient(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where an Adam that is no AdamW decays weights: the decay is scaled by its moments."""
    for step in _list_steps(subject):
        for settings in step.settings:
            group = read_job_group(settings, step.optimizer or "", step.library)
            family = recognise_group(group)
            if family is not None and family.option_value in _L2_ADAMS and settings.get("weight_decay"):
                yield LintRemark(
                    topic="decay",
                    text=f"{group.class_name} adds its weight decay of {settings['weight_decay']:g} to the gradient, "
                    "so its moments scale it: is AdamW meant, which decays the weights themselves?",
                    weight=Weight.SETTING,
                )
                return


def _check_rates_of_groups(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where a schedule leaves out some parameters, or their rate alone is 0: it may set the first group only."""
    rates_by_number: dict[int, dict[int, float]] = {}
    for step in _list_steps(subject):
        for group in step.settings:
            for number in parse_numbers(group.get("parameters", "")):
                rates_by_number.setdefault(number, {})[step.number] = group.get("lr", 0.0)
    numbers_by_rates: dict[tuple[float, ...], list[int]] = {}
    for number, by_step in rates_by_number.items():
        numbers_by_rates.setdefault(tuple(by_step[step] for step in sorted(by_step)), []).append(number)
    # A schedule has another rate in most steps; few steps show none.
    is_scheduled = any(len(set(rates)) >= _MIN_RATES for rates in numbers_by_rates)
    for rates, numbers in numbers_by_rates.items():
        is_zero = not any(rates) and any(map(any, numbers_by_rates))
        if len(rates) < _MIN_RATES or len(set(rates)) > 1 or not (is_zero or is_scheduled):
            continue
        known = [subject.parameter_names[number] for number in numbers if number < len(subject.parameter_names)]
        names = name_some(format_patterns(known, subject.parameter_names), _MAX_NAMED) if known else "some parameters"
        why = "and others' is not" if is_zero else "while a schedule changes others': does it set all groups?"
        text = f"the rate of {names} is {rates[0]:g} in all {len(rates)} recorded steps, {why}"
        yield LintRemark(topic="learning rate", text=text, weight=Weight.SETTING)


def _list_dtypes(subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where parameters have several dtypes, unless the job trained an adapter, which often has another."""
    if subject.has_adapter:
        return
    dtype_by_name = {sample.name: sample.dtype for recorded in subject.trained for sample in recorded.samples}
    numbers = Counter(dtype_by_name.values())
    if len(numbers) < 2:
        return
    most = numbers.most_common(1)[0][0]
    names = [name for name, dtype in dtype_by_name.items() if dtype != most]
    counts = ", ".join(f"{number} {dtype}" for dtype, number in numbers.most_common())
    others = name_some(format_patterns(names, dtype_by_name), _MAX_NAMED)
    text = f"sampled parameters are {counts}: {others} are other than the rest"
    yield LintRemark(topic="dtypes", text=text, weight=Weight.FACT)
