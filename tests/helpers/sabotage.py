"""Wrong parallel plans, by name: a comparison with the reference that does not see them is worth nothing."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, SequenceParallel
from torch.func import functional_call

from actor_init.attention.ring_split import RingSlice
from actor_init.inputs.packing import ActorInputs, prepare_inputs, slice_for_ring
from actor_init.parallel.split_linear import SplitRows
from actor_init.world import World


@contextmanager
def column_for_a_row(world: World) -> Iterator[None]:
    """Each rank takes a share of the output features of the square o_proj where one of its input features belongs."""

    def transposing(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def transposed(self: ParallelStyle, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            if isinstance(module, nn.Linear) and module.in_features == module.out_features:
                module.weight = nn.Parameter(module.weight.detach().T.contiguous())
            return apply(self, module, device_mesh)

        return transposed

    with ExitStack() as stack:
        for style in (SplitRows, RowwiseParallel):
            stack.enter_context(patch.object(style, "_apply", transposing(style._apply)))
        yield


@contextmanager
def different_inputs(world: World) -> Iterator[None]:
    """The second of the tp ranks is fed other tokens, as many of them."""

    def shifted(*args: Any, **kwargs: Any) -> ActorInputs:
        inputs = prepare_inputs(*args, **kwargs)
        if not world.mesh.get_local_rank("tp"):
            return inputs
        return replace(inputs, input_ids=torch.roll(inputs.input_ids, 1, dims=-1))

    with patch("replay.runner.run_pass.prepare_inputs", shifted):
        yield


@contextmanager
def head_norms_not_summed(world: World) -> Iterator[None]:
    """The gradients of norms on heads are those of a rank's own heads alone."""
    with patch("actor_init.parallel.tensor_parallel.sum_gradient", lambda tensor, group: tensor):
        yield


class OwnTokensNorm(SequenceParallel):
    """A norm whose weight's gradient is that of a rank's own tokens alone: to_local() takes it for the whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicated: Any = super()._apply(module, device_mesh)
        forward = replicated.forward

        def local(tokens: Any) -> DTensor:
            own = {name: parameter.to_local() for name, parameter in replicated.named_parameters()}
            replicated.forward = forward
            try:
                normed = functional_call(module, own, (tokens.to_local(),))
            finally:
                replicated.forward = local
            layout = {"shape": tokens.shape, "stride": tokens.stride()}
            return DTensor.from_local(normed, device_mesh, self.sequence_sharding, run_check=False, **layout)

        replicated.forward = local
        return module

    @staticmethod
    def _prepare_input_fn(sequence_sharding: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> Any:
        return inputs[0]


@contextmanager
def sequence_norms_not_summed(world: World) -> Iterator[None]:
    """The gradients of norms on the sharded sequence are those of a rank's own tokens alone."""
    with patch("actor_init.parallel.tensor_parallel.SequenceParallel", OwnTokensNorm):
        yield


@contextmanager
def whole_logits(world: World) -> Iterator[None]:
    """The head's shards are gathered, as transformers' plans have it. Right, but the whole logits are there."""
    from actor_init import action_log_probs

    gathered: Callable[..., Any] = lambda logits, rows, ids: torch.log_softmax(  # noqa: E731
        logits.full_tensor().flatten(0, 1)[rows], dim=-1
    ).gather(1, ids[:, None])[:, 0]
    with patch.object(action_log_probs, "compute_sharded_log_probs", gathered):
        yield


@contextmanager
def small_chunks(world: World) -> Iterator[None]:
    """Log-probs are computed three tokens at a time. Right, and no rank's part of an input fits into one chunk."""
    with patch("actor_init.head.chunks.choose_chunk_size", lambda *sizes: 3):
        yield


@contextmanager
def last_chunk_alone(world: World) -> Iterator[None]:
    """The gradient of the head's weight is that of its last chunk."""
    with small_chunks(world), patch("actor_init.head.chunks.add_product", lambda total, a, b, is_whole_sum: a @ b):
        yield


@contextmanager
def own_shard_alone(world: World) -> Iterator[None]:
    """Each tp rank's softmax is over its own share of the vocabulary."""

    def own(every: Tensor, part: Tensor, group: Any) -> None:
        every.copy_(torch.cat([part, *[torch.full_like(part, -1e4)] * (group.size() - 1)]))

    with patch("actor_init.head.chunks.dist.all_gather_into_tensor", own):
        yield


@contextmanager
def own_keys_alone(world: World) -> Iterator[None]:
    """A ring rank's queries see the keys of its own slice, and none of the others'."""
    from actor_init.attention import ring_attention

    visible = ring_attention.compute_llama3_mask

    def own_visible(ring: RingSlice, sliding_window: int | None) -> Tensor:
        keys = torch.arange(ring.first_key, ring.end_key)
        return visible(ring, sliding_window) & (keys >= ring.local_index_L[0])

    with patch.object(ring_attention, "compute_llama3_mask", own_visible):
        yield


@contextmanager
def positions_from_zero(world: World) -> Iterator[None]:
    """Each ring rank counts the positions of its slice from its own first token."""

    def sliced_wrongly(inputs: ActorInputs, ring: RingSlice) -> ActorInputs:
        own = slice_for_ring(inputs, ring)
        return replace(own, position_ids=torch.arange(own.input_ids.shape[1]).unsqueeze(0))

    with patch("replay.runner.run_pass.slice_for_ring", sliced_wrongly):
        yield


@contextmanager
def ring_averaged(world: World) -> Iterator[None]:
    """Gradients are averaged over the ring, as over data ranks, and not summed."""
    with patch(
        "actor_init.attention.ring_split._SumOverRing.backward", staticmethod(lambda ctx, gradient: (gradient, None))
    ):
        yield


SABOTAGES: Mapping[str, Callable[[World], AbstractContextManager[None]]] = {
    sabotage.__name__: sabotage
    for sabotage in (
        column_for_a_row,
        different_inputs,
        head_norms_not_summed,
        sequence_norms_not_summed,
        whole_logits,
        small_chunks,
        last_chunk_alone,
        own_shard_alone,
        own_keys_alone,
        positions_from_zero,
        ring_averaged,
    )
}
