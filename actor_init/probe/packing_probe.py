"""Prove on a small copy of a model that it keeps packed documents, and slices of a ring, apart.

The copy has the model's class and kinds of layers, random weights, and its attention kernel. Three documents, longer
and shorter than its windows, are fed as a replay feeds them; log-probs and every gradient are compared with those of
each document alone, with eager attention. Nothing of the real model is touched, nor the run's random states.

Shape letters: N tokens that have a log-prob.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from actor_init.action_log_probs import action_log_probs
from actor_init.attention.ring_attention import IsolatingSlice
from actor_init.attention.ring_split import compute_ring_indices, may_zigzag
from actor_init.declarations.attention import find_attention_form
from actor_init.inputs.packing import apply_layout, prepare_inputs, slice_for_ring
from actor_init.model_form import Layout
from actor_init.probe.small_config import VOCABULARY, make_small_configs
from capture.file_format.micro_batch import MicroBatch, Origin

LENGTHS = (5, 20, 11)
# The length of a row, which is padded on the left as captured ones are.
NUM_TOKENS = 22
# Relative to the reference's norm. Rounding gives up to 2e-5 in fp32 (deepest: gemma4). A document that sees another
# gives 0.06 or more in all families of transformers 5.23 that do.
BOUND = 1e-3
# Kernels without fp32 round queries, keys and values to bf16: 0.004 for each of them, see kernel_check.py.
COARSE_BOUND = 0.03
# A router or a selection that rounding tips over shows under one seed, a leak under all of them.
SEEDS = (1, 2)


class NotProvedError(Exception):
    """Raised if no small copy of the model can be built and run alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceAnswer:
    """Log-probs and gradients of some documents, each fed alone."""

    documents: tuple[int, ...]
    log_probs_N: Tensor
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A small copy of a model, and its answers for each document alone."""

    config: PretrainedConfig
    device: torch.device
    seed: int
    answers: tuple[ReferenceAnswer, ...]

    @classmethod
    def build(cls, config: PretrainedConfig, device: torch.device, seed: int, *, ring: bool = False) -> "Probe":
        """Build the copy and feed it each document alone. Raises NotProvedError.

        Under a ring a document that has a row for itself is sliced in another way, so its answer is computed too.
        """
        reasons = []
        for small in make_small_configs(config):
            try:
                model = build_small_model(small, "eager", seed, device)
                answers = tuple(
                    _compute_answer(model, documents) for documents in ((0, 1, 2), *([(1,)] if ring else []))
                )
            # A class checks its config itself, and raises any type.
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                continue
            if all(bool(answer.log_probs_N.isfinite().all()) for answer in answers):
                return cls(config=small, device=device, seed=seed, answers=answers)
            reasons.append("its log-probs are not finite")
        raise NotProvedError(reasons[0])

    def error(self, kernel: str, layout: Layout, ring: dist.ProcessGroup | None = None) -> float:
        """Return how far log-probs and gradients are off, relative to their norm, under `layout`: the larger one.

        `kernel` is transformers' name. Under a ring all its ranks must call this. Raises what the model or its kernel
        raises.
        """
        model = build_small_model(self.config, _register_fp32_kernel(kernel), self.seed, self.device)
        return max(self._compute_error(model, answer, layout, ring) for answer in self.answers)

    def has_dropout(self, kernel: str) -> bool:
        """Does the model ask this kernel of a ring for dropout while it trains?"""
        model, alone = (
            build_small_model(self.config, _register_fp32_kernel(kernel), self.seed, self.device).train(),
            IsolatingSlice(),
        )
        ids = _make_documents()[0][None].to(self.device)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []), torch.no_grad():
            model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None].to(ids), use_cache=False, ring=alone)
        return alone.has_dropout

    def _compute_error(
        self,
        model: PreTrainedModel,
        answer: ReferenceAnswer,
        layout: Layout,
        ring: dist.ProcessGroup | None,
    ) -> float:
        inputs = apply_layout(prepare_inputs(_make_batch(answer.documents), packing=layout.joins_rows), layout)
        slot_N = inputs.slot_N.to(self.device)
        if ring is not None:
            assert inputs.cu_seq_lens is not None
            zigzag = may_zigzag(self.config)
            inputs = slice_for_ring(inputs, compute_ring_indices(inputs.cu_seq_lens, ring, may_zigzag=zigzag))
        log_probs_N = action_log_probs(model, inputs.to(self.device)).flatten()[slot_N]
        gradients = compute_gradients(model, log_probs_N)
        if ring is not None:
            gradients = _average_over_ring(gradients, ring)
        return max(
            compute_relative_error({"": log_probs_N.detach()}, {"": answer.log_probs_N}),
            compute_relative_error(gradients, answer.gradients),
        )


def choose_bound(kernel: str) -> float:
    """Return the largest error that rounding explains."""
    return BOUND if find_attention_form(kernel).limits.has_fp32 else COARSE_BOUND


def build_small_model(config: PretrainedConfig, kernel: str, seed: int, device: torch.device) -> PreTrainedModel:
    """Return an fp32 model with random weights that let every token see far, and no vector constant."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed GPUs too.
        random = torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=kernel, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                std = 0.1 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
                if parameter.ndim < 2:
                    parameter += std * torch.randn(parameter.shape, generator=random)
                elif float(parameter.std()) < std:
                    parameter.normal_(std=std, generator=random)
    assert isinstance(model, PreTrainedModel)
    return model.to(device).eval()


