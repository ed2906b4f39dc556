"""Shard embedding and head on the vocabulary; compute log-probs from shards, so that no rank holds whole logits.

Shape letters: B rows, S tokens a row, N tokens whose log-prob is requested, V this rank's share of the vocabulary.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.func import functional_call

from actor_init.parallel.split_linear import sum_gradient


class VocabularyParallelEmbedding(ParallelStyle):
    """Look up each rank's own share of the vocabulary; the sum over the ranks is laid out as `output`.

    DTensor's own embedding computes the whole weight's gradient on every rank; this one computes its share.
    """

    def __init__(self, output: Placement, *, use_local_output: bool) -> None:
        self.output = output
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        first, size = find_vocabulary_share(module.num_embeddings, device_mesh)
        shard = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None)
        module.weight = nn.Parameter(shard, module.weight.requires_grad)
        # An embedding gives the row of its padding no gradient. Only the rank that holds that row must know its index.
        if module.padding_idx is not None:
            module.padding_idx = module.padding_idx - first if first <= module.padding_idx < first + size else None
        forward, group = module.forward, device_mesh.get_group()
        bare = _WithoutHooks(module, forward)

        def look_up(ids_BS: Tensor) -> Tensor:
            local_ids_BS, owned_BS = to_local_ids(ids_BS, first, size)
            others = {name: sum_gradient(p, group) for name, p in module.named_parameters() if name != "weight"}
            parameters = {"weight": cast(DTensor, module.weight).to_local(), **others}
            named = {f"module.{name}": parameter for name, parameter in parameters.items()}
            hidden = functional_call(bare, named, (local_ids_BS,))
            shares = hidden.masked_fill(~owned_BS.unsqueeze(-1), 0)
            summed = DTensor.from_local(shares, device_mesh, [Partial()], run_check=False).redistribute(
                placements=[self.output]
            )
            # It is a copy because CTRL scales it in place, which autograd does not allow for a view.
            return summed.to_local().clone() if self.use_local_output else summed

        # Any, since mypy does not allow replacing methods.
        patched: Any = module
        patched.forward = look_up
        return module


class _WithoutHooks(nn.Module):
    """Computes what a module's own forward computes, without the module's hooks.

    FSDP's hook behind a forward puts the sharded parameters back. Where it ran inside `functional_call`, that put back
    the gathered ones last, and an optimizer that was made then never stepped the weight.
    """

    def __init__(self, module: nn.Module, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.compute = compute

    def forward(self, ids_BS: Tensor) -> Tensor:
        return self.compute(ids_BS)


def compute_sharded_log_probs(logits: DTensor, predictor_N: Tensor, target_ids_N: Tensor) -> Tensor:
    """Compute fp32 log-probs [N] of the targets, from `logits` [B, S, vocabulary] sharded on the last dim over one mesh
    axis.

    `predictor_N` indexes the flattened [B, S]; only those rows are converted to fp32.
    """
    assert logits.placements in ((Shard(-1),), (Shard(logits.ndim - 1),))
    mesh = logits.device_mesh
    first, size = find_vocabulary_share(logits.shape[-1], mesh)
    logits_NV = logits.to_local().flatten(0, 1)[predictor_N]
    local_ids_N, owned_N = to_local_ids(target_ids_N, first, size)
    log_probs_N: Tensor = _ShardedLogProbs.apply(logits_NV, local_ids_N, owned_N, mesh.get_group())
    return log_probs_N


def compute_sharded_entropies(logits: DTensor, predictor_N: Tensor) -> Tensor:
    """Compute fp32 entropies [N] of the predicted distributions, from logits as for `compute_sharded_log_probs`."""
    assert logits.placements in ((Shard(-1),), (Shard(logits.ndim - 1),))
    logits_NV = logits.to_local().flatten(0, 1)[predictor_N]
    entropy_N: Tensor = _ShardedEntropy.apply(logits_NV, logits.device_mesh.get_group())
    return entropy_N


def find_vocabulary_share(vocabulary: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Find the start and size of this rank's share, as DTensor shards: like torch.chunk, the last ones smaller."""
    chunk = -(-vocabulary // mesh.size())
    first = min(mesh.get_local_rank() * chunk, vocabulary)
    return first, min(chunk, vocabulary - first)


def to_local_ids(ids: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Turn ids into indices into this rank's share, 0 for those of others. Also return which ids are in this rank's."""
    is_owned = (ids >= first) & (ids < first + size)
    return (ids - first).masked_fill(~is_owned, 0), is_owned


class _ShardedLogProbs(torch.autograd.Function):
    """Compute log softmax at the target, with maximum, sum and target logit reduced over the shards.

    The formula is that of Megatron-LM's megatron/core/tensor_parallel/cross_entropy.py.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, ids_N: Tensor, owned_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        max_N = logits_NV.amax(dim=-1).float()
        dist.all_reduce(max_N, op=dist.ReduceOp.MAX, group=group)
        target_N = logits_NV.gather(1, ids_N[:, None])[:, 0].float() - max_N
        softmax_NV = (logits_NV - max_N[:, None]).exp_()
        sums_2N = torch.stack([softmax_NV.sum(dim=-1), target_N.masked_fill(~owned_N, 0)])
        dist.all_reduce(sums_2N, group=group)
        sum_N, target_N = sums_2N
        ctx.save_for_backward(softmax_NV.div_(sum_N[:, None]), ids_N, owned_N)
        ctx.dtype = logits_NV.dtype
        log_probs_N: Tensor = target_N - sum_N.log()
        return log_probs_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_NV, ids_N, owned_N = ctx.saved_tensors
        gradient_NV = softmax_NV * -gradient_N[:, None]
        gradient_NV.scatter_add_(1, ids_N[:, None], (gradient_N * owned_N)[:, None])
        return gradient_NV.to(ctx.dtype), None, None, None


class _ShardedEntropy(torch.autograd.Function):
    """Compute log sum exp(x) minus the mean of x, with maximum, sum and mean reduced over the shards."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, group: dist.ProcessGroup) -> Tensor:
        max_N = logits_NV.amax(dim=-1).float()
        dist.all_reduce(max_N, op=dist.ReduceOp.MAX, group=group)
        shifted_NV = logits_NV.float() - max_N[:, None]
        softmax_NV = shifted_NV.exp()
        sums_2N = torch.stack([softmax_NV.sum(dim=-1), (softmax_NV * shifted_NV).sum(dim=-1)])
        dist.all_reduce(sums_2N, group=group)
        sum_N, mean_N = sums_2N[0], sums_2N[1] / sums_2N[0]
        ctx.save_for_backward(softmax_NV.div_(sum_N[:, None]), shifted_NV, mean_N)
        ctx.dtype = logits_NV.dtype
        entropy_N: Tensor = sum_N.log() - mean_N
        return entropy_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, None]:
        softmax_NV, shifted_NV, mean_N = ctx.saved_tensors
        gradient_NV = -gradient_N[:, None] * softmax_NV * (shifted_NV - mean_N[:, None])
        return gradient_NV.to(ctx.dtype), None
