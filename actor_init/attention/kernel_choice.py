"""Choose the attention kernel for a model on a device: the one asked for, or the fastest that is right here."""

from torch import device
from transformers import PretrainedConfig

from actor_init.attention.kernel_check import is_right
from actor_init.attention.kernels import register
from actor_init.custom.config import CustomConfig
from actor_init.declarations.attention import kernel_of
from actor_init.declarations.attention.auto import (
    FASTEST_FIRST,
    PLAIN,
    RING_FASTEST_FIRST,
    RING_WITH_CUDNN,
    WITH_CUDNN,
)
from actor_init.declarations.attention.cudnn import CUDNN
from actor_init.declarations.attention.declaration import Kernel, Lack, Limits
from actor_init.declarations.attention.plain import OWN, SDPA
from actor_init.spec import ActorSpec, Attention, Dtype, UsageError


def plain_kernel(config: PretrainedConfig) -> str:
    """Return the kernel that every device has: sdpa, or eager for a model without sdpa; auto for a user's model."""
    return Attention.AUTO if isinstance(config, CustomConfig) else _plain(config).word


def _plain(config: PretrainedConfig | None) -> Kernel:
    return next(kernel for kernel in PLAIN if config is None or not kernel.complaint(config))


def kernel_name(spec: ActorSpec, where: device, config: PretrainedConfig | None = None) -> str:
    """Return the transformers name of the kernel for `spec.attention` on device `where`; transformers has it then.

    `config` is the model's, if there is one. Raises UsageError if the kernel cannot run there, or not with that model.
    """
    if spec.is_custom:
        return OWN.name
    register()
    if spec.parallel.ring > 1:
        return _ring_kernel(spec, where, config)
    is_chosen = spec.attention == Attention.AUTO
    kernel = _fastest(spec, where, config) if is_chosen else kernel_of(spec.attention)
    if lack := lacks(kernel.word, where, spec.dtype):
        raise UsageError(f"{lack.text}. Try: {lack.advice}")
    if config is not None and (complaint := kernel.complaint(config)):
        raise UsageError(complaint)
    form = kernel.form(packs=spec.packs)
    assert form is not None  # the spec refuses varlen for padded rows
    if is_chosen and form.name in WITH_CUDNN and _can_take(CUDNN, spec, where, config):
        return WITH_CUDNN[form.name].name
    return form.name


def default_kernel(where: device) -> str:
    """Return the word for the kernel that `--attention auto` selects for documents on device `where`."""
    register()
    return _fastest(ActorSpec(), where, None).word


def lacks(attention: str, where: device, dtype: Dtype) -> Lack | None:
    """Return what a kernel lacks on a device in a dtype; None if nothing is known."""
    return kernel_of(attention).packed.limits.lack(where.type, dtype, is_installed=is_installed(attention))


def is_installed(attention: str) -> bool:
    """Is the package there that brings a kernel? True for torch's own."""
    return kernel_of(attention).packed.limits.is_installed()


def _ring_kernel(spec: ActorSpec, where: device, config: PretrainedConfig | None) -> str:
    is_chosen = spec.attention == Attention.AUTO
    may_choose = is_chosen and _plain(config) is SDPA
    # the last of them computes softcap and sinks, too
    fastest_first = RING_FASTEST_FIRST if may_choose else RING_FASTEST_FIRST[-1:]
    lack = None
    for kernel in fastest_first if is_chosen else (kernel_of(spec.attention),):
        form = kernel.slices
        assert form is not None  # the spec refuses a ring for kernels without
        lack = form.limits.lack(where.type, spec.dtype, is_installed=form.limits.is_installed())
        if lack is None:
            takes_cudnn = may_choose and _can_take(CUDNN, spec, where, config)
            return RING_WITH_CUDNN[form.name].name if takes_cudnn else form.name
    assert lack is not None
    raise UsageError(f"{lack.text}. Try: {lack.advice}")


def _fastest(spec: ActorSpec, where: device, config: PretrainedConfig | None) -> Kernel:
    """Return the first kernel of FASTEST_FIRST that can run here, knows all that the model needs, and is right."""
    plain = _plain(config)
    # what has no sdpa has softcapped scores, sinks, or an attention of its own that no other kernel replaces
    if plain is not SDPA:
        return plain
    return next((kernel for kernel in FASTEST_FIRST if _can_take(kernel, spec, where, config)), plain)


def _can_take(kernel: Kernel, spec: ActorSpec, where: device, config: PretrainedConfig | None) -> bool:
    form = kernel.form(packs=spec.packs)
    can_run = form is not None and lacks(kernel.word, where, spec.dtype) is None and _suits(form.limits, config)
    return can_run and is_right(kernel.word, where)


def _suits(limits: Limits, config: PretrainedConfig | None) -> bool:
    """Does the kernel know all that the model's attention needs?"""
    if config is None:
        return True
    text = config.get_text_config()
    has_dropout = getattr(text, "attention_dropout", 0.0) or getattr(text, "attn_pdrop", 0.0)
    if ("dropout" in limits.lacks and has_dropout) or ("sliding_window" in limits.lacks and _has_window(text)):
        return False
    return limits.max_head_dim is None or _head_dim(text) <= limits.max_head_dim


def _has_window(text: PretrainedConfig) -> bool:
    if kinds := getattr(text, "layer_types", None):
        return any(kind != "full_attention" for kind in kinds)
    return bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True) is not False


def _head_dim(text: PretrainedConfig) -> int:
    given = getattr(text, "head_dim", None)
    return int(given or text.hidden_size // text.num_attention_heads)
