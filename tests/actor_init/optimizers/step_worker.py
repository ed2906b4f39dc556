"""Step a small model with each family, whole and sharded by FSDP2; rank 0 prints how far the weights are apart."""

import json
import sys
from collections.abc import Mapping
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from actor_init.backends.fsdp2 import ChangesShards
from actor_init.declarations.optimizers import find_optimizer
from actor_init.optimizers.build import list_named_parameters, make_optimizer
from actor_init.spec import ActorSpec

NUM_STEPS = 3
# Ranks may be threads, which share torch's generator.
SEEDING = Lock()


class SmallModel(nn.Module):
    """A model with an embedding, matrices, vectors, and a parameter of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.wide = nn.Linear(8, 12)
        self.narrow = nn.Linear(12, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.stack = nn.Parameter(torch.randn(3, 4, 7))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.narrow(torch.tanh(self.wide(self.embedding(ids)))))
        return torch.einsum("bsd,kld->bskl", hidden, self.stack)


OUTER = frozenset({"embedding.weight"})


def take_steps(model: nn.Module, optimizers: Any, num_steps: int = NUM_STEPS) -> dict[str, Tensor]:
    """Take steps on other tokens each, and return the whole weights."""
    ids = torch.arange(10).reshape(2, 5)
    for number in range(num_steps):
        weights = torch.arange(4.0)
        (model(ids + number % 2).pow(2) * weights).sum().backward()
        for optimizer in optimizers:
            with ChangesShards():
                optimizer.step()
            optimizer.zero_grad()
    found: dict[str, Any] = dict(model.named_parameters())
    return {
        name: (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach()
        for name, weight in found.items()
    }


def step_with(spec: ActorSpec, *, mesh: Any = None) -> Mapping[str, Tensor]:
    with SEEDING:
        torch.manual_seed(0)
        model = SmallModel()
    if mesh is not None:
        fully_shard(model.wide, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(spec, list_named_parameters(model), outer=OUTER)
    assert optimizer is not None
    weights = take_steps(model, [optimizer])
    if find_optimizer(spec.optimizer).is_elementwise:
        for parameter, state in optimizer.state.items():
            # A state that is no DTensor is saved as if it were whole.
            moments = [value for name, value in state.items() if name != "step" and value is not None]
            assert all(type(value) is type(parameter.data) for value in moments)
    return weights


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    distances = {}
    for word in sys.argv[1:]:
        # With a decay SGD's first momentum is a result, and not a tensor that was there.
        settings: Any = {"weight_decay": 0.1} | ({"momentum": 0.9} if word == "sgd" else {})
        spec = ActorSpec(backend="ddp", optimizer=word, learning_rate=1e-2, **settings)
        whole, sharded = step_with(spec), step_with(spec, mesh=mesh)
        distances[word] = max(float((whole[name] - sharded[name]).abs().max()) for name in whole)
    if dist.get_rank() == 0:
        print(json.dumps(distances))
    dist.destroy_process_group()
