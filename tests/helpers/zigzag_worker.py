"""Compute zigzag attention on each rank with a plain block kernel, and print how far it is from the whole row's.

    torchrun --nproc-per-node 2 zigzag_worker.py

    rank 0, 8 tokens: output 3.1e-17, query 1.2e-16, key 9.8e-17, value 8.7e-17

Everything is in fp64. The whole row is computed by autograd from a masked softmax.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from actor_init.attention.ring_split import compute_ring_indices
from actor_init.attention.zigzag import zigzag_attention

H, K, D = 6, 2, 5
SCALE = 0.3


class PlainBlocks:
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        scores = _scores(query, key, is_causal, scale)
        return scores.softmax(-1) @ _of_heads(value), scores.logsumexp(-1, keepdim=True)

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert scale is not None
        shares = (_scores(query, key, is_causal, scale) - lse).exp()
        of_scores = shares * (gradient @ _of_heads(value).transpose(2, 3) - (gradient * out).sum(-1, keepdim=True))
        of_key, of_value = of_scores.transpose(2, 3) @ query * scale, shares.transpose(2, 3) @ gradient
        return of_scores @ _of_heads(key) * scale, _of_groups(of_key), _of_groups(of_value)


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    assert scale is not None
    scores = query @ _of_heads(key).transpose(2, 3) * scale
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1) & is_causal
    return scores.masked_fill(hidden, -torch.inf)


def _of_heads(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(H // K, dim=1)


def _of_groups(tensor: Tensor) -> Tensor:
    groups: Tensor = tensor.unflatten(1, (K, -1))
    return groups.sum(2)


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    for num_tokens in (1, 8, 29):
        ring = compute_ring_indices(torch.tensor([0, num_tokens], dtype=torch.int32), group, may_zigzag=True)
        num_fed = len(ring.index_T)
        torch.manual_seed(0)
        whole = [torch.randn(1, heads, num_fed, D, dtype=torch.float64, requires_grad=True) for heads in (H, K, K)]
        upstream = torch.randn(1, num_fed, H, D, dtype=torch.float64)
        scores = _scores(whole[0], whole[1], True, SCALE)
        expected = (scores.softmax(-1) @ _of_heads(whole[2])).transpose(1, 2)
        wanted = torch.autograd.grad(expected, whole, upstream)
        place = ring.local_index_L
        own = [tensor.detach()[:, :, place].requires_grad_() for tensor in whole]
        out = zigzag_attention(own[0], own[1], own[2], ring, SCALE, PlainBlocks())
        got = torch.autograd.grad(out, own, upstream[:, place])
        errors = [(out - expected[:, place]).detach().abs().max()]
        errors += [(tensor - other[:, :, place]).abs().max() for tensor, other in zip(got, wanted, strict=True)]
        names = ("output", "query", "key", "value")
        said = ", ".join(f"{name} {float(error):.1e}" for name, error in zip(names, errors, strict=True))
        print(f"rank {group.rank()}, {num_fed} tokens: {said}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
