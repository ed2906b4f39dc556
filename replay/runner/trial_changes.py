"""List what a model can compute otherwise in one pass: other dtypes, adapters, masks of a layer. Hypotheses as data."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replay.verdict.causes.cause import CauseName

LORA_SCALES = "scaling"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTrial:
    """A hypothesis about what the job's model computed of the same rows.

    change   changes the model within a context
    coarsens the numbers are those of a coarser dtype
    """

    name: str
    cause: CauseName
    says: str
    try_next: str
    change: Callable[[PreTrainedModel], AbstractContextManager[None]]
    coarsens: bool = False


def list_model_trials(model: PreTrainedModel, device_type: str) -> Iterator[ModelTrial]:
    """Yield the hypotheses that apply to this model. The same on every rank."""
    if next(model.parameters()).dtype is torch.float32:
        yield from _list_dtype_trials(device_type)
    if any(_has_scales(module) for module in model.modules()):
        yield from _list_adapter_trials()


def _list_dtype_trials(device_type: str) -> Iterator[ModelTrial]:
    yield ModelTrial(
        name="logits in bf16",
        cause=CauseName.DTYPE,
        says="the job's logits are rounded to bf16 before its loss",
        try_next="look for what casts the logits in the job, or let its head compute in fp32",
        change=round_logits,
        coarsens=True,
    )
    yield ModelTrial(
        name="autocast to bf16",
        cause=CauseName.DTYPE,
        says="the job's forward runs under autocast to bf16",
        try_next="--dtype bf16, or take the autocast out of the job",
        change=lambda model: _run_under_autocast(device_type),
        coarsens=True,
    )


def _list_adapter_trials() -> Iterator[ModelTrial]:
    for name, factor, says in (
        ("adapter twice", 2.0, "the job's adapter acts with twice its scale, as where it is merged and acts once more"),
        ("adapter halved", 0.5, "the job's adapter acts with half its scale"),
        ("no adapter", 0.0, "the job's adapter does not act"),
    ):
        yield ModelTrial(
            name=name,
            cause=CauseName.ADAPTER_SCALE,
            says=says,
            try_next="look at lora_alpha and r in the job, and at what merges, disables or scales its adapter",
            change=lambda model, factor=factor: scale_adapters(model, factor),  # type: ignore[misc]
        )


def _has_scales(module: nn.Module) -> bool:
    return isinstance(getattr(module, LORA_SCALES, None), dict) and hasattr(module, "lora_A")


@contextmanager
def scale_adapters(model: nn.Module, factor: float) -> Iterator[None]:
    """Multiply the scale of every LoRA adapter by `factor` within this context."""
    scales = {module: dict(getattr(module, LORA_SCALES)) for module in model.modules() if _has_scales(module)}
    try:
        for module, scale_by_name in scales.items():
            setattr(module, LORA_SCALES, {name: factor * scale for name, scale in scale_by_name.items()})
        yield
    finally:
        for module, scale_by_name in scales.items():
            setattr(module, LORA_SCALES, scale_by_name)


@contextmanager
def round_logits(model: PreTrainedModel) -> Iterator[None]:
    """Round what the model's head returns to bf16 within this context."""

    def round_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.to(torch.bfloat16).to(output.dtype)

    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ValueError(f"{type(model).__name__} names no head")
    handle = head.register_forward_hook(round_output)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _run_under_autocast(device_type: str) -> Iterator[None]:
    with torch.autocast(device_type, torch.bfloat16):
        yield
