"""Say what a loss is of that the job computed outside of the model, and what its weights are not.

loss       taken from the gradient of the job's logits, so not judged itself: in the first step 594 targets, [...]
loss       the job's gradient is not finite at 3 positions of the first step, first in pass 1, row 0, [...]
note       loss: the weights add up to 0.744, a mean's to 1: the loss is divided by all 798 tokens, [...]

Which tokens a loss should be of, and what they should weigh, no number tells. So this judges nothing.
"""

import math
from collections.abc import Iterator, Sequence

from replay.objective.objective import LogProbWeights
from replay.output.text import Pairs, pluralise
from replay.verdict.judge import PassEvidence
from replay.verdict.pass_windows import count_job_ranks, group_into_windows, sum_loss_weights

LABEL = "loss"
# Weights, and rows' lengths, that are further apart than this are not alike.
LEAST_SPREAD = 1.2
# How far weights of a mean may be from adding up to 1, and a quotient from what is taken for its reason.
MAX_ROUNDING = 0.01


def describe_loss_weights(passes: Sequence[PassEvidence]) -> Pairs:
    """Describe the loss of the first step; nothing of a loss that the replay computes by itself."""
    replayed = [member for member in passes if _has_job_weights(member) and member.record.error is None]
    # A window that was cut short ends with no gradient's norm.
    windows = [window for window in group_into_windows(replayed) if window[-1].record.result.grad_norm is not None]
    if not windows:
        return []
    window = windows[0]
    weights = [member.replayed.log_prob_weights for member in window]
    least, most = min(weight.least for weight in weights), max(weight.most for weight in weights)
    num_targets = sum(member.recorded.num_tokens for member in window if member.recorded is not None)
    text = f"in the first step {pluralise(num_targets, 'target')}, of the weights {least:.3g} to {most:.3g}"
    lines = [(LABEL, f"taken from the gradient of the job's logits, so not judged itself: {text}")]
    if broken := list(_list_not_finite(window)):
        number = pluralise(sum(count for count, _ in broken), "position")
        where = f"{number} of the first step, first in {broken[0][1]}"
        # Their sum is no number, so it tells of no mean.
        return [*lines, (LABEL, f"the job's gradient is not finite at {where}; the range is of the others")]
    total = sum_loss_weights(window)
    if least < 0:
        return lines
    lines += [("note", f"{LABEL}: {text}") for text in _describe_rows(weights)]
    if abs(total - 1) <= MAX_ROUNDING:
        return lines
    reasons = [text for sum_, text in _list_reasons(window, num_targets) if _explains(sum_, total)]
    # With as many passes on a rank as ranks, the gradient of the logits does not tell which of two it is.
    reason = f": {'; or '.join(reasons)}" if reasons else ""
    return [*lines, ("note", f"{LABEL}: the weights add up to {total:.3g}, a mean's to 1{reason}")]


def _describe_rows(weights: Sequence[LogProbWeights]) -> Iterator[str]:
    """Say so where tokens of one row weigh unlike each other, or rows weigh alike whatever their tokens."""
    rows = [row for weight in weights for row in weight.rows]
    uneven = [row for row in rows if row.most > LEAST_SPREAD * row.least]
    if uneven:
        yield (
            f"targets of one row weigh from {uneven[0].least:.3g} to {uneven[0].most:.3g}, in {len(uneven)} of "
            f"{pluralise(len(rows), 'row')}: the loss weighs tokens (by class, by their probability), or is no sum of "
            "log-probs"
        )
        return
    if len(rows) > 1 and all(row.num_targets == 1 for row in rows):
        yield f"each of {len(rows)} rows has one target: the loss is of one token a row"
        return
    of_passes = [weight.rows for weight in weights if len(weight.rows) > 1]
    are_alike = all(
        max(row.total for row in rows) <= (1 + MAX_ROUNDING) * min(row.total for row in rows) for rows in of_passes
    )
    have_unlike_lengths = any(
        max(row.num_targets for row in rows) > LEAST_SPREAD * min(row.num_targets for row in rows) for rows in of_passes
    )
    if are_alike and have_unlike_lengths:
        yield (
            "each row weighs the same, whatever its targets: the loss is the mean of its rows' means, in which a "
            "token of a short row counts more"
        )


def _list_not_finite(window: Sequence[PassEvidence]) -> Iterator[tuple[int, str]]:
    """Yield of each pass whose gradient of the loss is not finite somewhere the number of places, and the first."""
    for member in window:
        tokens = None if member.recorded is None else member.recorded.tokens
        if tokens is not None and tokens.first_not_finite is not None:
            row, position = tokens.first_not_finite
            yield tokens.num_not_finite, f"pass {member.record.index + 1}, row {row}, position {position}"


def _has_job_weights(member: PassEvidence) -> bool:
    return member.recorded is not None and member.recorded.has_job_weights_of_tokens


def _list_reasons(window: Sequence[PassEvidence], num_targets: int) -> list[tuple[float, str]]:
    """List what the weights may add up to, each with the mistake that makes it."""
    num_ranks = count_job_ranks(window)
    num_passes = len(window) // num_ranks
    sections = [member.record.input for member in window]
    num_padded = sum(section.padded_tokens for section in sections)
    num_real = sum(section.real_tokens for section in sections)
    num_rows = sum(section.rows for section in sections)
    num_predicted = num_padded - num_rows
    return [
        (num_passes, f"the losses of a step's {num_passes} passes are added up and not averaged"),
        (1 / num_passes, f"the loss is divided by the {num_passes} passes of a step twice"),
        (
            1 / num_ranks,
            f"the loss is divided by what all {num_ranks} ranks have, and the gradients are averaged besides",
        ),
        (num_targets / num_predicted, f"the loss is divided by all {num_predicted} tokens, padding and prompts too"),
        (num_targets / num_padded, f"the loss is divided by all {num_padded} tokens, padding and prompts too"),
        (num_targets / num_rows, f"the loss is the sum of its targets divided by the {num_rows} rows"),
        (num_targets, "the loss is the sum over its targets, not their mean"),
        (1 / math.log(2), "the loss is in bits"),
        (num_targets / num_real, f"the loss is divided by all {num_real} real tokens, prompts too"),
    ]


def _explains(sum_: float, total: float) -> bool:
    return abs(sum_ - 1) > MAX_ROUNDING and abs(total / sum_ - 1) <= MAX_ROUNDING
