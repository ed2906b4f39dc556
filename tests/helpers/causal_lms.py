"""Small causal LMs that `capture run` looks for."""

from typing import Any

import torch
from torch import Tensor, nn

IDS_BS = torch.tensor([[0, 5, 9, 7], [3, 3, 0, 0]])


class Config:
    model_type = "tiny"

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "tiny"}


class Tiny(nn.Module):
    def __init__(self, head: nn.Module | None = None) -> None:
        super().__init__()
        self.config = Config()
        self.embedding = nn.Embedding(16, 4)
        self.head = head

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
        embedded: Tensor = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds * 1
        return embedded if self.head is None else self.head(embedded)


class Outer(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


def lm() -> Tiny:
    return Tiny(head=nn.Linear(4, 16))
