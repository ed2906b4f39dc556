"""Measure how far two lists of log-probs of the same tokens are apart: a rollout engine's, and a replay's.

Shape letters: N action tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from actor_init.as_json import AnyFloat

MAX_LOG_WEIGHT = 80.0  # exp of more would overflow a sum of squares in float64


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """How far the replay's log-probs are from the rollout's, over all action tokens.

    mean, p99, largest   of the absolute differences
    shift                mean of replay minus rollout
    kl_k1, kl_k3         estimates of KL(rollout || replay) in nats a token, from the rollout's samples
    ess_tokens           effective sample size of the tokens' importance weights exp(replay - rollout), as a share of N
    ess_sequences        the same of whole sequences, whose weight is the product of their tokens'
    """

    num_tokens: int
    num_sequences: int
    mean: AnyFloat
    p99: AnyFloat
    largest: AnyFloat
    shift: AnyFloat
    kl_k1: AnyFloat
    kl_k3: AnyFloat
    ess_tokens: AnyFloat
    ess_sequences: AnyFloat


def mismatch_of(rollout_N: Tensor, replay_N: Tensor, sequence_N: Tensor) -> Mismatch:
    """Compare log-probs in float64; `sequence_N` numbers the sequence of each token from 0. There must be a token."""
    apart_N = replay_N.double() - rollout_N.double()
    sizes_N = apart_N.abs()
    numbers, index_N = sequence_N.unique(return_inverse=True)
    by_sequence = torch.zeros(len(numbers), dtype=torch.float64).index_add(0, index_N, apart_N)
    return Mismatch(
        num_tokens=len(apart_N),
        num_sequences=len(numbers),
        mean=sizes_N.mean().item(),
        p99=sizes_N.sort().values[min(len(sizes_N) - 1, int(0.99 * len(sizes_N)))].item(),
        largest=sizes_N.max().item(),
        shift=apart_N.mean().item(),
        kl_k1=-apart_N.mean().item(),
        kl_k3=(torch.expm1(apart_N) - apart_N).mean().item(),
        ess_tokens=effective_share(apart_N),
        ess_sequences=effective_share(by_sequence),
    )


def effective_share(log_weights: Tensor) -> float:
    """Return (sum of weights)^2 / (number x sum of squared weights): 1 where all are equal, 1 / number where one rules.

    A common factor changes nothing, so the largest weight is taken for 1.
    """
    weights = (log_weights - log_weights.max()).clamp(min=-MAX_LOG_WEIGHT).exp()
    return float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))
