"""List what a model can compute otherwise in one pass: other dtypes, adapters, masks of a layer. Hypotheses as data."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from actor_init.declarations.attention.plain import SDPA_FORM
from actor_init.model import find_blocks
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


def list_model_trials(model: PreTrainedModel, visible_BSS: Tensor, *, is_fp32: bool) -> Iterator[ModelTrial]:
    """Yield the hypotheses that apply to this model. The same on every rank.

    visible_BSS  what each token would see if attention were not causal, on the model's device
    is_fp32      the model computes in fp32
    """
    has_sdpa = getattr(getattr(model, "config", None), "_attn_implementation", None) == SDPA_FORM.name
    if is_fp32:
        yield from _list_dtype_trials(visible_BSS.device.type)
    if is_fp32 and has_sdpa:
        yield ModelTrial(
            name="attention in bf16",
            cause=CauseName.KERNEL,
            says="the job's attention computes in bf16, in a model that computes in fp32",
            try_next="let the job's attention compute in fp32 too (sdpa, not flash), or --dtype bf16 for all",
            change=attend_in_bf16,
            coarsens=True,
        )
    if has_sdpa:
        for name, number in (("first", 0), ("last", -1)):
            yield ModelTrial(
                name=f"{name} layer not causal",
                cause=CauseName.MASK,
                says=f"the attention of the job's {name} layer is not causal",
                try_next=f"look at the mask that the {name} layer of the job's model is given",
                change=lambda model, number=number: see_all_in_layer(model, number, visible_BSS),  # type: ignore[misc]
            )
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

    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if not isinstance(head, nn.Module):
        raise ValueError(f"{type(model).__name__} names no head")
    handle = head.register_forward_hook(round_output)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def attend_in_bf16(model: nn.Module) -> Iterator[None]:
    """Let torch's sdpa compute in bf16 within this context, in every model."""
    attend = AttentionInterface()[SDPA_FORM.name]

    def attend_rounded(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        if mask is not None and mask.is_floating_point():
            mask = mask.to(torch.bfloat16)
        rounded = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
        output, weights = attend(module, *rounded, mask, **options)
        return output.to(query.dtype), weights

    AttentionInterface.register(SDPA_FORM.name, attend_rounded)
    try:
        yield
    finally:
        AttentionInterface.register(SDPA_FORM.name, attend)


@contextmanager
def see_all_in_layer(model: PreTrainedModel, number: int, visible_BSS: Tensor) -> Iterator[None]:
    """Give one layer the mask `visible_BSS` within this context. Its forward raises where it takes no mask by name."""

    def replace_mask(module: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "attention_mask" not in options:
            raise ValueError(f"{type(module).__name__} takes no attention_mask by name")
        return args, {**options, "attention_mask": visible_BSS[:, None]}

    _, layer = find_blocks(model)[number]
    handle = layer.register_forward_pre_hook(replace_mask, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _run_under_autocast(device_type: str) -> Iterator[None]:
    with torch.autocast(device_type, torch.bfloat16):
        yield
