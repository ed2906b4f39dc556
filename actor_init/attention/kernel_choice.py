"""Choose the attention kernel for a model on a device: the one asked for, or the fastest that is right here."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, device
from transformers import AttentionInterface, PretrainedConfig

from actor_init.attention.kernels import register
from actor_init.custom.config import CustomConfig
from actor_init.declarations.attention import find_kernel
from actor_init.declarations.attention.auto import (
    FASTEST_FIRST,
    PLAIN,
    RING_FASTEST_FIRST,
    RING_WITH_CUDNN,
    WITH_CUDNN,
)
from actor_init.declarations.attention.cudnn import CUDNN
from actor_init.declarations.attention.declaration import AttentionKernel, KernelLimits, KernelObstacle
from actor_init.declarations.attention.plain import OWN, SDPA
from actor_init.spec import ActorSpec, Attention, Dtype, UsageError

# Check that an attention kernel works here: forward and backward of small packed rows, compared with plain fp32.
#
# Shape letters: H query heads, K key-value heads, T tokens, N documents, S tokens of a padded row, D head_dim.

# Relative to the reference's norm. bf16 has 8 bits; rounding probabilities and results gives about 0.004 here; a
# mask that is off by one token, or a missed document boundary, gives more than 0.2.
BOUND = 0.02
PADDED = (5, 17, 42)  # lengths of the documents that are also tried as padded rows
ROW = max(PADDED) + len(PADDED)  # tokens of a padded row
# Lengths of a row's documents, and head_dim. There are kernels that are right for a few short documents, and whose
# gradients are wrong for longer ones, or for one of a single token among long ones.
ROWS = ((PADDED, 64), ((700, 5, 36, 1, 358), 128), ((640, 200), 64))
H, K = 4, 2


@cache
def is_right(attention: str, where: device) -> bool:
    """Does the kernel run on `where`, and give the right numbers?"""
    try:
        return error_of(attention, where) <= BOUND
    except Exception:  # of a package or a driver, of any type
        return False


def error_of(attention: str, where: device) -> float:
    """Return the largest relative error of the output and the gradients of query, key and value; correct up to BOUND.

    Computed in bf16, on the packed ROWS, with grouped queries, and on padded rows where the form for them is not
    transformers' own. Raises what the kernel raises.
    """
    register()
    kernel = find_kernel(attention)
    errors = [_error_of_row(kernel, where, lengths, head_dim) for lengths, head_dim in ROWS]
    return float(torch.stack(errors).max())  # unlike Python's max, torch's keeps a nan


def _error_of_row(kernel: AttentionKernel, where: device, lengths: tuple[int, ...], head_dim: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    num_tokens = sum(lengths)
    shapes = [(1, heads, num_tokens, head_dim) for heads in (H, K, K)] + [(1, num_tokens, H, head_dim)]
    *inputs, upstream = (torch.randn(shape, generator=random).to(where, torch.bfloat16) for shape in shapes)
    document_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(where)
    visible_TT = (document_T[:, None] == document_T) & torch.ones_like(document_T).expand(num_tokens, -1).tril().bool()
    borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(where)
    packed: dict[str, Any] = {"cu_seq_lens_q": borders, "max_length_q": max(lengths)}
    call = AttentionInterface()[kernel.packed.name]
    module = SimpleNamespace(num_key_value_groups=H // K, is_causal=True, training=True)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask, more = (visible_TT[None, None], {}) if kernel.packed.reads_mask else (None, packed)
        out: Tensor = call(module, query, key, value, mask, scaling=head_dim**-0.5, **more)[0]
        return out

    def in_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert kernel.padded is not None
        rows = (_in_rows(tensor, document_T) for tensor in (query, key, value))
        padded = AttentionInterface()[kernel.padded.name]
        out_NSHD: Tensor = padded(module, *rows, _is_real(where), scaling=head_dim**-0.5)[0]
        return out_NSHD.flatten(0, 1)[_places(document_T)][None]

    has_padded = kernel.padded is not None and kernel.padded.function and not kernel.padded.reads_mask
    forms = [ours, in_rows] if has_padded and lengths == PADDED else [ours]
    wanted = _with_gradients(
        lambda query, key, value: _plain_attention(query, key, value, visible_TT),
        [tensor.float() for tensor in inputs],
        upstream.float(),
    )
    errors = [
        (f.float() - w).norm() / w.norm()
        for form in forms
        for f, w in zip(_with_gradients(form, inputs, upstream), wanted, strict=True)
    ]
    return torch.stack(errors).max()


def _places(document_T: Tensor) -> Tensor:
    """Return the place of each token in rows of one document each, padded on the left by its number, flattened."""
    starts = torch.tensor([0, *PADDED[:-1]], device=document_T.device).cumsum(0)
    return document_T * ROW + document_T + torch.arange(len(document_T), device=document_T.device) - starts[document_T]


def _is_real(where: device) -> Tensor:
    place = torch.arange(ROW, device=where) - torch.arange(len(PADDED), device=where)[:, None]
    return (place >= 0) & (place < torch.tensor(PADDED, device=where)[:, None])


def _in_rows(packed_1HTD: Tensor, document_T: Tensor) -> Tensor:
    _, heads, _, head_dim = packed_1HTD.shape
    flat = packed_1HTD.new_zeros(heads, len(PADDED) * ROW, head_dim).index_copy(1, _places(document_T), packed_1HTD[0])
    return flat.view(heads, len(PADDED), ROW, head_dim).transpose(0, 1)


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, visible_TT: Tensor) -> Tensor:
    key, value = (tensor.repeat_interleave(H // K, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3) * query.shape[-1] ** -0.5).masked_fill(~visible_TT, float("-inf"))
    out: Tensor = (scores.softmax(-1) @ value).transpose(1, 2)
    return out


def _with_gradients(attention: Any, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def plain_kernel(config: PretrainedConfig) -> str:
    """Return the kernel that every device has: sdpa, or eager for a model without sdpa; auto for a user's model."""
    return Attention.AUTO if isinstance(config, CustomConfig) else _plain(config).word


