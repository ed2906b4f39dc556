"""Declare cuDNN's attention, which plans each kind of call once: 90 ms for a new length."""

from collections.abc import Sequence

from actor_init.declarations.attention.declaration import Form, Kernel, Limits
from actor_init.toggles import Attention
from capture.facts import Setting


def has_cudnn() -> bool:
    import torch

    return bool(torch.backends.cudnn.is_available())


def plan_rows(rows: int, num_tokens: int, lengths: Sequence[int]) -> set[tuple[int, int]]:
    return {(rows, num_tokens)}


def plan_documents(rows: int, num_tokens: int, lengths: Sequence[int]) -> set[tuple[int, int]]:
    return {(1, length) for length in lengths if length > 1}


FLASH, SDPA = Setting("attention", Attention.FLASH), Setting("attention", Attention.SDPA)
MAX_HEAD_DIM = 128  # of its backward on every device that it has kernels for
LIMITS = Limits(
    title="cuDNN's attention",
    is_installed=has_cudnn,
    devices=("cuda",),
    has_fp32=False,
    lacks={
        "dropout": "dropout",
        "softcap": "softcap",
        "s_aux": "attention sinks",
        "sliding_window": "sliding window (here {window} of {longest} tokens)",  # one that is shorter than a document
    },
    max_head_dim=MAX_HEAD_DIM,
    refusal=f"cuDNN's attention has no {{lacking}}, which this model needs. Try: {FLASH}, or {SDPA}",
)
CUDNN = Kernel(
    word=Attention.CUDNN,
    packed=Form(
        name="packed_cudnn",
        limits=LIMITS,
        function="actor_init.attention.cudnn:cudnn_packed",
        is_expected=True,
        planned=plan_documents,
    ),
    padded=Form(
        name="padded_cudnn",
        limits=LIMITS,
        function="actor_init.attention.cudnn:cudnn_padded",
        is_expected=True,
        mask="transformers.masking_utils:flash_attention_mask",  # [B, S], or None where nothing is padding
        takes_holes=False,
        planned=plan_rows,
    ),
)
# It takes slices of one long document alone: auto calls it beside another form, and --attention cudnn has no ring.
RING_CUDNN = Form(name="ring_cudnn", limits=LIMITS, function="actor_init.attention.ring_attention:ring_cudnn")
