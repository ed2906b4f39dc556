"""Declare flash-attn 2 and ring-flash-attn.

The forms for padded rows are transformers' own, which unpad and pad in every layer.
"""

from importlib.util import find_spec

from actor_init.declarations.attention.declaration import RING_REFUSAL, AttentionForm, AttentionKernel, KernelLimits
from actor_init.option_values import Attention, Dtype
from capture.facts import Setting

CUDA = ("cuda",)
EAGER, FLEX, SDPA = (Setting("attention", value) for value in (Attention.EAGER, Attention.FLEX, Attention.SDPA))
ON_CUDA = f"{SDPA}, or on a CUDA machine pip install -e '.[cuda]' and {Setting('dtype', Dtype.BF16)}"


def has_flash() -> bool:
    # Where flash-attn 4 alone is installed, it leaves a folder of this name without a module: then there is a spec that
    # has no origin.
    spec = find_spec("flash_attn")
    return spec is not None and spec.origin is not None


def has_ring_flash() -> bool:
    return find_spec("ring_flash_attn") is not None and find_spec("flash_attn") is not None


FLASH_ATTN = KernelLimits(
    title="flash-attn",
    package="flash-attn",
    is_installed=has_flash,
    devices=CUDA,
    has_fp32=False,
    advice=ON_CUDA,
    missing_features={"s_aux": "attention sinks"},
    refusal=f"flash-attn has no attention sinks, which this model needs. Try: {FLEX}, or {EAGER}",
)
RING_FLASH_ATTN = KernelLimits(
    title="ring-flash-attn",
    package="ring-flash-attn",
    is_installed=has_ring_flash,
    devices=CUDA,
    has_fp32=False,
    advice=ON_CUDA,
    missing_features={"softcap": "softcap", "s_aux": "sinks"},
    refusal=RING_REFUSAL,
)

FLASH = AttentionKernel(
    option_value=Attention.FLASH,
    packed=AttentionForm(
        name="packed_fa2",
        limits=FLASH_ATTN,
        function="actor_init.attention.kernels:flash_attn_varlen",
        is_expected_on_gpu=True,
    ),
    padded=AttentionForm(name="flash_attention_2", limits=FLASH_ATTN, is_expected_on_gpu=True),
    slices=AttentionForm(
        name="ring_fa2",
        limits=RING_FLASH_ATTN,
        function="actor_init.attention.ring_attention:ring_flash_attn",
        is_expected_on_gpu=True,
    ),
    job_names=("flash_attention_2", "kernels-community/flash-attn2"),
    alternative="varlen or sdpa",
)
