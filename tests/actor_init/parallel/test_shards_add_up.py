"""Actors in shards, on ranks that are threads, give the numbers of the whole model, also for shares of uneven sizes.

The slow tests beside this file replay with processes, under DeepSpeed too.
"""

from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from actor_init.attention.ring_split import compute_ring_indices, may_zigzag
from actor_init.declarations.backends import BACKENDS
from actor_init.inputs.documents import KeptLogits
from actor_init.inputs.packing import prepare_inputs, slice_for_ring
from actor_init.model import ModelSource, make_random_weights
from actor_init.model_form import HeadForm, LogitStep
from actor_init.spec import ActorSpec, Dtype, ParallelSpec
from actor_init.world import World
from capture.file_format.micro_batch import MicroBatch, Origin
from tests.helpers.contract import NORM_BOUND
from tests.helpers.families import tiny_config
from tests.helpers.gradients import GRADIENT_BOUND
from tests.helpers.sharded import MODELS, SIZES
from tests.helpers.thread_ranks import run_with_groups

LLAMA, TIED = "llama", "llama, tied, biases, uneven"
QWEN3, GEMMA3 = "qwen3, norms on heads", "gemma3, sliding window, softcap"
RATE, LIMIT_OF_NORM = 0.1, 0.5
CAP = tuple(LogitStep(function=name, numbers=numbers) for name, numbers in (("div", (5,)), ("tanh", ()), ("mul", (5,))))
WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# Logits of five tokens: several chunks a pass.
CHUNKS = HeadForm(chunk_bytes=5 * 133 * 4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One actor.

    lengths        of the documents of a pass
    options        of its spec, beside those that all have
    config         what the model's has beside that of its name
    with_entropies the loss has the entropies in it, too
    """

    model: str
    num_ranks: int
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    backend: str = "fsdp2"
    lengths: tuple[int, ...] = (7, 12)
    packing: bool = True
    head: HeadForm | None = None
    num_passes: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    with_entropies: bool = True

    @property
    def num_data_ranks(self) -> int:
        return self.num_ranks // (self.parallel.tp * self.parallel.ring)

    def make_config(self) -> PretrainedConfig:
        if self.model in MODELS:
            config: PretrainedConfig = AutoConfig.for_model(**{**SIZES, **MODELS[self.model], **self.config})
            return config
        return tiny_config(self.model, **self.config)

    def make_batch(self, data_rank: int, number: int) -> MicroBatch:
        """Make the pass with this number of a data rank; rows are padded on the left.

        A token of each is the model's padding, whose embedding gets no gradient, in another place than padding.
        """
        config = self.make_config()
        random = torch.Generator().manual_seed(100 * data_rank + number)
        longest = max(self.lengths)
        ids_BS = torch.randint(3, config.vocab_size, (len(self.lengths), longest), generator=random)
        ids_BS[:, -2] = config.pad_token_id or 3
        real_BS = torch.arange(longest) >= longest - torch.tensor(self.lengths)[:, None]
        return MicroBatch(sequences_BS=ids_BS, attention_mask_BS=real_BS, trains=True, origin=Origin(source="made"))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of an accumulation window and a step.

    log_probs  of each pass; entropies too
    """

    log_probs: list[Tensor]
    entropies: list[Tensor]
    gradients: dict[str, Tensor]
    norm: float
    weights: dict[str, Tensor]


def compute_loss(log_probs_BA: Tensor, entropy_BA: Tensor | None) -> Tensor:
    """A loss in which no two tokens have the same weight."""
    weight_BA = torch.linspace(0.5, 1.5, log_probs_BA.numel()).view_as(log_probs_BA)
    loss = -(weight_BA * log_probs_BA).sum() / 10
    return loss if entropy_BA is None else loss + (weight_BA.square() * entropy_BA).sum() / 30


def run_actor(case: Case, source: ModelSource, world: World) -> Answer:
    spec = ActorSpec(
        backend=case.backend,
        dtype=Dtype.FP32,
        packing=case.packing,
        parallel=case.parallel,
        optimizer="sgd",
        learning_rate=RATE,
        max_norm=LIMIT_OF_NORM,
        grad_accumulation=case.num_passes,
        **case.options,
    ).with_defaults()
    module, name = BACKENDS[case.backend].engine.split(":")
    actor = getattr(import_module(module), name).open(spec, source, world)
    log_probs, entropies = [], []
    for number in range(case.num_passes):
        kept = KeptLogits() if case.with_entropies else None
        inputs = prepare_inputs(case.make_batch(world.data_rank, number), packing=case.packing)
        if case.parallel.ring > 1:
            assert inputs.cu_seq_lens is not None
            stride, zigzag = case.parallel.ring_head_stride, may_zigzag(source.config)
            ring = compute_ring_indices(inputs.cu_seq_lens, world.ring_group, head_stride=stride, may_zigzag=zigzag)
            assert ring.is_zigzag is (len(case.lengths) == 1)
            inputs = slice_for_ring(inputs, ring)
        log_probs_BA = actor.forward(replace(inputs, kept_logits=kept, head=case.head), train_mode=True)
        entropy_BA = kept.compute_entropies() if kept is not None else None
        actor.backward(compute_loss(log_probs_BA, entropy_BA))
        log_probs.append(log_probs_BA.detach())
        entropies += [] if entropy_BA is None else [entropy_BA.detach()]
    gradients = {name: gradient.clone() for name, gradient in actor.gradients()}
    norm = actor.end_window(step=True)
    assert list(actor.gradients()) == []
    weights = {name: weight.clone() for name, weight in actor.weights()}
    return Answer(log_probs=log_probs, entropies=entropies, gradients=gradients, norm=norm, weights=weights)


def compute_reference(case: Case, source: ModelSource) -> list[Answer]:
    """Compute each data rank's answer with transformers alone: each document by itself, and a step of plain SGD."""
    model = AutoModelForCausalLM.from_config(deepcopy(source.config), attn_implementation="eager", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        source.weights.fill(name, parameter)
    log_probs: list[list[Tensor]] = []
    entropies: list[list[Tensor]] = []
    for data_rank in range(case.num_data_ranks):
        log_probs.append([])
        entropies.append([])
        for number in range(case.num_passes):
            batch = case.make_batch(data_rank, number)
            shape_BA = len(case.lengths), max(case.lengths) - 1
            log_probs_BA, entropy_BA = torch.zeros(shape_BA), torch.zeros(shape_BA)
            for row, length in enumerate(case.lengths):
                ids_T = batch.sequences_BS[row, -length:]
                log_TV = torch.log_softmax(model.train()(input_ids=ids_T[None]).logits[0, :-1], dim=-1)
                log_probs_BA[row, 1 - length :] = log_TV.gather(1, ids_T[1:, None])[:, 0]
                entropy_BA[row, 1 - length :] = -(log_TV.exp() * log_TV).sum(dim=-1)
            loss = compute_loss(log_probs_BA, entropy_BA if case.with_entropies else None)
            torch.autograd.backward(loss / case.num_passes / case.num_data_ranks)
            log_probs[-1].append(log_probs_BA.detach())
            entropies[-1] += [entropy_BA.detach()] if case.with_entropies else []
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    norm = float(torch.cat([gradient.double().flatten() for gradient in gradients.values()]).norm())
    assert norm > 1.5 * LIMIT_OF_NORM
    stepped = {
        name: parameter.detach() - RATE * LIMIT_OF_NORM / norm * gradients.get(name, torch.zeros(()))
        for name, parameter in model.named_parameters()
    }
    return [
        Answer(log_probs=own, entropies=own_entropies, gradients=gradients, norm=norm, weights=stepped)
        for own, own_entropies in zip(log_probs, entropies, strict=True)
    ]


CASES = {
    "tp, uneven vocabulary": Case(model=TIED, num_ranks=2, parallel=ParallelSpec(tp=2)),
    "tp, uneven vocabulary, in chunks": Case(model=TIED, num_ranks=2, parallel=ParallelSpec(tp=2), head=CHUNKS),
    "tp on two data ranks, norms on heads": Case(model=QWEN3, num_ranks=4, parallel=ParallelSpec(tp=2), num_passes=2),
    "tp, a window, a softcap": Case(
        model=GEMMA3, num_ranks=2, parallel=ParallelSpec(tp=2), head=replace(CHUNKS, steps=CAP), lengths=(20, 5)
    ),
    "tp, padded rows, layers again in backward": Case(
        model=TIED,
        num_ranks=2,
        parallel=ParallelSpec(tp=2),
        packing=False,
        options={"gradient_checkpointing": True, "zero_stage": 2},
    ),
    "tp along the sequence": Case(
        model=QWEN3, num_ranks=2, parallel=ParallelSpec(tp=2, sequence_parallel=True), lengths=(7, 13)
    ),
    "tp, experts": Case(model="qwen3_moe", num_ranks=2, parallel=ParallelSpec(tp=2)),
    "tp, experts by rows": Case(model="llama4_text", num_ranks=2, parallel=ParallelSpec(tp=2), lengths=(6, 4)),
    "tp, gathered outputs": Case(model="gpt2", num_ranks=2, parallel=ParallelSpec(tp=2), config=WITHOUT_DROPOUT),
    "tp, padding's token on the second rank": Case(
        model=LLAMA, num_ranks=2, parallel=ParallelSpec(tp=2), config={"pad_token_id": 200}
    ),
    "tp, latent attention": Case(model="deepseek_v3", num_ranks=2, parallel=ParallelSpec(tp=2)),
    "ring, biases": Case(model=TIED, num_ranks=3, parallel=ParallelSpec(ring=3)),
    "ring, a window": Case(
        model=GEMMA3,
        num_ranks=2,
        parallel=ParallelSpec(ring=2, ring_head_stride=1),
        lengths=(3, 25, 4),
        head=replace(CHUNKS, steps=CAP),
    ),
    "ring, zigzag": Case(model=QWEN3, num_ranks=3, parallel=ParallelSpec(ring=3), lengths=(17,)),
    "ring beside tp": Case(model=TIED, num_ranks=4, parallel=ParallelSpec(tp=2, ring=2), num_passes=2),
    "data ranks alone": Case(model=TIED, num_ranks=3, num_passes=2),
    "ddp": Case(model=TIED, num_ranks=3, backend="ddp", num_passes=2, packing=False),
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_numbers_of_the_whole_model(name: str) -> None:
    case = CASES[name]
    config = case.make_config()
    # It keeps the vectors that the reference was filled with: threads would disturb each other where they make them.
    source = ModelSource(name="tiny", config=config, weights=make_random_weights(config, 0))
    expected = compute_reference(case, source)
    answers = run_with_groups(
        lambda world: (world.data_rank, run_actor(case, source, world)), case.num_ranks, case.parallel
    )
    for data_rank, answer in answers:
        reference = expected[data_rank]
        for tensors, others in (
            (answer.log_probs, reference.log_probs),
            (answer.entropies, reference.entropies),
        ):
            for tensor, other in zip(tensors, others, strict=True):
                # fp32 sums in another order: some 1e-6 of numbers of up to 10.
                torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-5)
        assert answer.norm == pytest.approx(reference.norm, rel=NORM_BOUND)
        assert answer.gradients.keys() == reference.gradients.keys()
        assert answer.weights.keys() == reference.weights.keys()
        for name, gradient in reference.gradients.items():
            assert (answer.gradients[name] - gradient).norm() <= GRADIENT_BOUND * gradient.norm(), name
            step = reference.weights[name] - answer.weights[name]
            # A weight's own rounding, and the gradient's error.
            bound = 1e-6 * reference.weights[name].norm() + GRADIENT_BOUND * RATE * LIMIT_OF_NORM
            assert step.norm() <= bound, name