def _plain(config: PretrainedConfig | None) -> AttentionKernel:
    return next(kernel for kernel in PLAIN if config is None or not kernel.find_obstacle(config))


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
    kernel = _fastest(spec, where, config) if is_chosen else find_kernel(spec.attention)
    if lack := lacks(kernel.word, where, spec.dtype):
        raise UsageError(f"{lack.text}. Try: {lack.advice}")
    if config is not None and (complaint := kernel.find_obstacle(config)):
        raise UsageError(complaint)
    form = kernel.choose_form(packs=spec.packs)
    assert form is not None  # the spec refuses varlen for padded rows
    if is_chosen and form.name in WITH_CUDNN and _can_take(CUDNN, spec, where, config):
        return WITH_CUDNN[form.name].name
    return form.name


def default_kernel(where: device) -> str:
    """Return the word for the kernel that `--attention auto` selects for documents on device `where`."""
    register()
    return _fastest(ActorSpec(), where, None).word


def lacks(attention: str, where: device, dtype: Dtype) -> KernelObstacle | None:
    """Return what a kernel lacks on a device in a dtype; None if nothing is known."""
    return find_kernel(attention).packed.limits.find_obstacle(where.type, dtype, is_installed=is_installed(attention))


def is_installed(attention: str) -> bool:
    """Is the package there that brings a kernel? True for torch's own."""
    return find_kernel(attention).packed.limits.is_installed()


def _ring_kernel(spec: ActorSpec, where: device, config: PretrainedConfig | None) -> str:
    is_chosen = spec.attention == Attention.AUTO
    may_choose = is_chosen and _plain(config) is SDPA
    # the last of them computes softcap and sinks, too
    fastest_first = RING_FASTEST_FIRST if may_choose else RING_FASTEST_FIRST[-1:]
    lack = None
    for kernel in fastest_first if is_chosen else (find_kernel(spec.attention),):
        form = kernel.slices
        assert form is not None  # the spec refuses a ring for kernels without
        lack = form.limits.find_obstacle(where.type, spec.dtype, is_installed=form.limits.is_installed())
        if lack is None:
            takes_cudnn = may_choose and _can_take(CUDNN, spec, where, config)
            return RING_WITH_CUDNN[form.name].name if takes_cudnn else form.name
    assert lack is not None
    raise UsageError(f"{lack.text}. Try: {lack.advice}")


def _fastest(spec: ActorSpec, where: device, config: PretrainedConfig | None) -> AttentionKernel:
    """Return the first kernel of FASTEST_FIRST that can run here, knows all that the model needs, and is right."""
    plain = _plain(config)
    # what has no sdpa has softcapped scores, sinks, or an attention of its own that no other kernel replaces
    if plain is not SDPA:
        return plain
    return next((kernel for kernel in FASTEST_FIRST if _can_take(kernel, spec, where, config)), plain)


def _can_take(kernel: AttentionKernel, spec: ActorSpec, where: device, config: PretrainedConfig | None) -> bool:
    form = kernel.choose_form(packs=spec.packs)
    can_run = form is not None and lacks(kernel.word, where, spec.dtype) is None and _suits(form.limits, config)
    return can_run and is_right(kernel.word, where)


def _suits(limits: KernelLimits, config: PretrainedConfig | None) -> bool:
    """Does the kernel know all that the model's attention needs?"""
    if config is None:
        return True
    text = config.get_text_config()
    has_dropout = getattr(text, "attention_dropout", 0.0) or getattr(text, "attn_pdrop", 0.0)
    if ("dropout" in limits.missing_features and has_dropout) or (
        "sliding_window" in limits.missing_features and _has_window(text)
    ):
        return False
    return limits.max_head_dim is None or _head_dim(text) <= limits.max_head_dim


def _has_window(text: PretrainedConfig) -> bool:
    if kinds := getattr(text, "layer_types", None):
        return any(kind != "full_attention" for kind in kinds)
    return bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True) is not False


def _head_dim(text: PretrainedConfig) -> int:
    given = getattr(text, "head_dim", None)
    return int(given or text.hidden_size // text.num_attention_heads)
