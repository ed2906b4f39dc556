"""Modules and functions that a user may name by mistake, and some that are unusual and right."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Tiny(nn.Module):
    def __init__(self, vocabulary: int = 64, num_layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, vocabulary)

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        y: Tensor = self.head(self.norm(x))
        return y

    def forward(self, tokens: Tensor) -> Any:
        return self.logits(tokens)


class Sequence(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers)  # type: ignore[assignment]


class Pixels(Tiny):
    def forward(self, *, pixel_values: Tensor) -> Any:  # type: ignore[override]
        return pixel_values


class Needs(Tiny):
    def forward(self, tokens: Tensor, rope: Tensor) -> Any:  # type: ignore[override]
        return self.logits(tokens) + rope


class Hidden(Tiny):
    def forward(self, tokens: Tensor) -> Any:
        return self.logits(tokens).mean(dim=-1)


class LossAlone(Tiny):
    def forward(self, tokens: Tensor) -> Any:
        return {"loss": self.logits(tokens).mean()}


class LastToken(Tiny):
    def forward(self, tokens: Tensor) -> Any:
        return self.logits(tokens)[:, -1:]


class Masked(Tiny):
    """Takes a mask and positions by keyword, and answers with an object."""

    def forward(self, x: Tensor, *, attention_mask: Tensor, position_ids: Tensor) -> Any:  # type: ignore[override]
        assert attention_mask.dtype == torch.long
        return Answer(self.logits(x) + position_ids[..., None] * 0.01 * (1 - attention_mask[..., None]))


class Answer:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Rotary(Tiny):
    """Keeps a table as a plain tensor and another as a buffer, ties by hand, and reads numbers as it is built."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.zeros(64, 8))
        self.embedding.weight = shared
        self.head.weight = shared
        self.table = torch.linspace(0, 1, 8)
        self.register_buffer("other", torch.linspace(1, 2, 8))
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]

    def forward(self, tokens: Tensor) -> Any:
        return self.logits(tokens) + self.table.sum() + self.get_buffer("other").sum()


class Mixture(Tiny):
    """Multiplies by two experts at once, as transformers' mixtures do: torch has no fake form of that in fp32."""

    def __init__(self) -> None:
        super().__init__(vocabulary=264)
        self.experts = nn.Parameter(torch.zeros(2, 8, 8))

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        ends = torch.tensor([ids.numel() // 2, ids.numel()], dtype=torch.int32)
        y: Tensor = self.head(x + torch._grouped_mm(x.flatten(0, 1), self.experts, offs=ends).view_as(x))
        return y


def raises() -> nn.Module:
    raise RuntimeError("no such\nmodel")


def leaves() -> nn.Module:
    raise SystemExit(3)


def nothing() -> None:
    return None


def needs_one(config: dict[str, int]) -> nn.Module:
    return Tiny(config["vocab_size"])


def takes_one(config: dict[str, int] | None = None) -> nn.Module:
    return Tiny(64 if config is None else config["vocab_size"])


def needs_two(config: dict[str, int], other: Callable[[], None]) -> nn.Module:
    return Tiny()


def loads() -> nn.Module:
    module = Tiny()
    module.load_state_dict({name: torch.ones(parameter.shape) for name, parameter in module.state_dict().items()})
    return module


ONE = Tiny()


def the_same() -> nn.Module:
    return ONE
