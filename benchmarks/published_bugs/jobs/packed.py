"""Documents packed into one row, in a plain loop: python packed.py with-mask|without-mask FOLDER"""

import sys
from pathlib import Path

import torch

from benchmarks.published_bugs.jobs.common import make_model

LENGTHS = (9, 14, 6)


def main(kind: str, folder: Path) -> None:
    model = make_model(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        ids_BS = torch.randint(1, 64, (1, sum(LENGTHS)), generator=generator)
        labels_BS, positions_BS = ids_BS.clone(), torch.cat([torch.arange(length) for length in LENGTHS])[None]
        labels_BS[positions_BS == 0] = -100  # no document's last token predicts the next one's first
        mask = {"attention_mask": torch.ones_like(ids_BS)} if kind == "with-mask" else {}
        model(input_ids=ids_BS, position_ids=positions_BS, labels=labels_BS, **mask).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
