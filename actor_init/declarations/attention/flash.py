"""Declare flash-attn 2 and ring-flash-attn.

The forms for padded rows are transformers' own, which unpad and pad in every layer.
"""

from importlib.util import find_spec

from actor_init.declarations.attention.declaration import RING_REFUSAL, Form, Kernel, Limits
from actor_init.toggles import Attention, Dtype
from capture.facts import Setting

CUDA = ("cuda",)
EAGER, SDPA = (Setting("attention", word) for word in (Attention.EAGER, Attention.SDPA))
ON_CUDA = f"{SDPA}, or on a CUDA machine pip install -e '.[cuda]' and {Setting('dtype', Dtype.BF16)}"


def has_flash() -> bool:
    # flash-attn 4 alone leaves a folder of this name without a module
    found = find_spec("flash_attn")
    return found is not None and found.origin is not None


def has_ring_flash() -> bool:
    return find_spec("ring_flash_attn") is not None and find_spec("flash_attn") is not None


FLASH_ATTN = Limits(
    title="flash-attn",
    package="flash-attn",
    is_installed=has_flash,
    devices=CUDA,
    has_fp32=False,
    advice=ON_CUDA,
    lacks={"s_aux": "attention sinks"},
    refusal=f"flash-attn has no attention sinks, which this model needs. Try: {EAGER}",
)
RING_FLASH_ATTN = Limits(
    title="ring-flash-attn",
    package="ring-flash-attn",
    is_installed=has_ring_flash,
    devices=CUDA,
    has_fp32=False,
    advice=ON_CUDA,
    lacks={"softcap": "softcap", "s_aux": "sinks"},
    refusal=RING_REFUSAL,
)

FLASH = Kernel(
    word=Attention.FLASH,
    packed=Form(
        name="packed_fa2",
        limits=FLASH_ATTN,
        function="actor_init.attention.kernels:flash_attn_varlen",
        is_expected=True,
    ),
    padded=Form(name="flash_attention_2", limits=FLASH_ATTN, is_expected=True),
    slices=Form(
        name="ring_fa2",
        limits=RING_FLASH_ATTN,
        function="actor_init.attention.ring_attention:ring_flash_attn",
        is_expected=True,
    ),
    job_names=("flash_attention_2", "kernels-community/flash-attn2"),
    instead="varlen or sdpa",
)
