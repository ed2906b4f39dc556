"""A tiny model, and which forwards a recording kept."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from capture import capture_files, read_micro_batch


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 4)

    def forward(self, input_ids: Tensor, scale: float = 1.0, fails_with: Any = None) -> Tensor:
        if fails_with is not None:
            raise fails_with
        loss: Tensor = self.embedding(input_ids).sum() * scale
        return loss


def steps_in(folder: Path) -> list[int]:
    return sorted(read_micro_batch(path).origin.step or 0 for path in capture_files(folder))
