"""Every gradient under DeepSpeed's AutoTP beside the unsharded model's: `python -m tests.autotp_worker CASES.json OUT`.

CASES.json is a list of [model folder, `replay` arguments]. For each, OUT gets the largest relative error of a loss and
of a parameter's gradient, and the parameter's name.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actor_init.backends.deepspeed_zero import DeepSpeedBackend
from actor_init.packing import actor_inputs
from actor_init.spec import ParallelSpec
from actor_init.world import World
from capture.capture_file import read_micro_batch
from replay.cli import app, leave
from replay.loss import negated_mean
from replay.selection import select
from replay.session import find_source
from tests.reference import Reference


def whole_gradient(parameter: Any, whole_shape: torch.Size, world: World) -> list[Tensor]:
    """The gradient as each tp rank has it, put together along the dimension that is split. Equal, if all is well."""
    from deepspeed.utils import safe_get_full_grad

    local = safe_get_full_grad(parameter).detach().double().clone()
    parts: list[Any] = [None] * world.mesh["tp"].size()
    dist.all_gather_object(parts, local, group=world.mesh["tp"].get_group())
    split = [dim for dim in range(local.ndim) if local.shape[dim] != whole_shape[dim]]
    assert len(split) < 2, (local.shape, whole_shape)
    return [torch.cat(parts, dim=split[0])] if split else parts


def compare(world: World, folder: str, arguments: list[str]) -> dict[str, Any]:
    spec = app([*arguments, "--model", folder], standalone_mode=False).args[0]
    backend = DeepSpeedBackend.open(spec.actor, find_source(spec), world)
    files = select(spec.inputs, world.data_rank, world.num_data_ranks).inputs
    reference = Reference(Path(folder))
    losses, errors = [0.0], {}
    shares = world.gather(list(files))
    window = sorted({path for share in shares for path in share})
    for path in files:
        inputs = actor_inputs(read_micro_batch(path), packing=spec.actor.packing)
        loss = negated_mean(backend.forward(inputs, trains=True), inputs)
        expected = reference.answer(path).loss
        losses.append(abs(loss.item() - expected) / abs(expected))
        backend.backward(loss)
    for path in window:
        reference.answer(path)
    whole = reference.mean_gradients(window)
    total = sum(float(gradient.norm()) ** 2 for gradient in whole.values()) ** 0.5
    found = dict(backend.engine.module.named_parameters())
    assert set(found) == set(whole)
    for name, parameter in found.items():
        expected_norm = float(whole[name].norm())
        for gradient in whole_gradient(parameter, whole[name].shape, world):
            error = float((gradient - whole[name]).norm()) / expected_norm
            errors[name] = max(errors.get(name, 0.0), error)
    norm = backend.end_window(step=False)
    backend.close()
    worst = max(errors, key=lambda name: errors[name])
    return {
        "loss": max(losses),
        "gradient": errors[worst],
        "parameter": worst,
        "norm": abs(norm - total) / total,
        "num_inputs": len(window),
    }


def main() -> int:
    torch.set_num_threads(1)
    with World.from_env(ParallelSpec(tp=2)) as world:
        found = [world.gather(compare(world, *case)) for case in json.loads(Path(sys.argv[1]).read_text())]
    if world.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    leave(main())
