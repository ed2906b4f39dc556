"""Choose the attention kernel for a model on a device: the one asked for, or the fastest that is right here."""

from dataclasses import dataclass

from torch import device
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from actor_init.attention.cudnn import MAX_HEAD_DIM
from actor_init.attention.kernel_check import is_right
from actor_init.attention.kernels import (
    NAMES,
    OWN,
    RING_FA2,
    RING_SDPA,
    RING_WITH_CUDNN,
    WITH_CUDNN,
    is_installed,
    register,
)
from actor_init.attention.ring_attention import has_ring_flash
from actor_init.custom.config import CustomConfig
from actor_init.spec import ActorSpec, Attention, Dtype, UsageError

# What --attention auto tries in turn where a capture names none: the fastest first, for forward and backward of a row
# of several documents on an H200 (benchmarks/RESULTS.md). cuDNN, a call a document, is faster for long ones alone.
FASTEST_FIRST = (Attention.FLASH3, Attention.FLASH, Attention.VARLEN, Attention.CUDNN)


def has_sdpa(config: PretrainedConfig) -> bool:
    """Can the model's class compute its attention through torch's SDPA? Softcapped scores and sinks cannot."""
    return type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or bool(
        getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_sdpa", False)
    )


def plain_kernel(config: PretrainedConfig) -> Attention:
    """Return the kernel that every device has: sdpa, or eager for a model without sdpa; auto for a user's model."""
    if isinstance(config, CustomConfig):
        return Attention.AUTO
    return Attention.SDPA if has_sdpa(config) else Attention.EAGER


def kernel_name(spec: ActorSpec, where: device, config: PretrainedConfig | None = None) -> str:
    """Return the transformers name of the kernel for `spec.attention` on device `where`; transformers has it then.

    `config` is the model's, if there is one. Raises UsageError if the kernel cannot run there, or not with that model.
    """
    if spec.is_custom:
        return OWN
    register()
    if spec.parallel.ring > 1:
        return _ring_kernel(spec, where, config)
    is_chosen = spec.attention is Attention.AUTO
    attention = _fastest(spec, where, config) if is_chosen else spec.attention
    if reason := lacks(attention, where, spec.dtype):
        raise UsageError(f"{reason.text}. Try: {reason.advice}")
    if attention is Attention.SDPA and config is not None and not has_sdpa(config):
        raise UsageError(f"transformers has no sdpa attention for {config.model_type}. Try: --attention eager")
    if is_chosen and spec.packs and attention in WITH_CUDNN and _can_take(Attention.CUDNN, spec, where, config):
        return WITH_CUDNN[attention]
    name = NAMES[attention].packed if spec.packs else NAMES[attention].padded
    assert name is not None  # the spec refuses varlen for padded rows
    return name


def default_kernel(where: device) -> str:
    """Return the word for the kernel that `--attention auto` selects for documents on device `where`."""
    register()
    return _fastest(ActorSpec(), where, None).value


@dataclass(frozen=True, kw_only=True, slots=True)
class Lack:
    """Why a kernel cannot run, and what to type instead."""

    text: str
    advice: str


def lacks(attention: Attention, where: device, dtype: Dtype) -> Lack | None:
    """Return what a kernel lacks on a device in a dtype; None if nothing is known."""
    whose = {
        Attention.CUDNN: "cuDNN's attention",
        Attention.FLASH: "flash-attn",
        Attention.FLASH3: "flash-attn 3",
        Attention.FLASH4: "flash-attn 4",
        Attention.VARLEN: "torch's varlen attention",
    }.get(attention)
    if whose is None:
        return None
    advice = "--attention sdpa"
    if attention is Attention.FLASH:
        advice += ", or on a CUDA machine pip install -e '.[cuda]' and --dtype bf16"
    if where.type != "cuda":
        return Lack(text=f"{whose} has no CPU kernel", advice=advice)
    if not is_installed(attention):
        if attention in (Attention.FLASH3, Attention.FLASH4):
            advice = f"--attention auto, or docs/replay.md for {whose}"
        return Lack(text=f"{whose} is not installed", advice=advice)
    if dtype is Dtype.FP32:
        if attention is Attention.VARLEN:
            return Lack(text=f"{whose} has no fp32 kernel", advice=advice)
        return Lack(text=f"{whose} has no fp32", advice=advice)
    return None


def _ring_kernel(spec: ActorSpec, where: device, config: PretrainedConfig | None) -> str:
    has_flash = where.type == "cuda" and has_ring_flash() and spec.dtype is not Dtype.FP32
    if spec.attention is Attention.FLASH and not has_flash:
        lacking = (
            "has no CPU kernel" if where.type != "cuda" else "has no fp32" if has_ring_flash() else "is not installed"
        )
        raise UsageError(
            f"ring-flash-attn {lacking}. "
            "Try: --attention sdpa, or on a CUDA machine pip install -e '.[cuda]' and --dtype bf16"
        )
    plain = Attention.SDPA if config is None else plain_kernel(config)
    flash = [Attention.FLASH, *([Attention.AUTO] if plain is Attention.SDPA else [])]
    name = RING_FA2 if has_flash and spec.attention in flash else RING_SDPA
    is_chosen = spec.attention is Attention.AUTO and plain is Attention.SDPA
    return RING_WITH_CUDNN[name] if is_chosen and _can_take(Attention.CUDNN, spec, where, config) else name


def _fastest(spec: ActorSpec, where: device, config: PretrainedConfig | None) -> Attention:
    """Return the first kernel of FASTEST_FIRST that can run here, knows all that the model needs, and is right."""
    plain = Attention.SDPA if config is None else plain_kernel(config)
    # what has no sdpa has softcapped scores, sinks, or an attention of its own that no other kernel replaces
    if plain is not Attention.SDPA or where.type != "cuda":
        return plain
    return next((attention for attention in FASTEST_FIRST if _can_take(attention, spec, where, config)), plain)


def _can_take(attention: Attention, spec: ActorSpec, where: device, config: PretrainedConfig | None) -> bool:
    has_form = spec.packs or NAMES[attention].padded is not None
    can_run = has_form and lacks(attention, where, spec.dtype) is None and _suits(attention, config)
    return can_run and is_right(attention, where)


def _suits(attention: Attention, config: PretrainedConfig | None) -> bool:
    """Does the kernel know all that the model's attention needs?"""
    if config is None or attention is Attention.FLASH:
        return True
    text = config.get_text_config()
    if getattr(text, "attention_dropout", 0.0) or getattr(text, "attn_pdrop", 0.0):
        return False
    return attention is not Attention.CUDNN or (not _has_window(text) and _head_dim(text) <= MAX_HEAD_DIM)


def _has_window(text: PretrainedConfig) -> bool:
    if kinds := getattr(text, "layer_types", None):
        return any(kind != "full_attention" for kind in kinds)
    return bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True) is not False


def _head_dim(text: PretrainedConfig) -> int:
    given = getattr(text, "head_dim", None)
    return int(given or text.hidden_size // text.num_attention_heads)
