"""Options that were not given follow the job: its attention kernel, and whether it used Liger."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from actor_init.attention import kernel_choice
from actor_init.spec import ActorSpec, Attention, Dtype, Kernels, ParallelSpec, Routing, UsageError
from capture import recording
from capture.file_format.capture_file import CapturedCall, read_call
from capture.file_format.listing import capture_files
from capture.record.job_facts import find_kernels
from replay.options.resolved import KERNELS, PACKING, ROUTING, ChosenBy, ResolvedChoice
from replay.options.spec import MeasureSpec, ReplaySpec, VerdictRule
from replay.resolution.job_defaults import ChosenAttention, apply_choices, choose_from_job, choose_job_kernel
from replay.resolution.selection import Selection

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
CONFIG = LlamaConfig(**TINY)
SELECTION = Selection(inputs=[], num_left_out_passes=0, num_left_over=0, damaged=[], dealing="")


def job(*, packed: bool = False, **environment: str) -> CapturedCall:
    """A capture of a job with these settings; packed rows come with position ids."""
    tensors = {"input_ids": torch.ones(1, 4)} | ({"position_ids": torch.ones(1, 4)} if packed else {})
    known: dict[str, Any] = {
        "weights": None,
        "outputs": {},
        "routes": {},
        "trains": True,
        "random": {},
        "random_after": {},
    }
    return cast(CapturedCall, SimpleNamespace(environment=environment, tensors=tensors, **known))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> set[Attention]:
    there = {Attention.CUDNN, Attention.FLASH, Attention.VARLEN}
    monkeypatch.setattr(kernel_choice, "is_installed", lambda package: package in there)
    return there


def choose_kernel(first: CapturedCall | None, where: torch.device, **given: Any) -> ChosenAttention:
    spec = ReplaySpec(actor=ActorSpec(**given)).actor.with_defaults()
    return choose_job_kernel(spec, first, where, CONFIG)


def test_auto_takes_the_job_s_kernel() -> None:
    flash = job(attention="flash_attention_2")
    assert choose_kernel(flash, CUDA) == ChosenAttention(
        option_value=Attention.FLASH, why="as the job's flash_attention_2"
    )
    assert choose_kernel(job(attention="eager"), CPU) == ChosenAttention(option_value=Attention.EAGER)
    assert choose_kernel(job(packed=True, attention="sdpa"), CUDA).option_value == Attention.SDPA


def test_what_was_typed_stays() -> None:
    flash = job(attention="flash_attention_2")
    assert choose_kernel(flash, CUDA, attention=Attention.VARLEN) == ChosenAttention(option_value=Attention.VARLEN)


@pytest.mark.parametrize(
    ("first", "where", "why"),
    [
        (job(attention="flash_attention_2"), CPU, "what a CPU has; of the job's flash_attention_2: flash-attn has no"),
        (job(attention="flash_attention_3"), CUDA, "the job's flash_attention_3 is not known here"),
        (job(attention="sdpa"), CUDA, "the job's sdpa had padded rows, and packed ones need a mask"),
        (job(), CUDA, "the captures do not name the job's"),
        (None, CUDA, "the captures do not name the job's"),
    ],
)
def test_where_the_job_s_kernel_cannot_be_had_another_is_found_and_the_header_says_why(
    first: CapturedCall | None, where: torch.device, why: str
) -> None:
    found = choose_kernel(first, where)
    assert found.option_value == Attention.AUTO
    assert why in found.why
    if where is CUDA:
        assert found.why.startswith("the fastest here that the kernel check finds right; ")


def test_a_ring_has_a_kernel_of_its_own() -> None:
    ring = choose_kernel(job(attention="eager"), CUDA, parallel=ParallelSpec(ring=2))
    assert ring == ChosenAttention(option_value=Attention.AUTO)


@pytest.mark.parametrize(
    ("first", "typed", "expected"),
    [
        (job(kernels="liger"), Kernels.AUTO, Kernels.FUSED),
        (job(kernels="liger"), Kernels.MODEL, Kernels.MODEL),
        (job(kernels="model"), Kernels.AUTO, Kernels.MODEL),
        (job(kernels="model"), Kernels.FUSED, Kernels.FUSED),
        (job(), Kernels.AUTO, Kernels.MODEL),
        (None, Kernels.AUTO, Kernels.MODEL),
    ],
)
def test_auto_is_fused_where_the_job_used_liger(
    first: CapturedCall | None, typed: Kernels, expected: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.resolution.job_defaults.find_liger_lack", lambda where: None)
    spec = ReplaySpec(actor=ActorSpec(kernels=typed))
    assert apply_choices(spec.actor, choose_from_job(spec, first, SELECTION, "cuda")).kernels is expected


def test_where_liger_cannot_run_a_job_that_used_it_is_replayed_by_the_model_s_own_modules() -> None:
    choices = choose_from_job(ReplaySpec(actor=ActorSpec()), job(kernels="liger"), SELECTION, "cpu")
    [choice] = [choice for choice in choices if choice.setting == KERNELS]
    assert (choice.value, choice.by) == (Kernels.MODEL, ChosenBy.MACHINE)
    assert choice.why == "the job used Liger, which has no CPU kernels"


class LigersNorm(nn.Module):
    """A norm whose name says that it is Liger's."""

    __module__ = "liger_kernel.transformers.rms_norm"

    def forward(self, x: Tensor) -> Tensor:
        return x


