"""Collect the action tokens of micro-batches: where each is, and the log-probs that rollout and replays gave it.

Shape letters: B rows, S tokens a row, A trailing tokens of a row that the action mask covers, N action tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replay.objective.inputs import ObjectiveInputs
from replay.objective.names import ROLLOUT_LOG_PROBS


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
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


def tokens_of(inputs: ObjectiveInputs, sequences_BS: Tensor) -> Tokens:
    """Collect what one pass computed. Raises ObjectiveError without the rollout's log-probs."""
    rollout_BA = inputs.of_tokens(*ROLLOUT_LOG_PROBS).cpu()
    row_N, action_N = inputs.action_mask_BA.cpu().nonzero(as_tuple=True)
    num_tokens, num_actions = sequences_BS.shape[1], rollout_BA.shape[1]
    column_N = action_N + num_tokens - num_actions
    with_edges = torch.nn.functional.pad(sequences_BS, (1, 1), value=-1)
    return Tokens(
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
    rollout: float
    replays: Sequence[float]
    before: tuple[int, float | None]
    after: tuple[int, float | None]


def worst_tokens(cells: Sequence[Sequence[Tokens]], number: int) -> list[WorstToken]:
    """Return the tokens on which the first cell is farthest from the rollout, farthest first.

    cells  the same micro-batches, in the same order, in each
    """
    apart = [(one.replay_N - one.rollout_N).double() for one in cells[0]]
    places = [
        (float(size), batch, place) for batch, sizes in enumerate(apart) for place, size in enumerate(sizes.abs())
    ]
    places.sort(key=lambda one: (-one[0], one[1], one[2]))
    worst: list[WorstToken] = []
    for _, batch, place in places[:number]:
        one = cells[0][batch]
        row, column = int(one.row_N[place]), int(one.column_N[place])
        beside = {(int(r), int(c)): float(d) for r, c, d in zip(one.row_N, one.column_N, apart[batch], strict=True)}
        worst.append(
            WorstToken(
                source=one.source,
                row=row,
                column=column,
                token=int(one.id_N[place]),
                rollout=float(one.rollout_N[place]),
                replays=[float(cell[batch].replay_N[place]) for cell in cells],
                before=(int(one.before_N[place]), beside.get((row, column - 1))),
                after=(int(one.after_N[place]), beside.get((row, column + 1))),
            )
        )
    return worst
