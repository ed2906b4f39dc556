"""Select the attention kernel for a device, under the names that transformers uses."""

from importlib.util import find_spec
from inspect import signature
from typing import Any

from torch import Tensor, device, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PretrainedConfig

from actor_init.attention.ring_attention import has_ring_flash, ring_flash_attn, ring_sdpa
from actor_init.custom.config import CustomConfig
from actor_init.spec import ActorSpec, Attention, Dtype, UsageError

FLASH_PADDED = "flash_attention_2"  # transformers' own, which unpads and pads in every layer
FLASH_PACKED = "packed_fa2"  # without the word flash, for which transformers would look up its own kernel
TORCH_PACKED = "torch_varlen_attn"
RING_FA2 = "ring_fa2"
RING_SDPA = "ring_gathered"  # without the word sdpa, for which transformers would ask the class
OWN = "of its own"  # of a model that a user's function builds
HALF_PRECISION = (FLASH_PADDED, FLASH_PACKED, TORCH_PACKED, RING_FA2)  # bf16 and fp16 alone


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
    """Return the transformers name of the kernel for `spec.attention` on device `where`, registering it if it is ours.

    `config` is the model's, if there is one. Raises UsageError if the kernel cannot run there, or not with that model.
    """
    if spec.is_custom:
        return OWN
    AttentionInterface.register(FLASH_PACKED, flash_attn_varlen)
    AttentionInterface.register(TORCH_PACKED, torch_varlen_attn)
    AttentionInterface.register(RING_FA2, ring_flash_attn)
    AttentionInterface.register(RING_SDPA, ring_sdpa)
    on_cuda = where.type == "cuda"
    ring = spec.parallel.ring > 1
    installed = has_ring_flash() if ring else find_spec("flash_attn") is not None
    has_flash = on_cuda and installed and spec.dtype is not Dtype.FP32
    if spec.attention is Attention.FLASH and not has_flash:
        lacking = "has no CPU kernel" if not on_cuda else "is not installed" if not installed else "has no fp32"
        raise UsageError(
            f"{'ring-' * ring}flash-attn {lacking}. "
            "Try: --attention sdpa, or on a CUDA machine pip install -e '.[cuda]' and --dtype bf16"
        )
    plain = Attention.SDPA if config is None else plain_kernel(config)
    if ring:
        flash = [Attention.FLASH, *([Attention.AUTO] if plain is Attention.SDPA else [])]
        return RING_FA2 if has_flash and spec.attention in flash else RING_SDPA
    has_varlen = on_cuda and spec.dtype is not Dtype.FP32
    match spec.attention:
        # what has no sdpa has softcapped scores, sinks, or an attention of its own that no other kernel replaces
        case Attention.AUTO if plain is not Attention.SDPA:
            return plain.value
        case Attention.AUTO | Attention.FLASH if has_flash:
            return FLASH_PACKED if spec.packs else FLASH_PADDED
        case Attention.AUTO:
            return TORCH_PACKED if has_varlen and spec.packs else plain.value
        case Attention.SDPA if plain is not Attention.SDPA:
            kind = config.model_type if config is not None else ""
            raise UsageError(f"transformers has no sdpa attention for {kind}. Try: --attention {plain}")
        case Attention.VARLEN if not has_varlen:
            lacking = "fp32" if on_cuda else "CPU"
            raise UsageError(f"torch's varlen attention has no {lacking} kernel. Try: --attention sdpa")
        case Attention.VARLEN:
            return TORCH_PACKED
        case other:
            return other.value


def flash_attn_varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Run flash-attn on one packed row, with transformers' attention signature.

    query, key and value are [1, heads, T, head_dim] for the row's T tokens. Returns [1, T, heads, head_dim]. It is a
    shorter path than transformers' own, and compiles once for all layers: transformers' reads `layer_idx`, for which
    dynamo compiles a graph per layer. Raises UsageError for attention sinks (`s_aux`), which the kernel lacks.
    """
    from flash_attn import flash_attn_varlen_func

    if s_aux is not None:
        raise UsageError("flash-attn has no attention sinks, which this model needs. Try: --attention eager")

    out = flash_attn_varlen_func(
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
        window_size=((sliding_window or 0) - 1, 0),
        softcap=softcap or 0.0,
    )
    return out.unsqueeze(0), None


def torch_varlen_attn(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Run torch.nn.attention.varlen on one packed row; shapes as in `flash_attn_varlen`.

    Raises UsageError for what the kernel lacks: dropout, softcap and attention sinks.
    """
    from torch.nn.attention.varlen import varlen_attn

    if dropout or softcap or s_aux is not None:
        raise UsageError("torch's varlen attention has no dropout, softcap or sinks. Try: --attention eager")
    # torch 2.11 groups queries by their shapes; later releases need an argument for it
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    out = varlen_attn(
        query.squeeze(0).transpose(0, 1).contiguous(),
        key.squeeze(0).transpose(0, 1).contiguous(),
        value.squeeze(0).transpose(0, 1).contiguous(),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=((sliding_window or 0) - 1, 0),
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0), None
