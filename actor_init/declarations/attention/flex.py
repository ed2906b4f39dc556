"""Declare torch's flex attention as transformers calls it."""

from typing import Any

from actor_init.declarations.attention.declaration import (
    AttentionForm,
    AttentionKernel,
    KernelLimits,
    is_taken_by_class,
)
from actor_init.option_values import Attention
from capture.facts import Setting

PLAIN = f"{Setting('attention', Attention.SDPA)}, or {Setting('attention', Attention.EAGER)}"
# Triton multiplies no narrower matrices.
MIN_HEAD_DIM = 16


def find_flex_obstacle(config: Any) -> str:
    """Return why flex attention cannot compute a model of this config; empty if it can."""
    if not is_taken_by_class(config, "_supports_flex_attn"):
        return f"transformers has no flex_attention for {config.model_type}. Try: {PLAIN}"
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head_dim < MIN_HEAD_DIM:
        return f"flex attention has no heads of less than {MIN_HEAD_DIM} (here {head_dim}). Try: {PLAIN}"
    return ""


LIMITS = KernelLimits(
    title="the backward of flex attention",
    devices=("cuda",),
    advice=PLAIN,
    missing_features={"dropout": "dropout"},
    refusal=f"flex attention has no {{lacking}}, which this model needs. Try: {PLAIN}",
)
# transformers' own name: a class is asked whether it takes the kernel, and some make other masks for it.
FLEX_FORM = AttentionForm(
    name="flex_attention",
    limits=LIMITS,
    function="actor_init.attention.flex:flex_attention",
    mask_function="actor_init.attention.flex:make_block_mask",
    reads_mask=True,
    skips_blocks=True,
)
FLEX = AttentionKernel(
    option_value=Attention.FLEX,
    packed=FLEX_FORM,
    padded=FLEX_FORM,
    job_names=("flex_attention",),
    find_obstacle=find_flex_obstacle,
    alternative="flash, sdpa or eager",
)
