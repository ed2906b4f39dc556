"""Measure how far two lists of log-probs of the same tokens are apart: a rollout engine's, and a replay's.

The tokens are the action tokens of micro-batches.

Shape letters: B rows, S tokens a row, A columns of the action mask (the last tokens of each row), N action tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actor_init.as_json import AnyFloat
from replay.objective.inputs import ObjectiveInputs
from replay.options.declarations.tensor_names import ROLLOUT_LOG_PROBS


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionTokens:
    """The action tokens of one micro-batch, [N] each, on the CPU.

    sequence_N  number of the token's sequence in the micro-batch
    column_N    its column in the captured row
    before_N, after_N  ids of the row's tokens beside it; -1 where there is none
    """

    source: str
    row_N: Tensor
    column_N: Tensor
    sequence_N: Tensor
    id_N: Tensor
    before_N: Tensor
    after_N: Tensor
    rollout_N: Tensor
    replay_N: Tensor


def collect_action_tokens(inputs: ObjectiveInputs, sequences_BS: Tensor) -> ActionTokens:
    """Collect what one pass computed. Raises ObjectiveError without the rollout's log-probs."""
    rollout_BA = inputs.of_tokens(*ROLLOUT_LOG_PROBS).cpu()
    row_N, action_N = inputs.action_mask_BA.cpu().nonzero(as_tuple=True)
    num_tokens, num_actions = sequences_BS.shape[1], rollout_BA.shape[1]
    column_N = action_N + num_tokens - num_actions
    with_edges = torch.nn.functional.pad(sequences_BS, (1, 1), value=-1)
    return ActionTokens(
        source=inputs.recorded.source,
        row_N=row_N,
        column_N=column_N,
        sequence_N=inputs.recorded.sequence_BA.cpu()[row_N, action_N],
        id_N=sequences_BS[row_N, column_N],
        before_N=with_edges[row_N, column_N],
        after_N=with_edges[row_N, column_N + 2],
        rollout_N=rollout_BA[row_N, action_N],
        replay_N=inputs.log_probs_BA.detach().float().cpu()[row_N, action_N],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstToken:
    """One token on which rollout and replay are far apart.

    replays        its log-prob in each replay, in the order of the cells
    before, after  ids of its neighbours, and how far the first replay is from the rollout there; None without any
    """

    source: str
    row: int
    column: int
    token: int
    rollout: AnyFloat
    replays: Sequence[AnyFloat]
    before: tuple[int, AnyFloat | None]
    after: tuple[int, AnyFloat | None]


def find_worst_tokens(cells: Sequence[Sequence[ActionTokens]], number: int) -> list[WorstToken]:
    """Return the tokens on which the first cell is farthest from the rollout, farthest first.

    cells  the same micro-batches, in the same order, in each
    """
    differences = [(tokens.replay_N - tokens.rollout_N).double() for tokens in cells[0]]
    places = [
        (float(size), batch, index)
        for batch, difference_N in enumerate(differences)
        for index, size in enumerate(difference_N.abs())
    ]
    places.sort(key=lambda place: (-place[0], place[1], place[2]))
    worst: list[WorstToken] = []
    for _, batch, index in places[:number]:
        tokens = cells[0][batch]
        row, column = int(tokens.row_N[index]), int(tokens.column_N[index])
        positions = zip(tokens.row_N.tolist(), tokens.column_N.tolist(), strict=True)
        by_position = dict(zip(positions, differences[batch].tolist(), strict=True))
        worst.append(
            WorstToken(
                source=tokens.source,
                row=row,
                column=column,
                token=int(tokens.id_N[index]),
                rollout=float(tokens.rollout_N[index]),
                replays=[float(cell[batch].replay_N[index]) for cell in cells],
                before=(int(tokens.before_N[index]), by_position.get((row, column - 1))),
                after=(int(tokens.after_N[index]), by_position.get((row, column + 1))),
            )
        )
    return worst


# The exponential of more would overflow a sum of squares in float64.
MAX_LOG_WEIGHT = 80.0


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


def measure_mismatch(rollout_N: Tensor, replay_N: Tensor, sequence_N: Tensor) -> Mismatch:
    """Compare log-probs in float64; `sequence_N` numbers the sequence of each token from 0. There must be a token."""
    difference_N = replay_N.double() - rollout_N.double()
    sizes_N = difference_N.abs()
    numbers, index_N = sequence_N.unique(return_inverse=True)
    by_sequence = torch.zeros(len(numbers), dtype=torch.float64).index_add(0, index_N, difference_N)
    return Mismatch(
        num_tokens=len(difference_N),
        num_sequences=len(numbers),
        mean=sizes_N.mean().item(),
        p99=sizes_N.sort().values[min(len(sizes_N) - 1, int(0.99 * len(sizes_N)))].item(),
        largest=sizes_N.max().item(),
        shift=difference_N.mean().item(),
        kl_k1=-difference_N.mean().item(),
        kl_k3=(torch.expm1(difference_N) - difference_N).mean().item(),
        ess_tokens=compute_effective_share(difference_N),
        ess_sequences=compute_effective_share(by_sequence),
    )


def compute_effective_share(log_weights: Tensor) -> float:
    """Return (sum of weights)^2 / (number x sum of squared weights): 1 where all are equal, 1 / number where one rules.

    A common factor changes nothing, so the largest weight is taken for 1.
    """
    weights = (log_weights - log_weights.max()).clamp(min=-MAX_LOG_WEIGHT).exp()
    return float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))
