"""A small GPT in plain PyTorch, as people write their own: no transformers, nothing that the tool knows.

Its forward names `idx`, returns a tuple, ties the embedding and the head, has a causal mask as a buffer, and dropout of
its own where it is asked for. Without targets it computes the last token's logits alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100


@dataclass
class Config:
    vocab_size: int = 64
    block_size: int = 32
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.0


class Attention(nn.Module):
    mask: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.scale = (config.n_embd // config.n_head) ** -0.5
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        ones = torch.ones(config.block_size, config.block_size, dtype=torch.bool)
        self.register_buffer("mask", torch.tril(ones), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            projected.view(rows, length, self.n_head, -1).transpose(1, 2)
            for projected in self.c_attn(x).split(width, dim=2)
        )
        scores = q @ k.transpose(-2, -1) * self.scale
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        out = self.dropout(F.softmax(scores, dim=-1)) @ v
        y: Tensor = self.c_proj(out.transpose(1, 2).reshape(rows, length, width))
        return y


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        y: Tensor = x + self.proj(F.gelu(self.fc(self.ln_2(x))))
        return y


class NanoGPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        embedding: Any = self.transformer["wte"]
        self.lm_head.weight = embedding.weight
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.2)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def hidden(self, idx: Tensor) -> Tensor:
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1], device=idx.device))
        blocks: Any = self.transformer["h"]
        for block in blocks:
            x = block(x)
        y: Tensor = self.transformer["ln_f"](x)
        return y

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.hidden(idx)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class Recorded(NanoGPT):
    """The same weights and numbers, called and answering as a recording knows it: the loss is of shifted labels."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.lm_head(self.hidden(input_ids))
        if labels is None:
            return {"logits": logits}
        shifted = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        return {"logits": logits, "loss": shifted}


def build() -> nn.Module:
    return NanoGPT(Config())


def build_from(config: dict[str, int]) -> nn.Module:
    return NanoGPT(Config(**config))


def build_unscaled() -> nn.Module:
    """Return a model with a fault: scores that are not divided by the square root of the width."""
    model = NanoGPT(Config())
    for module in model.modules():
        if isinstance(module, Attention):
            module.scale = 1.0
    return model
