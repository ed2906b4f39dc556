"""Kernels that need a GPU, with stand-ins for what they call: how they are called, and which one is taken."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers import AttentionInterface, GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config

from actor_init.attention import cudnn, kernel_choice
from actor_init.attention.cudnn import cudnn_dense, cudnn_packed, cudnn_padded, refuse_padding_between_tokens
from actor_init.attention.kernel_choice import (
    choose_default_kernel,
    choose_kernel_name,
    choose_kernel_name_on_all_ranks,
)
from actor_init.attention.kernels import flash_attn_varlen, wrap_with_cudnn
from actor_init.attention.ring_attention import ring_flash_attn
from actor_init.attention.ring_split import RingSlice
from actor_init.compiling import count_graphs
from actor_init.declarations.attention import KERNELS, find_attention_form, find_kernel
from actor_init.declarations.attention.declaration import AttentionKernel
from actor_init.spec import ActorSpec, Attention, Dtype, ParallelSpec, UsageError
from tests.helpers.thread_ranks import call_on_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LLAMA = LlamaConfig(num_hidden_layers=1)


def each_document(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, borders: Tensor, scale: float | None = None
) -> Tensor:
    """Causal attention of each document by itself, in the shapes of the kernels for packed rows: [T, H, D]."""
    outs = []
    for begin, end in zip(borders.tolist(), borders.tolist()[1:], strict=False):
        if end > begin:
            query, key, value = (tensor[begin:end].transpose(0, 1) for tensor in (query_THD, key_TKD, value_TKD))
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
            outs.append(out.transpose(0, 1))
    return torch.cat(outs)


def flash_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """With the arguments of flash-attn 2.8's."""
    assert (dropout_p, causal, window_size, softcap) == (0.0, True, (-1, 0), 0.0)
    return each_document(q, k, v, cu_seqlens_q, softmax_scale)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cudnn, "BACKEND", SDPBackend.MATH)
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    kernel_choice.is_right.cache_clear()
    yield
    kernel_choice.is_right.cache_clear()


def register_like_cudnn(packed: Any = cudnn_packed, padded: Any = cudnn_padded) -> AttentionKernel:
    """Give transformers a kernel that is declared as cuDNN's is and has these functions."""
    AttentionInterface.register("like_cudnn_packed", packed)
    AttentionInterface.register("like_cudnn_padded", padded)
    declared = KERNELS[Attention.CUDNN]
    assert declared.padded is not None
    return replace(
        declared,
        packed=replace(declared.packed, name="like_cudnn_packed"),
        padded=replace(declared.padded, name="like_cudnn_padded"),
    )


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_a_kernel_is_called_so_that_documents_stay_apart(kernel: str) -> None:
    assert kernel_choice.measure_error(find_kernel(kernel), CPU) < kernel_choice.BOUND / 3
    assert kernel_choice.is_right(Attention(kernel), CPU)


def _whole_row(borders: Tensor) -> Tensor:
    return borders[[0, -1]]


def _one_late(borders: Tensor) -> Tensor:
    return torch.cat((borders[:1], borders[1:-1] + 1, borders[-1:]))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("wrong", [_whole_row, _one_late])
def test_a_kernel_with_wrong_borders_is_not_right(wrong: Callable[[Tensor], Tensor]) -> None:
    def attend(*args: Any, cu_seq_lens_q: Tensor, **more: Any) -> Any:
        return cudnn_packed(*args, cu_seq_lens_q=wrong(cu_seq_lens_q), **more)

    kernel = register_like_cudnn(packed=attend)
    assert kernel_choice.measure_error(kernel, CPU) > 2 * kernel_choice.BOUND
    assert not kernel_choice.gives_right_numbers(kernel, CPU)


