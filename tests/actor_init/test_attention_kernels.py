"""Kernels that need a GPU, with stand-ins for what they call: how they are called, and which one is taken."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig

from actor_init.attention import cudnn, kernel_check, kernel_choice
from actor_init.attention.cudnn import cudnn_packed, refuse_holes
from actor_init.attention.kernel_choice import default_kernel, kernel_name, lacks
from actor_init.attention.kernels import CUDNN_PACKED, CUDNN_PADDED
from actor_init.spec import ActorSpec, Attention, Dtype, UsageError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LLAMA = LlamaConfig(num_hidden_layers=1)


def each_document(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, borders: Tensor, scale: float | None = None
) -> Tensor:
    """Causal attention of each document by itself, in the shapes of the kernels for packed rows: [T, H, D]."""
    outs = []
    for begin, end in zip(borders.tolist(), borders.tolist()[1:], strict=False):
        if end > begin:
            query, key, value = (one[begin:end].transpose(0, 1) for one in (query_THD, key_TKD, value_TKD))
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
            outs.append(out.transpose(0, 1))
    return torch.cat(outs)


def cudnn_operator(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    assert (borders.dtype, int(borders.diff().max()) <= longest) == (torch.int32, True)
    return each_document(query, key, value, borders, scale), torch.empty(0)


def flash_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """With the arguments of flash-attn 3's, as its hopper/flash_attn_interface.py has them."""
    assert (causal, window_size, softcap) == (True, (-1, 0), 0.0)
    return each_document(q, k, v, cu_seqlens_q, softmax_scale)


def flash_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Any = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
) -> tuple[Tensor, None]:
    """With the arguments of flash-attn 4.0.0b36, and the softmax's sums beside the output."""
    assert cu_seqlens_q is not None
    assert (causal, window_size, softcap) == (True, (None, None), 0.0)
    return each_document(q, k, v, cu_seqlens_q, softmax_scale), None


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cudnn, "_packed", cudnn_operator)
    for name, function in (("flash_attn_interface", flash_3), ("flash_attn.cute", flash_4)):
        module = ModuleType(name)
        module.flash_attn_varlen_func = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    kernel_check.is_right.cache_clear()
    yield
    kernel_check.is_right.cache_clear()


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("kernel", ["cudnn", "flash3", "flash4"])
def test_a_kernel_is_called_so_that_documents_stay_apart(kernel: str) -> None:
    assert kernel_check.error_of(kernel, CPU) < kernel_check.BOUND / 3
    assert kernel_check.is_right(Attention(kernel), CPU)


def _whole_row(borders: Tensor) -> Tensor:
    return borders[[0, -1]]


def _one_late(borders: Tensor) -> Tensor:
    return torch.cat((borders[:1], borders[1:-1] + 1, borders[-1:]))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("wrong", [_whole_row, _one_late])
def test_a_kernel_with_wrong_borders_is_not_right(
    wrong: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def operator(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
        return each_document(q, k, v, wrong(borders), scale), torch.empty(0)

    monkeypatch.setattr(cudnn, "_packed", operator)
    assert kernel_check.error_of("cudnn", CPU) > 2 * kernel_check.BOUND
    assert not kernel_check.is_right(Attention.CUDNN, CPU)


@pytest.mark.usefixtures("stand_ins")
def test_padded_rows_with_a_wrong_mask_are_seen_though_packed_ones_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cudnn._borders
    monkeypatch.setattr(cudnn, "_borders", lambda is_real_BS: right(torch.ones_like(is_real_BS)))
    assert kernel_check.error_of("cudnn", CPU) > 2 * kernel_check.BOUND


def test_padding_on_either_side_is_a_document_of_its_own() -> None:
    is_real_BS = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]], dtype=torch.bool)
    assert cudnn._borders(is_real_BS).tolist() == [0, 1, 3, 4, 4, 8, 8, 11, 12, 12]


def test_rows_with_padding_between_their_tokens_are_refused() -> None:
    refuse_holes(torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool), "a.pkl")
    with pytest.raises(UsageError, match=r"^a.pkl: a row has padding between its tokens.* Try: --attention sdpa"):
        refuse_holes(torch.tensor([[0, 1, 0, 1]], dtype=torch.bool), "a.pkl")


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
    with pytest.raises(UsageError, match=f"cuDNN's attention has {says}, which this model needs. Try: --attention"):
        cudnn_packed(torch.nn.Identity(), heads, heads, heads, None, cu_seq_lens_q=borders, max_length_q=10, **given)


