"""Declare cuDNN's attention, which plans each kind of call once: 90 ms for a new length."""

from collections.abc import Sequence

from actor_init.declarations.attention.declaration import AttentionForm, AttentionKernel, KernelLimits
from actor_init.option_values import Attention
from capture.facts import Setting


def has_cudnn() -> bool:
    import torch

    return bool(torch.backends.cudnn.is_available())


def plan_rows(rows: int, num_tokens: int, lengths: Sequence[int]) -> set[tuple[int, int]]:
    return {(rows, num_tokens)}


def plan_documents(rows: int, num_tokens: int, lengths: Sequence[int]) -> set[tuple[int, int]]:
    return {(1, length) for length in lengths if length > 1}


FLASH, SDPA = Setting("attention", Attention.FLASH), Setting("attention", Attention.SDPA)
# Its backward takes heads of this width on every device that cuDNN has kernels for; wider ones it takes on some.
MAX_HEAD_DIM = 128
LIMITS = KernelLimits(
    title="cuDNN's attention",
    is_installed=has_cudnn,
    devices=("cuda",),
    has_fp32=False,
    missing_features={
        "dropout": "dropout",
        "softcap": "softcap",
        "s_aux": "attention sinks",
        # A window that is as long as the longest document changes nothing and is not refused.
        "sliding_window": "sliding window (here {window} of {longest} tokens)",
    },
    max_head_dim=MAX_HEAD_DIM,
    refusal=f"cuDNN's attention has no {{lacking}}, which this model needs. Try: {FLASH}, or {SDPA}",
)
CUDNN = AttentionKernel(
    option_value=Attention.CUDNN,
    packed=AttentionForm(
        name="packed_cudnn",
        limits=LIMITS,
        function="actor_init.attention.cudnn:cudnn_packed",
        is_expected_on_gpu=True,
        plan_calls=plan_documents,
    ),
    padded=AttentionForm(
        name="padded_cudnn",
        limits=LIMITS,
        function="actor_init.attention.cudnn:cudnn_padded",
        is_expected_on_gpu=True,
        # This mask is [B, S], or None where nothing is padding.
        mask_function="transformers.masking_utils:flash_attention_mask",
        allows_padding_between_tokens=False,
        plan_calls=plan_rows,
    ),
)
# It takes slices of one long document alone: auto calls it beside another form, and --attention cudnn has no ring.
RING_CUDNN = AttentionForm(name="ring_cudnn", limits=LIMITS, function="actor_init.attention.ring_attention:ring_cudnn")
