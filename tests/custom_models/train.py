"""Train a NanoGPT in plain PyTorch and record it: python -m tests.custom_models.train FOLDER, or under torchrun.

It saves its weights in FOLDER/ckpt.pt as such scripts do, with what torch.compile puts before the names. At learning
rate 0, so that they are those of every step.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from capture import recording
from tests.custom_models.nano import IGNORED, Config, Recorded
from tests.trainers.common import rank

NUM_STEPS = 3


def main(folder: Path) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    plain = Recorded(Config())
    model: Any = plain
    if world_size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(plain)
    if rank() == 0:
        named = {f"_orig_mod.{name}": values for name, values in plain.state_dict().items()}
        torch.save({"model": named, "iter_num": 3}, folder / "ckpt.pt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(1 + rank())
    with recording(model, folder / "captures", reproduce=True):
        for number in range(NUM_STEPS):
            ids_BS = torch.randint(1, 64, (2, 10 + number), generator=generator)
            labels_BS = ids_BS.clone()
            labels_BS[:, :3] = IGNORED
            model(input_ids=ids_BS, labels=labels_BS)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
