"""Choose the attention kernel for a model on a device: the one that was typed, or the fastest that is right there.

A kernel is right if its output and gradients on small packed rows are, up to rounding, those of plain fp32 attention.

Shape letters: H query heads, K key-value heads, T tokens, N documents, S tokens of a padded row, D head_dim.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, device
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from actor_init.attention.kernels import register
from actor_init.attention.ring_split import has_sliding_window
from actor_init.custom.config import CustomConfig
from actor_init.declarations.attention import find_kernel
from actor_init.declarations.attention.cudnn import CUDNN
from actor_init.declarations.attention.declaration import AttentionKernel, KernelLimits, KernelObstacle
from actor_init.declarations.attention.kernel_order import (
    KERNELS_FASTEST_FIRST,
    PLAIN,
    RING_KERNELS_FASTEST_FIRST,
    RING_WITH_CUDNN,
    WITH_CUDNN,
)
from actor_init.declarations.attention.plain import OWN, SDPA
from actor_init.spec import ActorSpec, Attention, Dtype, UsageError
from actor_init.world import World, try_on_all_ranks
from capture.facts import Setting

# Relative to the reference's norm. bf16 has 8 bits: rounding of probabilities and results gives about 0.004.
# A mask that is off by one token, or a missed document boundary, gives more than 0.2.
BOUND = 0.02
# The lengths of the documents that are also tried as padded rows, and the tokens of such a row.
PADDED_LENGTHS = (5, 17, 42)
PADDED_ROW = max(PADDED_LENGTHS) + len(PADDED_LENGTHS)
# The lengths of a packed row's documents, and head_dim. Some kernels are right for a few short documents, but their
# gradients are wrong for longer ones, or for one of a single token among long ones.
PACKED_ROWS = ((PADDED_LENGTHS, 64), ((700, 5, 36, 1, 358), 128), ((640, 200), 64))
H, K = 4, 2


@cache
def is_right(attention: str, where: device) -> bool:
    """Does the kernel of this name run on `where`, and give the right numbers?"""
    return gives_right_numbers(find_kernel(attention), where)


def gives_right_numbers(kernel: AttentionKernel, where: device) -> bool:
    """Do the forms of a kernel run on `where`, and give the right numbers?"""
    try:
        return measure_error(kernel, where) <= BOUND
    # A package or a driver may raise an error of any type.
    except Exception:
        return False


def measure_error(kernel: AttentionKernel, where: device) -> float:
    """Measure the largest relative error of the output and the gradients of query, key and value; correct up to BOUND.

    Computed in bf16, on PACKED_ROWS, with grouped queries, and on padded rows where the form for them is not
    transformers' own. Raises what the kernel raises.
    """
    register()
    errors = [_measure_row_error(kernel, where, lengths, head_dim) for lengths, head_dim in PACKED_ROWS]
    # Python's max would drop a NaN that is not the first of them; torch's keeps it.
    return float(torch.stack(errors).max())


def _measure_row_error(kernel: AttentionKernel, where: device, lengths: tuple[int, ...], head_dim: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    num_tokens = sum(lengths)
    shapes = [(1, heads, num_tokens, head_dim) for heads in (H, K, K)] + [(1, num_tokens, H, head_dim)]
    *inputs, upstream = (torch.randn(shape, generator=random).to(where, torch.bfloat16) for shape in shapes)
    document_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(where)
    visible_TT = (document_T[:, None] == document_T) & torch.ones_like(document_T).expand(num_tokens, -1).tril().bool()
    borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(where)
    packed_options: dict[str, Any] = {"cu_seq_lens_q": borders, "max_length_q": max(lengths)}
    call = AttentionInterface()[kernel.packed.name]
    module = SimpleNamespace(num_key_value_groups=H // K, is_causal=True, training=True)

    def run_packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask, options = (make_mask(), {}) if kernel.packed.reads_mask else (None, packed_options)
        out: Tensor = call(module, query, key, value, mask, scaling=head_dim**-0.5, **options)[0]
        return out

    def make_mask() -> Any:
        return AttentionMaskInterface()[kernel.packed.name](
            batch_size=1,
            q_length=num_tokens,
            kv_length=num_tokens,
            mask_function=lambda row, head, query, key: visible_TT[query, key],
            allow_is_causal_skip=False,
            device=where,
        )

    def run_padded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert kernel.padded is not None
        rows = (_pad_rows(tensor, document_T) for tensor in (query, key, value))
        padded = AttentionInterface()[kernel.padded.name]
        out_NSHD: Tensor = padded(module, *rows, _mark_real_tokens(where), scaling=head_dim**-0.5)[0]
        return out_NSHD.flatten(0, 1)[_locate_in_padded_rows(document_T)][None]

    has_padded = kernel.padded is not None and kernel.padded.function and not kernel.padded.reads_mask
    forms = [run_packed, run_padded] if has_padded and lengths == PADDED_LENGTHS else [run_packed]
    reference = _compute_with_gradients(
        lambda query, key, value: _attend_plainly(query, key, value, visible_TT),
        [tensor.float() for tensor in inputs],
        upstream.float(),
    )
    errors = [
        (actual.float() - expected).norm() / expected.norm()
        for form in forms
        for actual, expected in zip(_compute_with_gradients(form, inputs, upstream), reference, strict=True)
    ]
    return torch.stack(errors).max()


def _locate_in_padded_rows(document_T: Tensor) -> Tensor:
    """Locate each token in the flattened padded rows. Row n holds document n, with n tokens of padding on its left."""
    starts = torch.tensor([0, *PADDED_LENGTHS[:-1]], device=document_T.device).cumsum(0)
    return (
        document_T * PADDED_ROW
        + document_T
        + torch.arange(len(document_T), device=document_T.device)
        - starts[document_T]
    )


def _mark_real_tokens(where: device) -> Tensor:
    index_NS = torch.arange(PADDED_ROW, device=where) - torch.arange(len(PADDED_LENGTHS), device=where)[:, None]
    return (index_NS >= 0) & (index_NS < torch.tensor(PADDED_LENGTHS, device=where)[:, None])


def _pad_rows(packed_1HTD: Tensor, document_T: Tensor) -> Tensor:
    _, heads, _, head_dim = packed_1HTD.shape
    flat = packed_1HTD.new_zeros(heads, len(PADDED_LENGTHS) * PADDED_ROW, head_dim).index_copy(
        1, _locate_in_padded_rows(document_T), packed_1HTD[0]
    )
    return flat.view(heads, len(PADDED_LENGTHS), PADDED_ROW, head_dim).transpose(0, 1)


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, visible_TT: Tensor) -> Tensor:
    key, value = (tensor.repeat_interleave(H // K, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3) * query.shape[-1] ** -0.5).masked_fill(~visible_TT, float("-inf"))
    out: Tensor = (scores.softmax(-1) @ value).transpose(1, 2)
    return out


def _compute_with_gradients(attention: Any, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def choose_plain_kernel(config: PretrainedConfig) -> str:
    """Choose the kernel that every device has: sdpa, or eager for a model without sdpa; auto for a user's model."""
    return Attention.AUTO if isinstance(config, CustomConfig) else _choose_plain(config).option_value


