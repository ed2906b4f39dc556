"""Find the number that a job's gradients are multiplied by, and say of which facts of the job it is."""

import math
from collections.abc import Sequence

from replay.verdict.causes.wrong_gradient import SAME_RATIO, WrongGradient, find_factor
from replay.verdict.gradient_findings import ComparedPass

# A loss scale of fp16 is a power of 2, and rarely less.
LEAST_LOSS_SCALE = 64.0
# Relative: how near a factor comes to the share of positions that explains it. Passes have shares of their own.
SHARE_OF_POSITIONS = 0.01


def explain_loss_scale(factor: float) -> str:
    is_power_of_2 = factor > 0 and abs(math.log2(factor) - round(math.log2(factor))) < 0.02
    return " (a loss scale?)" if is_power_of_2 and factor >= LEAST_LOSS_SCALE else ""


def explain_share(factor: float, window: Sequence[ComparedPass]) -> str:
    """Say what else a factor is one over: the passes of a step on a rank, or the ranks."""
    num_ranks = window[0].recorded.world_size or 1
    num_passes = len({compared.recorded.forward_number for compared in window})
    twice = "if the loop divides by them and"
    reasons = [
        text
        for number, text in (
            (num_passes, f"1 over the {num_passes} passes of a step on each rank, {twice} an engine does, too"),
            (num_ranks, f"1 over the {num_ranks} ranks, {twice} the reduction averages, too"),
        )
        if number > 1 and math.isclose(factor, 1 / number, rel_tol=1e-3)
    ]
    return f" ({'; or '.join(reasons)})" if reasons else ""


def explain_padding(factor: float, wrong: WrongGradient) -> str:
    """Say that a factor is the share of all positions, padding included, that the loss is of; empty where it is not.

    A row of S tokens has S positions, or S - 1 where labels were shifted.
    """
    members = [compared for compared in wrong.window if compared.recorded.num_tokens]
    for num_lost in (1, 0):
        shares = [
            member.recorded.num_tokens / (inputs.padded_tokens - num_lost * inputs.rows)
            for member in members
            if (inputs := member.record.input).padded_tokens > inputs.rows
        ]
        weights = [member.record.result.weight for member in members]
        if not shares or len(shares) != len(weights) or not sum(weights):
            return ""
        share = math.fsum(share * weight for share, weight in zip(shares, weights, strict=True)) / sum(weights)
        if share < 1 - SAME_RATIO[wrong.is_coarse] and math.isclose(factor, share, rel_tol=SHARE_OF_POSITIONS):
            return f", as the loss's tokens are {share:.4g} of all positions, padded ones too"
    return ""


def may_come_of_reduction(factor: float, window: Sequence[ComparedPass]) -> bool:
    """Tell whether a factor may be that of a wrong reduction over the ranks, and not one on the gradients."""
    num_ranks = window[0].recorded.world_size or 1
    return num_ranks > 1 and any(math.isclose(factor, number, rel_tol=0.1) for number in (num_ranks, 1 / num_ranks))


def find_uniform_factor(wrong: WrongGradient) -> float | None:
    """Find the number that every gradient is multiplied by in the job; None if it is not one number for all."""
    factors = [find_factor(parameter) for parameter in wrong.gradient.parameters.values() if parameter.replay_norm]
    known = sorted(factor for factor in factors if factor is not None)
    if not known or len(known) < len(factors):
        return None
    middle = known[len(known) // 2]
    if not middle or not all(wrong.is_scaled(parameter) for parameter in wrong.gradient.parameters.values()):
        return None
    tolerance = 4 * SAME_RATIO[wrong.is_coarse]
    return middle if all(abs(factor / middle - 1) <= tolerance for factor in known) else None
