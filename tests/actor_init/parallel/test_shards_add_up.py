"""Actors in shards, on ranks that are threads, give the numbers of the whole model, also for shares of uneven sizes.

The slow tests beside this file replay with processes, under DeepSpeed too.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from actor_init.inputs.documents import KeptLogits
from actor_init.model import ModelSource
from actor_init.model_form import HeadForm, LogitStep
from actor_init.parallel.split_linear import SharedInput
from actor_init.spec import ParallelSpec
from actor_init.world import World
from tests.helpers.contract import NORM_BOUND
from tests.helpers.gradients import GRADIENT_BOUND
from tests.helpers.thread_actors import LIMIT_OF_NORM, RATE, ShardedCase
from tests.helpers.thread_ranks import run_with_groups

LLAMA, TIED = "llama", "llama, tied, biases, uneven"
QWEN3, GEMMA3 = "qwen3, norms on heads", "gemma3, sliding window, softcap"
CAP = tuple(LogitStep(function=name, numbers=numbers) for name, numbers in (("div", (5,)), ("tanh", ()), ("mul", (5,))))
WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# Logits of five tokens: several chunks a pass.
CHUNKS = HeadForm(chunk_bytes=5 * 133 * 4)


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


def run_actor(case: ShardedCase, source: ModelSource, world: World) -> Answer:
    actor = case.open_actor(source, world)
    log_probs, entropies = [], []
    for inputs in case.make_inputs(source, world):
        kept = KeptLogits() if case.with_entropies else None
        log_probs_BA = actor.forward(replace(inputs, kept_logits=kept), train_mode=True)
        entropy_BA = kept.compute_entropies() if kept is not None else None
        actor.backward(compute_loss(log_probs_BA, entropy_BA))
        log_probs.append(log_probs_BA.detach())
        entropies += [] if entropy_BA is None else [entropy_BA.detach()]
    gradients = {name: gradient.clone() for name, gradient in actor.gradients()}
    norm = actor.end_window(step=True)
    assert list(actor.gradients()) == []
    weights = {name: weight.clone() for name, weight in actor.weights()}
    return Answer(log_probs=log_probs, entropies=entropies, gradients=gradients, norm=norm, weights=weights)


def compute_reference(case: ShardedCase, source: ModelSource) -> list[Answer]:
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
    "tp, uneven vocabulary": ShardedCase(model=TIED, num_ranks=2, parallel=ParallelSpec(tp=2)),
    "tp, uneven vocabulary, in chunks": ShardedCase(model=TIED, num_ranks=2, parallel=ParallelSpec(tp=2), head=CHUNKS),
    "tp on two data ranks, norms on heads": ShardedCase(
        model=QWEN3, num_ranks=4, parallel=ParallelSpec(tp=2), num_passes=2
    ),
    "tp, a window, a softcap": ShardedCase(
        model=GEMMA3, num_ranks=2, parallel=ParallelSpec(tp=2), head=replace(CHUNKS, steps=CAP), lengths=(20, 5)
    ),
    "tp, padded rows, layers again in backward": ShardedCase(
        model=TIED,
        num_ranks=2,
        parallel=ParallelSpec(tp=2),
        packing=False,
        options={"gradient_checkpointing": True, "zero_stage": 2},
    ),
    "tp along the sequence": ShardedCase(
        model=QWEN3, num_ranks=2, parallel=ParallelSpec(tp=2, sequence_parallel=True), lengths=(7, 13)
    ),
    "tp, experts": ShardedCase(model="qwen3_moe", num_ranks=2, parallel=ParallelSpec(tp=2)),
    "tp, experts that two ranks cannot share": ShardedCase(
        model="qwen3_moe", num_ranks=2, parallel=ParallelSpec(tp=2), config={"num_experts": 3}
    ),
    "tp, experts by rows": ShardedCase(model="llama4_text", num_ranks=2, parallel=ParallelSpec(tp=2), lengths=(6, 4)),
    # Two ranks cannot share the width of its MLP, which stays whole.
    "tp, gathered outputs": ShardedCase(
        model="gpt2", num_ranks=2, parallel=ParallelSpec(tp=2), config=WITHOUT_DROPOUT | {"n_inner": 49}
    ),
    "tp, padding's token on the second rank": ShardedCase(
        model=LLAMA, num_ranks=2, parallel=ParallelSpec(tp=2), config={"pad_token_id": 200}
    ),
    "tp, latent attention": ShardedCase(model="deepseek_v3", num_ranks=2, parallel=ParallelSpec(tp=2)),
    "ring, biases": ShardedCase(model=TIED, num_ranks=3, parallel=ParallelSpec(ring=3)),
    "ring, a window": ShardedCase(
        model=GEMMA3,
        num_ranks=2,
        parallel=ParallelSpec(ring=2, ring_head_stride=1),
        lengths=(3, 25, 4),
        head=replace(CHUNKS, steps=CAP),
    ),
    "ring, zigzag": ShardedCase(model=QWEN3, num_ranks=3, parallel=ParallelSpec(ring=3), lengths=(17,)),
    "ring beside tp": ShardedCase(model=TIED, num_ranks=4, parallel=ParallelSpec(tp=2, ring=2)),
    "ddp": ShardedCase(model=TIED, num_ranks=3, backend="ddp", num_passes=2, packing=False),
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_numbers_of_the_whole_model(name: str) -> None:
    case = CASES[name]
    source = case.make_source()
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


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_a_window_that_lost_passes_averages_over_the_ranks_as_before(backend: str) -> None:
    """Passes are lost one after the other, and one of them is taken back."""
    one_pass, three_passes = (
        ShardedCase(model=LLAMA, num_ranks=2, backend=backend, num_passes=number) for number in (1, 3)
    )
    source = one_pass.make_source()
    compute_reference(one_pass, source)

    def run_last_pass(case: ShardedCase, world: World) -> dict[str, Tensor]:
        actor = case.open_actor(source, world)
        for number in (1, 1, -1, 1) if case is three_passes else ():
            actor.skip_passes(number)
        actor.backward(compute_loss(actor.forward(next(case.make_inputs(source, world)), train_mode=True), None))
        return {name: gradient.clone() for name, gradient in actor.gradients()}

    whole, lost = (
        run_with_groups(partial(run_last_pass, case), case.num_ranks, case.parallel)
        for case in (one_pass, three_passes)
    )
    for gradients, expected in zip(lost, whole, strict=True):
        for name, gradient in gradients.items():
            # A loss is divided by the passes of the window, those that were lost too.
            torch.testing.assert_close(3 * gradient, expected[name], rtol=1e-5, atol=1e-6)


def test_layers_share_the_sum_of_an_input_in_one_forward_alone(world: World) -> None:
    """Queries may come of another tensor than keys do, and the next forward's input is another one in any case."""
    group = world.mesh.get_group("tp")
    module = nn.Identity()
    shared = SharedInput(module)
    first, second = torch.ones(2), torch.zeros(2)
    summed = shared.sum_gradient(first, group)
    assert shared.sum_gradient(first, group) is summed
    assert torch.equal(shared.sum_gradient(second, group), second)
    summed = shared.sum_gradient(first, group)
    module(first)
    assert shared.sum_gradient(first, group) is not summed