def _choose_plain(config: PretrainedConfig | None) -> AttentionKernel:
    return next(kernel for kernel in PLAIN if config is None or not kernel.find_obstacle(config))


def choose_kernel_name(spec: ActorSpec, where: device, config: PretrainedConfig | None = None) -> str:
    """Choose the kernel that computes the rows of `spec` on device `where`, and return transformers' name of it.

    A kernel has a form, with a name of its own, for packed rows, one for padded rows, and one for slices of rows.
    `config` is the model's, if there is one. Raises UsageError if the kernel of `spec.attention` cannot run there, or
    not with that model.
    """
    if spec.has_user_model:
        return OWN.name
    register()
    if spec.parallel.ring > 1:
        return _choose_ring_kernel(spec, where, config)
    is_chosen = spec.attention == Attention.AUTO
    kernel = _choose_fastest(spec, where, config) if is_chosen else find_kernel(spec.attention)
    if lack := find_kernel_obstacle(kernel.option_value, where, spec.dtype):
        raise UsageError(f"{lack.text}. Try: {lack.advice}")
    if config is not None and (find_obstacle := kernel.find_obstacle(config)):
        raise UsageError(find_obstacle)
    form = kernel.choose_form(packs=spec.packs)
    # The spec has refused varlen, which has no form for padded rows, together with them.
    assert form is not None
    if is_chosen and form.name in WITH_CUDNN and _is_usable(CUDNN, spec, where, config):
        return WITH_CUDNN[form.name].name
    return form.name


