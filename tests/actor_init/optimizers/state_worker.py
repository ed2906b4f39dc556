"""Go on from a saved state in shards of FSDP2, and whole; rank 0 prints how far the weights are apart.

The arguments are the words of the families. Rank 0 writes the state, as torch.save and as a folder of DCP, into FOLDER,
which is the first argument.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from actor_init.optimizers.build import list_named_parameters, make_optimizer
from actor_init.optimizers.saved_state import OptimizerState
from actor_init.optimizers.state_loading import AssignedState, TrainedParameter, assign_state
from actor_init.spec import ActorSpec
from tests.actor_init.optimizers.step_worker import OUTER, SmallModel, take_steps


def train_whole(spec: ActorSpec) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = SmallModel()
    optimizer = make_optimizer(spec, list_named_parameters(model), outer=OUTER)
    take_steps(model, [optimizer])
    return model, optimizer


def assign(path: Path, spec: ActorSpec, model: nn.Module) -> AssignedState:
    parameters = [TrainedParameter(name=name, shape=tuple(p.shape)) for name, p in model.named_parameters()]
    return assign_state(OptimizerState.read(path), parameters, spec)


def measure_distance(spec: ActorSpec, folder: Path, mesh: Any) -> float:
    """Go on whole, and from the file and the folder in shards; return the farthest weight."""
    model, optimizer = train_whole(spec)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save({"optimizer": optimizer.state_dict()}, folder / f"{spec.optimizer}.pt")
    options = StateDictOptions(full_state_dict=False)
    save({"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=folder / "dcp")
    dist.barrier()
    # Muon's groups are of other kinds than trainers', so a file without names does not tell them.
    paths = [folder / "dcp"] if spec.optimizer == "muon" else [folder / "dcp", folder / f"{spec.optimizer}.pt"]
    states = [assign(path, spec, model) for path in paths]
    expected = take_steps(model, [optimizer])
    farthest = 0.0
    for state in states:
        sharded = SmallModel()
        sharded.load_state_dict(weights)
        fully_shard(sharded.wide, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        parameters = list_named_parameters(sharded)
        found = take_steps(sharded, [make_optimizer(spec, parameters, outer=OUTER, state=state)])
        farthest = max(farthest, *(float((found[name] - weight).abs().max()) for name, weight in expected.items()))
    dist.barrier()
    return farthest


if __name__ == "__main__":
    dist.init_process_group("gloo")
    device_mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    home, *words = sys.argv[1:]
    distances = {}
    for word in words:
        (Path(home) / word).mkdir(exist_ok=True)
        actor = ActorSpec(backend="ddp", optimizer=word, learning_rate=1e-2)
        distances[word] = measure_distance(actor, Path(home) / word, device_mesh)
    if dist.get_rank() == 0:
        print(json.dumps(distances))
    dist.destroy_process_group()