def _make_documents() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,), generator=random) for length in LENGTHS]


def _make_batch(numbers: tuple[int, ...]) -> MicroBatch:
    """Return documents as rows that are padded on the left."""
    # The padding is a token like others: a model that sees it gives other numbers.
    ids_BS = torch.full((len(numbers), NUM_TOKENS), VOCABULARY - 1)
    for row_S, document in zip(ids_BS, [_make_documents()[number] for number in numbers], strict=True):
        row_S[NUM_TOKENS - len(document) :] = document
    lengths_B = torch.tensor([LENGTHS[number] for number in numbers])
    real_BS = torch.arange(NUM_TOKENS) >= NUM_TOKENS - lengths_B[:, None]
    return MicroBatch(sequences_BS=ids_BS, attention_mask_BS=real_BS, trains=True, origin=Origin(source="the probe"))


def make_one_document() -> MicroBatch:
    """Return the longest document, in a row of its own."""
    return _make_batch((LENGTHS.index(max(LENGTHS)),))


def _compute_answer(model: PreTrainedModel, numbers: tuple[int, ...]) -> ReferenceAnswer:
    """Feed the model each document alone, without anything of a replay's."""
    log_probs = []
    for document in (_make_documents()[number].to(model.device) for number in numbers):
        logits_TV = model(input_ids=document[None], use_cache=False).logits[0]
        log_probs.append(torch.log_softmax(logits_TV[:-1], dim=-1).gather(1, document[1:, None])[:, 0])
    log_probs_N = torch.cat(log_probs)
    gradients = compute_gradients(model, log_probs_N)
    return ReferenceAnswer(documents=numbers, log_probs_N=log_probs_N.detach(), gradients=gradients)


def compute_gradients(model: PreTrainedModel, log_probs_N: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a loss that weighs each token differently; zeros where there are none."""
    weight_N = torch.linspace(0.5, 1.5, len(log_probs_N), device=log_probs_N.device)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad((weight_N * log_probs_N).mean(), list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
    }


def _average_over_ring(gradients: Mapping[str, Tensor], ring: dist.ProcessGroup) -> dict[str, Tensor]:
    flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
    dist.all_reduce(flat, group=ring)
    parts = (flat / ring.size()).split([gradient.numel() for gradient in gradients.values()])
    return {name: part.view_as(gradients[name]) for name, part in zip(gradients, parts, strict=True)}


def compute_relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference, relative to that of `expected`; infinite if it is not a number."""
    difference = torch.stack([(actual[name] - expected[name]).double().norm() for name in expected]).norm()
    relative = float(difference / torch.stack([tensor.double().norm() for tensor in expected.values()]).norm())
    return relative if math.isfinite(relative) else math.inf


def _register_fp32_kernel(kernel: str) -> str:
    """Return a name under which a kernel of half precision takes fp32 and returns it."""
    if find_attention_form(kernel).limits.has_fp32:
        return kernel
    half: Callable[..., Any] = AttentionInterface()[kernel]

    def compute_in_bf16(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        out, _ = half(module, query.bfloat16(), key.bfloat16(), value.bfloat16(), *args, **kwargs)
        return out.float(), None

    AttentionInterface.register(f"probed_{kernel}", compute_in_bf16)
    return f"probed_{kernel}"
