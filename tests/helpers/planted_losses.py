"""Losses of --loss FILE.py:FUNCTION that fail for certain inputs, and a model whose layers do."""

import os
import time
from typing import Any

import torch
from torch import Tensor, nn

TOKEN, EARLIER = 3, 4  # the inputs hold them where a failure is planted
SIZE = 30  # tokens, of all rows, that there is no memory for
_seen: list[bool] = []


def has(inputs: Any, token: int) -> bool:
    return bool((inputs.tensors["sequences"] == token).any())


def usual(inputs: Any) -> Tensor:
    loss: Tensor = -inputs.log_probs_BA.sum() / inputs.action_mask_BA.sum().clamp(min=1)
    return loss


def raises(inputs: Any) -> Tensor:
    if has(inputs, TOKEN):
        raise ZeroDivisionError(f"a planted failure in {inputs.log_probs_BA.numel()} tokens")
    return usual(inputs)


def overflows(inputs: Any) -> Tensor:
    """Scale the loss as for fp16: the scale of one token is too large for it."""
    is_it = inputs.tensors["sequences"][:, -inputs.log_probs_BA.shape[1] :] == TOKEN
    scaled = (inputs.log_probs_BA.double() * torch.where(is_it, 2.0**16, 1.0)).half()
    loss: Tensor = -scaled.float().sum() / inputs.action_mask_BA.sum().clamp(min=1)
    return loss


def raises_after_another(inputs: Any) -> Tensor:
    if _seen and has(inputs, TOKEN):
        raise RuntimeError("a planted failure, after a pass with the other token")
    if has(inputs, EARLIER):
        _seen.append(True)
    return usual(inputs)


def hangs(inputs: Any) -> Tensor:
    while has(inputs, TOKEN):
        time.sleep(1.0)
    return usual(inputs)


def has_no_memory(inputs: Any) -> Tensor:
    if inputs.log_probs_BA.numel() > SIZE:
        raise torch.OutOfMemoryError(f"planted: tried to allocate {inputs.log_probs_BA.numel()} tokens")
    return usual(inputs)


def raises_on_rank_1(inputs: Any) -> Tensor:
    if os.environ.get("RANK") == "1" and has(inputs, TOKEN):
        raise RuntimeError("a planted failure on one rank")
    return usual(inputs)


class Layer(nn.Module):
    def __init__(self, fails_in: torch.dtype | None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.fails_in = fails_in

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        is_value = type(ids) is Tensor and not ids.is_meta
        if self.fails_in is None and is_value and bool((ids == TOKEN).any()):
            raise IndexError(f"a planted failure in a layer, of {ids.numel()} tokens")
        if self.linear.weight.dtype is self.fails_in and is_value:
            raise TypeError(f"a planted failure in {self.fails_in}")
        y: Tensor = x + self.linear(x)
        return y


class Model(nn.Module):
    def __init__(self, fails_in: torch.dtype | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.layers = nn.ModuleList([Layer(fails_in) for _ in range(4)])
        self.head = nn.Linear(8, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, input_ids)
        y: Tensor = self.head(x)
        return y


class CompiledWrongly(Layer):
    """Its compiled form gives another number for one token."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y: Tensor = x + self.linear(x)
        if torch.compiler.is_compiling():
            y = torch.where((ids == TOKEN)[..., None], 1.5 * y, y)
        return y


def compiled_wrongly() -> Model:
    model = Model()
    model.layers = nn.ModuleList([CompiledWrongly(None) for _ in range(4)])
    return model


def fails_in_fp32() -> Model:
    return Model(torch.float32)
