"""Declare flash-attn 2, 3 and 4, and ring-flash-attn.

The forms for padded rows are transformers' own, which unpad and pad in every layer.
"""

from importlib.util import find_spec

from actor_init.declarations.attention.declaration import RING_REFUSAL, Form, Kernel, Limits
from actor_init.toggles import Attention, Dtype
from capture.facts import Setting

CUDA = ("cuda",)
AUTO, EAGER, SDPA = (Setting("attention", word) for word in (Attention.AUTO, Attention.EAGER, Attention.SDPA))
ON_CUDA = f"{SDPA}, or on a CUDA machine pip install -e '.[cuda]' and {Setting('dtype', Dtype.BF16)}"


def has_flash() -> bool:
    # flash-attn 4 alone leaves a folder of this name without a module
    found = find_spec("flash_attn")
    return found is not None and found.origin is not None


def has_flash_3() -> bool:
    return find_spec("flash_attn_interface") is not None


def has_flash_4() -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("flash-attn-4")
    except PackageNotFoundError:
        return False
    return True


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
FLASH_ATTN_3 = Limits(
    title="flash-attn 3",
    package="flash_attn_3",
    is_installed=has_flash_3,
    devices=CUDA,
    has_fp32=False,
    advice_if_missing=f"{AUTO}, or docs/replay.md for flash-attn 3",
    lacks={"dropout": "dropout", "s_aux": "attention sinks"},
    refusal=f"flash-attn 3 has no dropout and no attention sinks. Try: {EAGER}",
)
FLASH_ATTN_4 = Limits(
    title="flash-attn 4",
    package="flash-attn-4",
    is_installed=has_flash_4,
    devices=CUDA,
    has_fp32=False,
    advice_if_missing=f"{AUTO}, or docs/replay.md for flash-attn 4",
    lacks={"dropout": "dropout", "s_aux": "attention sinks"},  # or they are not used here
    refusal=f"flash-attn 4 runs without dropout and attention sinks here. Try: {EAGER}",
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
        name="packed_fa2", limits=FLASH_ATTN, function="actor_init.attention.flash:flash_attn_varlen", is_expected=True
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
FLASH3 = Kernel(
    word=Attention.FLASH3,
    packed=Form(
        name="packed_fa3",
        limits=FLASH_ATTN_3,
        function="actor_init.attention.flash:flash_attn_3_varlen",
        is_expected=True,
    ),
    padded=Form(name="flash_attention_3", limits=FLASH_ATTN_3, is_expected=True),
    job_names=("flash_attention_3", "kernels-community/flash-attn3"),
)
FLASH4 = Kernel(
    word=Attention.FLASH4,
    packed=Form(
        name="packed_fa4",
        limits=FLASH_ATTN_4,
        function="actor_init.attention.flash:flash_attn_4_varlen",
        is_expected=True,
    ),
    padded=Form(name="flash_attention_4", limits=FLASH_ATTN_4, is_expected=True),
    job_names=("flash_attention_4", "kernels-community/flash-attn4"),
)
