"""A loop in plain torch: bare, torch.compile'd, checkpointed from inside, or with a checkpoint around the model.

python plain_loop.py FOLDER [bare | compiled | checkpointing | outer-checkpoint]
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.trainers.common import make_batches, make_model, write_losses


def main(folder: Path, kind: str) -> None:
    model: Any = make_model(folder)
    if kind == "compiled":
        model = torch.compile(model, backend="eager")
    if kind == "checkpointing":
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    losses = []
    with torch.no_grad():
        model(**make_batches()[0])  # before training, without autograd: not the search's business
    for batch in make_batches():
        called: Any = partial(checkpoint, model, use_reentrant=False) if kind == "outer-checkpoint" else model
        output = called(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    write_losses(folder, losses)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
