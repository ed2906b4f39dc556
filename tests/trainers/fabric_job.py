"""Lightning's Fabric with its own launcher, on CPUs: python fabric_job.py FOLDER DEVICES

A pass without autograd between the steps is an evaluation.
"""

import sys
from pathlib import Path

import torch
from lightning import Fabric

from tests.trainers.common import make_batches, make_model, write_losses


def main(folder: Path, devices: int) -> None:
    fabric = Fabric(accelerator="cpu", devices=devices)
    fabric.launch()
    model = make_model(folder)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    losses = []
    for batch in make_batches():
        loss = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            model(**batch)
    write_losses(folder, losses)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