def choose_kernel_name_on_all_ranks(spec: ActorSpec, world: World, config: PretrainedConfig) -> str:
    """Choose as `choose_kernel_name` does, on each rank for its own device. It has to be the same on all ranks.

    All ranks must call this. Raises UsageError on all of them if one lacks the kernel, or `auto` is another one there.
    """
    name = try_on_all_ranks(world, lambda: choose_kernel_name(spec, world.device, config))
    names = world.gather(name)
    for rank, other in enumerate(names):
        if other != names[0]:
            attention, plain = Setting("attention", spec.attention), Setting("attention", choose_plain_kernel(config))
            why = f"is {names[0]} on rank 0 and {other} on rank {rank}"
            raise UsageError(attention, why, f"Try: {plain}, which every device has")
    return name


def choose_default_kernel(where: device) -> str:
    """Choose the value of --attention that `auto` stands for, with documents on device `where`."""
    register()
    return _choose_fastest(ActorSpec(), where, None).option_value


def find_kernel_obstacle(attention: str, where: device, dtype: Dtype) -> KernelObstacle | None:
    """Find what a kernel lacks on a device in a dtype; None if nothing is known."""
    return find_kernel(attention).packed.limits.find_obstacle(where.type, dtype, is_installed=is_installed(attention))


def is_installed(attention: str) -> bool:
    """Is the package there that brings a kernel? True for torch's own."""
    return find_kernel(attention).packed.limits.is_installed()


def _choose_ring_kernel(spec: ActorSpec, where: device, config: PretrainedConfig | None) -> str:
    is_chosen = spec.attention == Attention.AUTO
    may_choose = is_chosen and _choose_plain(config) is SDPA
    # The last kernel of the list is the one that also computes softcap and sinks.
    fastest_first = RING_KERNELS_FASTEST_FIRST if may_choose else RING_KERNELS_FASTEST_FIRST[-1:]
    lack = None
    for kernel in fastest_first if is_chosen else (find_kernel(spec.attention),):
        form = kernel.slices
        # The spec has refused kernels that have no form for slices together with a ring.
        assert form is not None
        lack = form.limits.find_obstacle(where.type, spec.dtype, is_installed=form.limits.is_installed())
        if lack is None:
            uses_cudnn = may_choose and _is_usable(CUDNN, spec, where, config)
            return RING_WITH_CUDNN[form.name].name if uses_cudnn else form.name
    assert lack is not None
    raise UsageError(f"{lack.text}. Try: {lack.advice}")


def _choose_fastest(spec: ActorSpec, where: device, config: PretrainedConfig | None) -> AttentionKernel:
    """Choose the first of KERNELS_FASTEST_FIRST that can run there, knows all that the model needs, and is right."""
    plain = _choose_plain(config)
    # A model that has no sdpa has softcapped scores, sinks, or its own attention, which no other kernel can replace.
    if plain is not SDPA:
        return plain
    return next((kernel for kernel in KERNELS_FASTEST_FIRST if _is_usable(kernel, spec, where, config)), plain)


def _is_usable(kernel: AttentionKernel, spec: ActorSpec, where: device, config: PretrainedConfig | None) -> bool:
    form = kernel.choose_form(packs=spec.packs)
    can_run = (
        form is not None
        and find_kernel_obstacle(kernel.option_value, where, spec.dtype) is None
        and _is_suitable(form.limits, config)
    )
    return can_run and is_right(kernel.option_value, where)


def _is_suitable(limits: KernelLimits, config: PretrainedConfig | None) -> bool:
    """Does the kernel know all that the model's attention needs?"""
    if config is None:
        return True
    text = config.get_text_config()
    has_dropout = getattr(text, "attention_dropout", 0.0) or getattr(text, "attn_pdrop", 0.0)
    if ("dropout" in limits.missing_features and has_dropout) or (
        "sliding_window" in limits.missing_features and _may_have_window(text)
    ):
        return False
    return limits.max_head_dim is None or _read_head_dim(text) <= limits.max_head_dim


def _may_have_window(text: PretrainedConfig) -> bool:
    """Does the model have a sliding window, or layers of another type that may have one?"""
    if layer_types := getattr(text, "layer_types", None):
        return any(layer_type != "full_attention" for layer_type in layer_types)
    return has_sliding_window(text)


def _read_head_dim(text: PretrainedConfig) -> int:
    head_dim = getattr(text, "head_dim", None)
    return int(head_dim or text.hidden_size // text.num_attention_heads)
