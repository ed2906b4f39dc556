"""What ranks trace of their shares, put together, is what the whole model's trace has: each token, and its gradient."""

from collections import defaultdict

import pytest
import torch
from torch import Tensor

from actor_init.model import ModelSource
from actor_init.spec import ParallelSpec
from actor_init.tracing import LayerTracer, TracedTensor
from actor_init.world import World
from tests.actor_init.parallel.test_shards_add_up import QWEN3, TIED, WITHOUT_DROPOUT, compute_loss
from tests.helpers.thread_actors import ShardedCase
from tests.helpers.thread_ranks import run_with_groups

# The loss is multiplied by it, as by a pass's weight and the scale of fp16.
FACTOR = 8.0
CASES = {
    "tp, padded rows": ShardedCase(model=TIED, num_ranks=2, parallel=ParallelSpec(tp=2), lengths=(5, 8), packing=False),
    "tp along the sequence": ShardedCase(
        model=QWEN3, num_ranks=2, parallel=ParallelSpec(tp=2, sequence_parallel=True), lengths=(7, 13)
    ),
    "tp, gathered outputs": ShardedCase(model="gpt2", num_ranks=2, parallel=ParallelSpec(tp=2), config=WITHOUT_DROPOUT),
    "ring beside tp": ShardedCase(model=QWEN3, num_ranks=6, parallel=ParallelSpec(tp=2, ring=3), lengths=(4, 13)),
}


def trace(case: ShardedCase, source: ModelSource, world: World) -> tuple[Tensor, list[TracedTensor]]:
    """Trace a pass of this rank. Return the captured index of each token it was fed, too."""
    actor = case.open_actor(source, world)
    tracer = LayerTracer(actor.model, source.config, case.make_spec(), world)
    [inputs] = case.make_inputs(source, world)
    tracer.begin(inputs, FACTOR)
    log_probs_BA = actor.forward(inputs, train_mode=True)
    tracer.end_forward()
    actor.backward(FACTOR * compute_loss(log_probs_BA, None))
    return inputs.captured_index[inputs.captured_index >= 0], tracer.take()


@pytest.mark.parametrize("name", CASES)
def test_the_shares_of_all_ranks_add_up_to_the_whole(name: str) -> None:
    case = CASES[name]
    source = case.make_source()
    whole_case = ShardedCase(
        model=case.model, num_ranks=1, backend="ddp", lengths=case.lengths, packing=case.packing, config=case.config
    )
    [(captured_T, tensors)] = run_with_groups(lambda world: trace(whole_case, source, world), 1, whole_case.parallel)
    place_of = {index: place for place, index in enumerate(captured_T.tolist())}
    expected = {(tensor.name, tensor.what, tensor.is_gradient): tensor.sketch_TK for tensor in tensors}
    assert len(expected) > 20
    ranks = run_with_groups(lambda world: trace(case, source, world), case.num_ranks, case.parallel)
    found: dict[tuple[str, str, bool], Tensor] = defaultdict(lambda: torch.zeros(len(captured_T), 16))
    for rank, (indices, tensors) in enumerate(ranks):
        places = [place_of[index] for index in indices.tolist()]
        for tensor in tensors:
            key = tensor.name, tensor.what, tensor.is_gradient
            # What a tp peer has whole, the first of them has too.
            if tensor.is_part or rank % case.parallel.tp == 0:
                found[key][places] += tensor.sketch_TK
            elif key in expected:
                torch.testing.assert_close(tensor.sketch_TK, expected[key][places], rtol=1e-4, atol=1e-4)
    # Along the sequence what leaves the MLP's last Linear is seen as the MLP's output.
    missing = {module for module, _, _ in expected.keys() - found.keys()}
    assert all(module.endswith("mlp.down_proj") for module in missing)
    assert not missing or case.parallel.sequence_parallel
    for key, sketch_TK in ((key, expected[key]) for key in expected.keys() & found.keys()):
        error = (found[key] - sketch_TK).norm() / sketch_TK.norm()
        # fp32 sums in another order.
        assert error < 1e-4, key
