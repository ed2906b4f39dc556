"""List losses whose gradient of the logits a job may have, and fit them to the one that it recorded.

A job whose loop computes its loss of the logits records at each position the gradient of the target's logit. A mean of
cross entropies has w (p - 1) there, p being the target's probability and w one number; other losses have other values,
most with one more number, such as a temperature. Where a loss gives all positions their values, the job computes it.

Shape letters: N positions, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replay.verdict.causes.trial import TrialMatch
from replay.verdict.causes.trial_rules import LIKELY_GAIN, MANY_VALUES

# Whole logits of so many positions are kept on the host.
MAX_POSITIONS = 64
# Relative: how far a fitted gradient may be from the job's, in fp32 and with a 16-bit dtype in between.
MAX_RESIDUAL, MAX_COARSE_RESIDUAL = 1e-4, 0.02
# So many times nearer than a mean of cross entropies it has to be.
LEAST_GAIN = 10.0
SMALL, TINY = 1e-12, 1e-30
# Losses that are nearly as near as the nearest are not told from it, nor what is as near as fp32 can tell.
RIVAL_FACTOR, NEAREST_RESIDUAL = 3.0, 3e-8
# Numbers that are searched for lie between these.
TEMPERATURES, CAPS = (0.05, 20.0), (0.5, 200.0)
NUM_GRID, NUM_REFINEMENTS = 96, 40


def measure_distance(job: Tensor, own: Tensor, *, least: float = 0.0) -> float:
    """Measure how far a gradient is from the nearest positive multiple of the replay's, as a share of the job's.

    A loss that goes down where the job's goes up is another one.

    least  a gradient of the replay whose square is no more than this, or is not finite, is taken for 0
    """
    square = float(own.square().sum())
    factor = max(float((job * own).sum()) / square, 0.0) if least < square < math.inf else 0.0
    return float((job - factor * own).norm() / job.norm().clamp(min=least or TINY))


def choose_positions(place_N: Tensor) -> Tensor:
    """Choose MAX_POSITIONS of these places at most, evenly spaced."""
    return place_N[torch.linspace(0, len(place_N) - 1, min(len(place_N), MAX_POSITIONS)).long()]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetLogits:
    """Logits of some positions, and the gradient of each one's target in the job.

    logits_NV    of the replay, fp64 on the host
    target_N     token ids
    gradient_N   of the target's logit, in the job; in fp64
    """

    logits_NV: Tensor
    target_N: Tensor
    gradient_N: Tensor

    def take(self, values_NV: Tensor) -> Tensor:
        """Take the target's value [N] of each position."""
        return values_NV.gather(1, self.target_N[:, None])[:, 0]

    def measure_residual(self, gradient_N: Tensor) -> float:
        """Measure how far the job's gradient is from the nearest multiple of this one, relatively to its length."""
        return measure_distance(self.gradient_N, gradient_N, least=SMALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitTrial:
    """A loss of the logits, with what it was fitted to; `says` is what the job's loss is."""

    name: str
    says: str
    residual: float


def list_logit_trials(logits: TargetLogits) -> Iterator[LogitTrial]:
    """Yield losses, each with the number that fits the job's gradient best."""
    chance_NV = logits.logits_NV.softmax(dim=1)
    chance_N = logits.take(chance_NV)
    log_sum_N = logits.logits_NV.logsumexp(dim=1)
    target_logit_N = logits.take(logits.logits_NV)
    plain_N = chance_N - 1

    temperature, residual = search_number(
        logits, lambda number: (logits.take((logits.logits_NV / number).softmax(dim=1)) - 1) / number, TEMPERATURES
    )
    yield LogitTrial(
        name="temperature",
        says=f"is the cross entropy of logits that are divided by {temperature:.4g}, a temperature",
        residual=residual,
    )
    cap, residual = search_number(logits, lambda number: _differentiate_capped(logits, target_logit_N, number), CAPS)
    yield LogitTrial(name="cap", says=f"is the cross entropy of logits that are capped at {cap:.4g}", residual=residual)
    entropy_N = log_sum_N - (chance_NV * logits.logits_NV).sum(dim=1)
    vocabulary = logits.logits_NV.shape[1]
    terms: Sequence[tuple[str, str, Tensor, bool]] = (
        ("smoothing", "is smoothed: {:.3g} of each label's weight goes to all tokens of the vocabulary",
         torch.full_like(plain_N, 1 - 1 / vocabulary), True),
        ("z-loss", "has a z-loss, of weight {:.3g}, added to it", 2 * log_sum_N * chance_N, True),
        ("entropy", "has an entropy bonus, of weight {:.3g}",
         chance_N * (chance_N.clamp(min=SMALL).log() + entropy_N), False),
    )  # fmt: skip
    for name, says, term_N, is_positive in terms:
        weight = _fit_weight(logits, plain_N, term_N)
        if weight is None or (weight <= 0 and is_positive):
            continue
        if weight < 0:
            says = "punishes entropy, by a weight of {:.3g}: its sign is the other one"
        yield LogitTrial(
            name=name, says=says.format(abs(weight)), residual=logits.measure_residual(plain_N + weight * term_N)
        )
    twice_NV = chance_NV.softmax(dim=1)
    twice_N = chance_N * (logits.take(twice_NV) - 1 - ((twice_NV * chance_NV).sum(dim=1) - chance_N))
    yield LogitTrial(
        name="softmax twice",
        says="is the cross entropy of probabilities, taken for logits: softmax acts twice",
        residual=logits.measure_residual(twice_N),
    )
    yield from _list_left_out(logits, chance_NV, chance_N)


def match_logit_trials(logits: TargetLogits, *, is_coarse: bool) -> list[tuple[LogitTrial, TrialMatch]]:
    """Return the losses whose gradient is the job's, each far nearer to it than that of a mean of cross entropies."""
    plain = logits.measure_residual(logits.take(logits.logits_NV.softmax(dim=1)) - 1)
    bound = MAX_COARSE_RESIDUAL if is_coarse else MAX_RESIDUAL
    if len(logits.target_N) < MANY_VALUES:
        return []
    fitting = [trial for trial in list_logit_trials(logits) if trial.residual <= min(bound, plain / LEAST_GAIN)]
    nearest = max(min((trial.residual for trial in fitting), default=0.0), NEAREST_RESIDUAL)
    fitting = [trial for trial in fitting if trial.residual <= RIVAL_FACTOR * nearest]
    gain = plain / nearest if len(fitting) == 1 else LIKELY_GAIN
    return [(trial, TrialMatch(agrees=True, gain=gain, num_values=len(logits.target_N))) for trial in fitting]


def are_rounded(gradient_N: Tensor) -> bool:
    """Tell whether each of many values is one of bf16, as where logits were cast to it before the loss."""
    return len(gradient_N) >= MANY_VALUES and torch.equal(gradient_N.bfloat16().to(gradient_N.dtype), gradient_N)


def _differentiate_capped(logits: TargetLogits, target_logit_N: Tensor, cap: float) -> Tensor:
    capped_NV = cap * torch.tanh(logits.logits_NV / cap)
    return (logits.take(capped_NV.softmax(dim=1)) - 1) * (1 - torch.tanh(target_logit_N / cap).square())


def search_number(
    logits: TargetLogits, differentiate: Callable[[float], Tensor], bounds: tuple[float, float]
) -> tuple[float, float]:
    """Search the number under which the gradient is nearest to the job's; return it and what is left."""

    def measure(log_number: float) -> float:
        return logits.measure_residual(differentiate(math.exp(log_number)))

    least, most = (math.log(bound) for bound in bounds)
    width = (most - least) / NUM_GRID
    best = min((least + width * place for place in range(NUM_GRID + 1)), key=measure)
    left, right = best - width, best + width
    # By thirds, around the best place of the grid.
    for _ in range(NUM_REFINEMENTS):
        first, second = left + (right - left) / 3, right - (right - left) / 3
        left, right = (left, second) if measure(first) < measure(second) else (first, right)
    best = (left + right) / 2
    return math.exp(best), measure(best)


def _fit_weight(logits: TargetLogits, plain_N: Tensor, term_N: Tensor) -> float | None:
    """Fit the weight of a term beside the mean of cross entropies; None where the two are not told apart."""
    columns_N2 = torch.stack([plain_N, term_N], dim=1)
    solution = torch.linalg.lstsq(columns_N2, logits.gradient_N[:, None]).solution[:, 0]
    factor, weighted = float(solution[0]), float(solution[1])
    return weighted / factor if abs(factor) > SMALL and math.isfinite(weighted) else None


def _list_left_out(logits: TargetLogits, chance_NV: Tensor, chance_N: Tensor) -> Iterator[LogitTrial]:
    """Yield that the logit of one token, or the last logits, are left out of the softmax."""
    tail_NV = chance_NV.flip(1).cumsum(dim=1).flip(1)
    for name, lost_NV, says in (
        ("token left out", chance_NV, "leaves the logit of token {} out of its softmax"),
        ("end left out", tail_NV, "leaves the logits from token {} on out of its softmax"),
    ):
        gradient_NV = chance_N[:, None] / (1 - lost_NV).clamp(min=SMALL) - 1
        factors_V = (logits.gradient_N @ gradient_NV) / gradient_NV.square().sum(dim=0).clamp(min=SMALL)
        rest_V = (logits.gradient_N[:, None] - factors_V.clamp(min=0) * gradient_NV).norm(dim=0)
        token = int(rest_V.argmin())
        residual = logits.measure_residual(gradient_NV[:, token])
        yield LogitTrial(name=name, says=says.format(token), residual=residual)