LigersNorm.forward.__module__ = LigersNorm.__module__


def _ligers_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


_ligers_rotary.__module__ = "liger_kernel.transformers.rope"


def test_a_capture_says_whether_the_job_used_liger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record_kernels(folder: Path, model: nn.Module) -> str:
        with recording(model, folder, reproduce=True):
            model(input_ids=torch.arange(6)[None])
        (path,) = capture_files(folder)
        return read_call(path).environment["kernels"]

    plain, patched = LlamaForCausalLM(CONFIG), LlamaForCausalLM(CONFIG)
    norm = patched.model.norm
    # Liger patches an existing model in this way.
    norm.forward = LigersNorm.forward.__get__(norm)
    assert record_kernels(tmp_path / "plain", plain) == "model"
    assert record_kernels(tmp_path / "patched", patched) == "liger"
    exchanged = LlamaForCausalLM(CONFIG)
    exchanged.model.norm = LigersNorm()
    assert find_kernels(exchanged) == "liger"
    monkeypatch.setattr(sys.modules[LlamaForCausalLM.__module__], "apply_rotary_pos_emb", _ligers_rotary)
    assert find_kernels(plain) == "liger"


def choose(
    setting: str, first: CapturedCall | None, spec: ReplaySpec, selection: Selection = SELECTION
) -> ResolvedChoice:
    [choice] = [made for made in choose_from_job(spec, first, selection, "cpu") if made.setting == setting]
    return choice


@pytest.mark.parametrize(
    ("weights", "logits", "environment", "dtype", "by"),
    [
        ([], None, {}, Dtype.BF16, ChosenBy.DEFAULT),
        (["float32"], None, {}, Dtype.FP32, ChosenBy.JOB),
        (["bfloat16"], None, {}, Dtype.BF16, ChosenBy.JOB),
        # Of several the coarsest: what was computed in it is no finer anywhere.
        (["float32", "bfloat16"], None, {}, Dtype.BF16, ChosenBy.JOB),
        (["float32"], None, {"autocast": "bf16"}, Dtype.BF16, ChosenBy.JOB),
        (["float32"], "bfloat16", {}, Dtype.BF16, ChosenBy.JOB),
        (["float32"], None, {"ACCELERATE_MIXED_PRECISION": "fp16"}, Dtype.FP16, ChosenBy.JOB),
        (["float16"], "bfloat16", {}, Dtype.BF16, ChosenBy.JOB),
        # The replay has no dtype between fp32 and 16 bits.
        (["float32"], None, {"torch.float32_matmul_precision": "high"}, Dtype.FP32, ChosenBy.JOB),
    ],
)
def test_the_dtype_is_the_coarsest_of_the_jobs_unless_it_was_typed(
    weights: list[str], logits: str | None, environment: dict[str, Any], dtype: Dtype, by: ChosenBy
) -> None:
    first: Any = job(**environment)
    first.weights = SimpleNamespace(samples=[SimpleNamespace(dtype=name) for name in weights])
    first.outputs = {} if logits is None else {"logits_dtype": logits}
    chosen = choose("actor.dtype", first, ReplaySpec(actor=ActorSpec(backend="ddp")))
    assert (chosen.value, chosen.by) == (dtype, by)
    for typed in (Dtype.FP32, Dtype.BF16):
        chosen = choose("actor.dtype", first, ReplaySpec(actor=ActorSpec(backend="ddp", dtype=typed)))
        assert (chosen.value, chosen.by) == (typed, ChosenBy.TYPED)