def test_a_compiled_block_has_no_break_at_cudnn_s_operator() -> None:
    def attended(heads: Tensor, borders: Tensor) -> Tensor:
        module = torch.nn.Identity()
        return cudnn_packed(module, heads * 2, heads, heads, None, cu_seq_lens_q=borders, max_length_q=256)[0] * 2

    heads = torch.rand(1, 4, 10, 16, device="meta", requires_grad=True)
    borders = torch.zeros(3, dtype=torch.int32, device="meta")
    out = torch.compile(attended, fullgraph=True, backend="aot_eager")(heads, borders)
    assert out.shape == (1, 10, 4, 16)
    (gradient,) = torch.autograd.grad(out, heads, torch.empty_like(out))
    assert gradient.shape == heads.shape


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (Attention.CUDNN, "cuDNN's attention has no CPU kernel. Try: --attention sdpa"),
        (Attention.FLASH3, "flash-attn 3 has no CPU kernel. Try: --attention sdpa"),
        (Attention.FLASH4, "flash-attn 4 has no CPU kernel. Try: --attention sdpa"),
    ],
)
def test_a_kernel_of_gpus_is_refused_on_a_cpu(typed: Attention, says: str) -> None:
    with pytest.raises(UsageError, match=f"^{says}"):
        kernel_name(ActorSpec(attention=typed), CPU, LLAMA)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Attention]]:
    """Stands for a GPU of capability 9.0; the kernels in `installed` are there, and those in `right` are right."""
    kernels = {"installed": {Attention.CUDNN, Attention.FLASH, Attention.VARLEN}}
    kernels["right"] = {*kernels["installed"], Attention.FLASH3}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: (9, 0))
    monkeypatch.setattr(kernel_choice, "is_installed", lambda one: one in kernels["installed"])
    monkeypatch.setattr(kernel_choice, "is_right", lambda one, where: one in kernels["right"])
    return kernels


def test_auto_takes_the_first_that_is_installed_and_right(hopper: dict[str, set[Attention]]) -> None:
    assert default_kernel(CUDA) == "cudnn"
    hopper["right"].discard(Attention.CUDNN)
    assert default_kernel(CUDA) == "flash"
    hopper["installed"].add(Attention.FLASH3)
    assert default_kernel(CUDA) == "flash3"
    hopper["right"].clear()
    assert default_kernel(CUDA) == "sdpa"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("config", "kernel"),
    [
        (LLAMA, CUDNN_PACKED),
        (LlamaConfig(attention_dropout=0.1), "packed_fa2"),
        (LlamaConfig(head_dim=256), "packed_fa2"),
        (MistralConfig(sliding_window=64), "packed_fa2"),
        (GPT2Config(attn_pdrop=0.1), "packed_fa2"),
    ],
)
def test_auto_takes_what_knows_all_that_the_model_needs(config: PretrainedConfig, kernel: str) -> None:
    assert kernel_name(ActorSpec(), CUDA, config) == kernel


@pytest.mark.usefixtures("hopper")
def test_auto_in_fp32_is_sdpa_and_padded_rows_have_a_kernel_of_their_own() -> None:
    assert kernel_name(ActorSpec(dtype=Dtype.FP32), CUDA, LLAMA) == "sdpa"
    assert kernel_name(ActorSpec(packing=False), CUDA, LLAMA) == CUDNN_PADDED
    assert kernel_name(replace(ActorSpec(), attention=Attention.FLASH, packing=False), CUDA, LLAMA) == (
        "flash_attention_2"
    )


@pytest.mark.usefixtures("hopper")
def test_what_is_not_installed_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"^flash-attn 4 is not installed. Try: --attention auto, or docs/replay.md"):
        kernel_name(ActorSpec(attention=Attention.FLASH4), CUDA, LLAMA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: (8, 0))
    lack = lacks(Attention.CUDNN, CUDA, Dtype.BF16)
    assert lack is not None
    assert "needs a GPU of compute capability 9 or 10, and this one has 8" in lack.text
    assert default_kernel(CUDA) == "flash"
