"""Recordings of ranks that make passes by a plan, one after the other in one process: nothing makes them meet."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from capture import recording

VOCABULARY = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One pass, and what the loop does behind it.

    seed          of the tokens; None: the rank and the number of the pass
    num_real      real tokens of the longest row; None: all
    with_second   the second head takes part
    clips, steps  before the optimizer's step, and whether there is one
    """

    trains: bool = True
    rows: int = 2
    length: int = 8
    num_real: int | None = None
    seed: int | None = None
    backward: bool = True
    with_second: bool = True
    in_bf16: bool = False
    clips: bool = False
    steps: bool = True


class TwoHeads(nn.Module):
    """A model of an embedding and two heads, which trains both or one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, with_second: bool = True
    ) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        value = self.first(hidden).float().square().mean()
        if with_second:
            value = value + self.second(hidden).float().square().mean()
        return {"loss": value}


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    # a test before may have left a process group, whose rank would count
    with patch.dict("os.environ", environment), patch("torch.distributed.is_initialized", lambda: False):
        yield


def record_rank(
    folder: Path, rank: int, plan: Sequence[Planned], *, world_size: int, freezes: bool = False, **settings: Any
) -> None:
    """Record one rank. `settings` are those of a recording; `freezes` takes the second head out of the training."""
    model = TwoHeads()
    model.second.requires_grad_(not freezes)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
    with as_rank(rank, world_size), recording(model, folder, reproduce=True, **settings):
        for number, planned in enumerate(plan):
            _make(model, optimizer, planned, 100 * rank + number if planned.seed is None else planned.seed)


def _make(model: TwoHeads, optimizer: torch.optim.Optimizer, planned: Planned, seed: int) -> None:
    shape, generator = (planned.rows, planned.length), torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(VOCABULARY, shape, generator=generator)
    mask_BS = torch.ones(shape, dtype=torch.long)
    mask_BS[:, planned.length if planned.num_real is None else planned.num_real :] = 0
    with torch.set_grad_enabled(planned.trains), torch.autocast("cpu", torch.bfloat16, enabled=planned.in_bf16):
        output = model(ids_BS, attention_mask=mask_BS, with_second=planned.with_second)
    if not planned.trains:
        return
    if planned.backward:
        output["loss"].backward()
    if planned.steps:
        if planned.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def record_job(
    folder: Path,
    plans: Sequence[Sequence[Planned]],
    *,
    world_size: int | None = None,
    of_rank: Mapping[int, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> Path:
    """Record all ranks, the last first: rank 0 looks at its end for what the others left."""
    for rank in reversed(range(len(plans))):
        own = (of_rank or {}).get(rank, {})
        record_rank(folder, rank, plans[rank], world_size=world_size or len(plans), **settings, **own)
    return folder