@pytest.mark.parametrize(
    ("actor", "verdict", "keeps_padding", "packs", "by"),
    [
        ({}, "auto", False, True, ChosenBy.MODEL),
        ({}, "strict", False, False, ChosenBy.JOB),  # the job's rows were padded
        ({}, "auto", True, False, ChosenBy.JOB),
        ({"parallel": ParallelSpec(ring=2), "backend": "fsdp2"}, "strict", True, True, ChosenBy.OPTION),
        ({"packing": True}, "strict", True, True, ChosenBy.TYPED),
        ({"packing": False}, "auto", False, False, ChosenBy.TYPED),
    ],
)
def test_rows_are_packed_as_typed_else_as_options_and_the_job_allow(
    actor: dict[str, Any], verdict: str, keeps_padding: bool, packs: bool, by: ChosenBy
) -> None:
    measure = MeasureSpec() if verdict == "auto" else MeasureSpec(verdict=VerdictRule.STRICT)
    spec = ReplaySpec(actor=ActorSpec(**actor), measure=measure)
    chosen = choose(PACKING, job(), spec, replace(SELECTION, must_keep_padding=keeps_padding))
    assert (chosen.value, chosen.by) == (packs, by)


@pytest.mark.parametrize(
    ("typed", "has_job_windows", "by"),
    [
        (4, True, ChosenBy.TYPED),
        (4, False, ChosenBy.TYPED),
        (None, True, ChosenBy.JOB),
        (None, False, ChosenBy.DEFAULT),
    ],
)
def test_the_accumulation_is_what_was_typed_or_makes_the_jobs_windows(
    typed: int | None, has_job_windows: bool, by: ChosenBy
) -> None:
    selection = replace(SELECTION, grad_accumulation=typed or 2, has_job_windows=has_job_windows)
    chosen = choose("actor.grad_accumulation", job(), ReplaySpec(actor=ActorSpec(grad_accumulation=typed)), selection)
    assert (chosen.value, chosen.by) == (typed or 2, by)


def choose_routing(first: CapturedCall | None, **given: Any) -> tuple[object, ChosenBy]:
    choices = choose_from_job(ReplaySpec(actor=ActorSpec(**given)), first, SELECTION, "cpu")
    [choice] = [choice for choice in choices if choice.setting == ROUTING]
    return choice.value, choice.by


def with_routes() -> CapturedCall:
    first = job()
    first.routes = {"gate": torch.zeros(4, 2)}  # type: ignore[misc]
    return first


def test_the_job_s_experts_are_taken_where_the_captures_hold_them() -> None:
    assert choose_routing(with_routes()) == (Routing.RECORDED, ChosenBy.JOB)
    assert choose_routing(job()) == (Routing.LIVE, ChosenBy.DEFAULT)
    assert choose_routing(None) == (Routing.LIVE, ChosenBy.DEFAULT)
    assert choose_routing(with_routes(), routing=Routing.LIVE) == (Routing.LIVE, ChosenBy.TYPED)
    assert choose_routing(with_routes(), routing=Routing.RECORDED) == (Routing.RECORDED, ChosenBy.TYPED)


def test_experts_that_were_not_recorded_are_refused() -> None:
    with pytest.raises(UsageError, match="the captures hold none"):
        choose_routing(job(), routing=Routing.RECORDED)


def test_a_router_that_sees_a_share_of_the_tokens_chooses_here() -> None:
    split = {"parallel": ParallelSpec(tp=2, sequence_parallel=True), "backend": "fsdp2"}
    assert choose_routing(with_routes(), **split) == (Routing.LIVE, ChosenBy.OPTION)
    with pytest.raises(UsageError, match="gives each router all tokens"):
        choose_routing(with_routes(), **split, routing=Routing.RECORDED)