class _WrongInBackward(torch.autograd.Function):
    """Change the gradient of rows of more than `longest` tokens."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, factor: float, longest: int) -> Tensor:
        ctx.factor = factor if heads.shape[2] > longest else 1.0
        return heads.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] * ctx.factor, None, None


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("factor", [0.5, float("nan")])
@pytest.mark.parametrize(("longest", "is_wrong"), [(100, True), (839, True), (1100, False)])
def test_a_kernel_whose_gradients_are_wrong_in_a_long_row_alone_is_not_right(
    factor: float, longest: int, is_wrong: bool
) -> None:
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> Any:
        return cudnn_packed(module, query, _WrongInBackward.apply(key, factor, longest), value, *args, **more)

    assert kernel_choice.gives_right_numbers(register_like_cudnn(packed=attend), CPU) is not is_wrong


@pytest.mark.usefixtures("stand_ins")
def test_padded_rows_with_a_wrong_mask_are_seen_though_packed_ones_are_right() -> None:
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **more: Any) -> Any:
        return cudnn_padded(module, query, key, value, mask.roll(1, dims=1), **more)

    assert kernel_choice.measure_error(register_like_cudnn(), CPU) < kernel_choice.BOUND / 3
    assert kernel_choice.measure_error(register_like_cudnn(padded=attend), CPU) > 2 * kernel_choice.BOUND


@pytest.mark.usefixtures("stand_ins")
def test_rows_padded_on_either_side_are_as_each_document_by_itself() -> None:
    lengths, starts, num_tokens = (3, 7, 1, 4), (0, 0, 6, 2), 7
    heads_BHSD = torch.randn(4, 4, num_tokens, 8, requires_grad=True)
    place_S = torch.arange(num_tokens)
    is_real_BS = torch.stack([(place_S >= s) & (place_S < s + n) for s, n in zip(starts, lengths, strict=True)])
    module = torch.nn.Identity()
    out_BSHD, _ = cudnn_padded(module, heads_BHSD, heads_BHSD[:, :2], heads_BHSD[:, 2:], is_real_BS)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        own = heads_BHSD[row, :, start : start + length].transpose(0, 1)
        wanted = each_document(own, own[:, :2], own[:, 2:], torch.tensor([0, length]))
        found = out_BSHD[row, start : start + length]
        torch.testing.assert_close(found, wanted)
        gradients = [
            torch.autograd.grad(result.square().sum(), heads_BHSD, retain_graph=True)[0] for result in (found, wanted)
        ]
        torch.testing.assert_close(*gradients)


def test_rows_with_padding_between_their_tokens_are_refused() -> None:
    refuse_padding_between_tokens(torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool), "a.pkl")
    with pytest.raises(UsageError, match=r"^a.pkl: a row has padding between its tokens.* Try: attention='sdpa'"):
        refuse_padding_between_tokens(torch.tensor([[0, 1, 0, 1]], dtype=torch.bool), "a.pkl")


def test_a_document_of_one_token_is_its_value_and_is_no_call_of_cudnn() -> None:
    query, value = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 1, 16)
    out_BSHD, _ = cudnn_dense(torch.nn.Identity(), query, value, value, None)
    assert torch.equal(out_BSHD[0, 0], value[0, [0, 0, 1, 1], 0])
    with pytest.raises(RuntimeError, match=r"No available kernel|No viable backend"):
        cudnn_dense(
            torch.nn.Identity(), query.repeat(1, 1, 2, 1), value.repeat(1, 1, 2, 1), value.repeat(1, 1, 2, 1), None
        )


@pytest.mark.parametrize("typed", [name for name in Attention if name not in ("auto", "flash", "sdpa")])
def test_a_kernel_without_a_ring_is_refused_with_one(typed: Attention) -> None:
    with pytest.raises(UsageError, match=f"^attention='{typed}' has no ring. Try: ring=2, attention='flash', or sdpa"):
        ActorSpec(attention=typed, parallel=ParallelSpec(ring=2))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dropout": 0.1}, "no dropout"),
        ({"softcap": 30.0}, "no softcap"),
        ({"s_aux": torch.ones(4)}, "no attention sinks"),
        ({"sliding_window": 8}, r"no sliding window \(here 8 of 10 tokens\)"),
    ],
)
def test_what_cudnn_lacks_is_refused(given: dict[str, Any], says: str) -> None:
    heads = torch.rand(1, 4, 10, 16)
    borders = torch.tensor([0, 10], dtype=torch.int32)
    with pytest.raises(UsageError, match=f"cuDNN's attention has {says}, which this model needs. Try: attention="):
        cudnn_packed(torch.nn.Identity(), heads, heads, heads, None, cu_seq_lens_q=borders, max_length_q=10, **given)


@pytest.mark.parametrize(("given", "says"), [({"softcap": 30.0}, "no softcap"), ({"s_aux": torch.ones(4)}, "no sinks")])
def test_what_ring_flash_attn_lacks_is_refused(given: dict[str, Any], says: str) -> None:
    heads, no_slice = torch.rand(1, 4, 10, 16), cast(RingSlice, None)
    with pytest.raises(UsageError, match=f"^ring attention has {says}, which this model needs. Try: ring=1"):
        ring_flash_attn(torch.nn.Identity(), heads, heads, heads, None, ring=no_slice, **given)


@pytest.mark.usefixtures("stand_ins")
def test_a_compiled_row_of_one_document_has_no_graph_break_at_any_length() -> None:
    kernel = wrap_with_cudnn(flash_attn_varlen, min_length=10)

    def attend_packed(heads: Tensor, borders: Tensor) -> Tensor:
        out: Tensor = kernel(torch.nn.Identity(), heads * 2, heads[:, :2], heads[:, 2:], None, **of(borders))[0]
        return out * 2

    def of(borders: Tensor) -> dict[str, Any]:
        return {"cu_seq_lens_q": borders, "max_length_q": 256}

    compiled = torch.compile(attend_packed, fullgraph=True, backend="eager", dynamic=True)
    for num_tokens in (10, 17):
        heads = torch.randn(1, 4, num_tokens, 16, requires_grad=True)
        borders = torch.tensor([0, num_tokens], dtype=torch.int32)
        out = compiled(heads, borders)
        own = (heads * 2)[0].transpose(0, 1), heads[0, :2].transpose(0, 1), heads[0, 2:].transpose(0, 1)
        wanted = each_document(*own, borders)[None] * 2
        torch.testing.assert_close(out, wanted)
        gradients = [torch.autograd.grad(result.square().sum(), heads)[0] for result in (out, wanted)]
        torch.testing.assert_close(*gradients)


@pytest.mark.usefixtures("stand_ins")
def test_a_compiled_row_of_other_documents_needs_no_new_graph() -> None:
    def attend_packed(heads: Tensor, borders: Tensor) -> Tensor:
        own = heads[:, :2], heads[:, 2:]
        return cudnn_packed(torch.nn.Identity(), heads * 2, *own, None, cu_seq_lens_q=borders, max_length_q=256)[0] * 2

    compiled = torch.compile(attend_packed, backend="eager", dynamic=True)
    graphs: list[int] = []
    for lengths in ([3, 1, 6], [5, 9], [2, 2, 2, 2, 9], [4, 1, 1]):
        heads = torch.randn(1, 4, sum(lengths), 16)
        borders = torch.tensor([0, *lengths]).cumsum(0).int()
        own = (heads * 2)[0].transpose(0, 1), heads[0, :2].transpose(0, 1), heads[0, 2:].transpose(0, 1)
        torch.testing.assert_close(compiled(heads, borders), each_document(*own, borders)[None] * 2)
        graphs.append(count_graphs())
    assert len(set(graphs[1:])) == 1  # what was a constant in the first became a symbol in the second


@pytest.mark.usefixtures("stand_ins")
def test_cudnn_is_for_a_row_of_one_long_document() -> None:
    taken: list[str] = []

    def flash(module: Any, query: Tensor, *args: Any, **more: Any) -> tuple[Tensor, None]:
        taken.append("flash")
        return query, None

    def dense(module: Any, query: Tensor, *args: Any, **more: Any) -> tuple[Tensor, None]:
        taken.append("cudnn")
        return query, None

    both = wrap_with_cudnn(flash, dense=dense, min_length=10)
    for lengths, width, of_values in (
        ([10], 16, 16),
        ([9], 16, 16),
        ([11], 128, 128),
        ([10, 1], 16, 16),
        ([11], 136, 136),
        ([11], 96, 64),
    ):
        heads, values = torch.randn(1, 2, sum(lengths), width), torch.randn(1, 2, sum(lengths), of_values)
        borders = torch.tensor([0, *lengths]).cumsum(0).int()
        both(torch.nn.Identity(), heads, heads, values, None, cu_seq_lens_q=borders, max_length_q=256)
    assert taken == ["cudnn", "flash", "cudnn", "flash", "flash", "flash"]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (Attention.CUDNN, "cuDNN's attention has no CPU kernel. Try: attention='sdpa'"),
        (Attention.FLASH, "flash-attn has no CPU kernel. Try: attention='sdpa'"),
    ],
)
def test_a_kernel_of_gpus_is_refused_on_a_cpu(typed: Attention, says: str) -> None:
    with pytest.raises(UsageError, match=f"^{says}"):
        choose_kernel_name(ActorSpec(attention=typed), CPU, LLAMA)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Attention]]:
    """Stands for a GPU; the kernels in `installed` are there, and those in `right` are right.

    Those in `in_ring` are there for a ring.
    """
    known = {"installed": {Attention.CUDNN, Attention.FLASH, Attention.VARLEN}, "in_ring": {Attention.FLASH}}
    known["right"] = {*known["installed"]}
    monkeypatch.setattr(
        "actor_init.declarations.attention.flash.find_spec", lambda name: Attention.FLASH in known["in_ring"] or None
    )
    monkeypatch.setattr(kernel_choice, "is_installed", lambda name: name in known["installed"])
    monkeypatch.setattr(kernel_choice, "is_right", lambda name, where: name in known["right"])
    return known


def test_auto_takes_the_first_that_is_installed_and_right(hopper: dict[str, set[Attention]]) -> None:
    assert (choose_default_kernel(CUDA), choose_kernel_name(ActorSpec(), CUDA)) == ("flash", "packed_fa2_or_cudnn")
    hopper["right"].discard(Attention.CUDNN)
    assert choose_kernel_name(ActorSpec(), CUDA) == "packed_fa2"
    hopper["installed"].discard(Attention.FLASH)
    assert (choose_default_kernel(CUDA), choose_kernel_name(ActorSpec(), CUDA)) == ("varlen", "torch_varlen_attn")
    hopper["right"] = {Attention.CUDNN, Attention.VARLEN}
    assert choose_kernel_name(ActorSpec(), CUDA) == "torch_varlen_attn_or_cudnn"
    hopper["right"] = {Attention.CUDNN}
    assert (choose_default_kernel(CUDA), choose_kernel_name(ActorSpec(), CUDA)) == ("cudnn", "packed_cudnn")
    hopper["right"].clear()
    assert choose_default_kernel(CUDA) == "sdpa"


@pytest.mark.usefixtures("hopper")
def test_a_kernel_that_was_typed_is_that_one_alone() -> None:
    assert choose_kernel_name(ActorSpec(attention=Attention.FLASH), CUDA, LLAMA) == "packed_fa2"
    assert choose_kernel_name(ActorSpec(attention=Attention.CUDNN), CUDA, LLAMA) == "packed_cudnn"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("ring", "kernel"), [(1, "flash-attn"), (2, "ring-flash-attn")])
def test_a_kernel_that_one_rank_lacks_is_refused_on_all(ring: int, kernel: str) -> None:
    spec = ActorSpec(attention=Attention.FLASH, parallel=ParallelSpec(ring=ring))
    says = f"on rank 1: {kernel} has no CPU kernel. Try: attention='sdpa'"
    results = call_on_ranks(lambda world: choose_kernel_name_on_all_ranks(spec, world, LLAMA), [CUDA, CPU])
    assert [type(result) for result in results] == [UsageError, UsageError]
    assert str(results[0]) == str(results[1])
    assert str(results[0]).startswith(says)


@pytest.mark.usefixtures("hopper")
def test_auto_that_is_another_kernel_on_another_rank_is_refused_on_all() -> None:
    results = call_on_ranks(lambda world: choose_kernel_name_on_all_ranks(ActorSpec(), world, LLAMA), [CUDA, CPU])
    says = (
        "attention='auto' is packed_fa2_or_cudnn on rank 0 and sdpa on rank 1. Try: attention='sdpa', which every "
        "device has"
    )
    assert [(type(result), str(result)) for result in results] == [(UsageError, says)] * 2
    assert call_on_ranks(lambda world: choose_kernel_name_on_all_ranks(ActorSpec(), world, LLAMA), [CPU, CPU]) == [
        "sdpa",
        "sdpa",
    ]


def test_of_two_kernels_a_reader_is_told_when_each_is_taken() -> None:
    assert find_attention_form("packed_fa2_or_cudnn").describe() == (
        "packed_fa2, packed_cudnn for rows of one document of 4,096 tokens or more"
    )
    assert find_attention_form("packed_fa2").describe() == "packed_fa2"
    assert find_attention_form("ring_fa2_or_cudnn").describe() == (
        "ring_fa2, ring_cudnn for rows of one document of 8,192 tokens a rank or more"
    )


@pytest.mark.parametrize(
    ("config", "attention", "has_flash", "kernel"),
    [
        (LLAMA, Attention.AUTO, True, "ring_fa2_or_cudnn"),
        (LLAMA, Attention.AUTO, False, "ring_gathered_or_cudnn"),
        (LLAMA, Attention.FLASH, True, "ring_fa2"),
        (LLAMA, Attention.SDPA, True, "ring_gathered"),
        (LlamaConfig(head_dim=256), Attention.AUTO, True, "ring_fa2"),
        (MistralConfig(sliding_window=64), Attention.AUTO, True, "ring_fa2"),
        (LlamaConfig(attention_dropout=0.1), Attention.AUTO, False, "ring_gathered"),
    ],
)
def test_a_ring_takes_cudnn_for_long_documents_where_it_may_choose(
    config: PretrainedConfig,
    attention: Attention,
    has_flash: bool,
    kernel: str,
    hopper: dict[str, set[Attention]],
) -> None:
    if not has_flash:
        hopper["in_ring"].clear()
    spec = ActorSpec(attention=attention, parallel=ParallelSpec(ring=2))
    assert choose_kernel_name(spec, CUDA, config) == kernel
    in_fp32 = ActorSpec(dtype=Dtype.FP32, parallel=ParallelSpec(ring=2))
    assert choose_kernel_name(in_fp32, CUDA, config) == "ring_gathered"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("config", "kernel"),
    [
        (LLAMA, "packed_fa2_or_cudnn"),
        (LlamaConfig(attention_dropout=0.1), "packed_fa2"),
        (LlamaConfig(head_dim=256), "packed_fa2"),
        (MistralConfig(sliding_window=64), "packed_fa2"),
        (GPT2Config(attn_pdrop=0.1), "packed_fa2"),
        # A window that is never used, and one of a single layer.
        (Qwen2Config(sliding_window=64, use_sliding_window=False), "packed_fa2_or_cudnn"),
        (Qwen2Config(num_hidden_layers=2, layer_types=["full_attention"] * 2), "packed_fa2_or_cudnn"),
        (Qwen2Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]), "packed_fa2"),
        (LlamaConfig(head_dim=128), "packed_fa2_or_cudnn"),
    ],
)
def test_auto_takes_what_knows_all_that_the_model_needs(config: PretrainedConfig, kernel: str) -> None:
    assert choose_kernel_name(ActorSpec(), CUDA, config) == kernel


@pytest.mark.usefixtures("hopper")
def test_auto_in_fp32_is_sdpa_and_padded_rows_have_a_kernel_of_their_own() -> None:
    assert choose_kernel_name(ActorSpec(dtype=Dtype.FP32), CUDA, LLAMA) == "sdpa"
    assert choose_kernel_name(ActorSpec(packing=False), CUDA, LLAMA) == "flash_attention_2"
    assert choose_kernel_name(ActorSpec(attention=Attention.CUDNN, packing=False), CUDA, LLAMA) == "padded_cudnn"


@pytest.mark.usefixtures("hopper")
def test_what_is_not_installed_is_refused_in_a_line(hopper: dict[str, set[Attention]]) -> None:
    hopper["installed"].discard(Attention.FLASH)
    with pytest.raises(UsageError, match=r"^flash-attn is not installed. Try: "):
        choose_kernel_name(ActorSpec(attention=Attention.FLASH), CUDA, LLAMA)
