"""Gradients under DeepSpeed's AutoTP beside the unsharded model's.

    python -m tests.helpers.autotp_worker CASES.json OUT.json

CASES.json is a list of [model folder, `replay` arguments]; each is one accumulation window. For each, and for each
rank, OUT.json gets the largest relative error of a loss, of a parameter's gradient, and that of the gradient norm.
"""

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actor_init.backends.deepspeed import DeepSpeedBackend
from actor_init.inputs.packing import prepare_inputs
from actor_init.spec import OptimizerName, ParallelSpec
from actor_init.world import World
from capture.file_format.capture_file import read_micro_batch
from replay.command_line.cli import leave, parse_command_line
from replay.objective.objective import compute_negated_mean
from replay.resolution.job_defaults import find_source
from replay.resolution.selection import select
from tests.helpers.reference import Reference
from tests.helpers.replay_worker import graphs_alone

reference_of = cache(Reference)


def whole_gradients(parameter: Any, whole_shape: torch.Size, world: World) -> list[Tensor]:
    """Each tp rank's part put together, or, where the parameter is whole, what each rank says that its gradient is."""
    from deepspeed.utils import safe_get_full_grad

    parts: list[Any] = [None] * world.mesh["tp"].size()
    own = safe_get_full_grad(parameter).detach().double().clone()
    dist.all_gather_object(parts, own, group=world.mesh["tp"].get_group())
    split = [dim for dim in range(own.ndim) if own.shape[dim] != whole_shape[dim]]
    assert len(split) <= 1, (own.shape, whole_shape)
    return [torch.cat(parts, dim=split[0])] if split else parts


def compare(world: World, folder: str, arguments: list[str]) -> dict[str, Any]:
    spec = parse_command_line([*arguments, "--model", folder]).args[0].spec
    actor = replace(spec.actor, optimizer=OptimizerName.ADAMW)
    backend = DeepSpeedBackend.open(actor, find_source(spec), world)
    reference = reference_of(Path(folder))
    paths = select(spec.inputs, world.data_rank, world.num_data_ranks).inputs
    assert len(paths) == spec.actor.resolved_grad_accumulation
    window = sorted({path for share in world.gather(list(paths)) for path in share})
    num_tokens = {path: reference.answer(path).num_tokens for path in window}
    losses = []
    for path in paths:
        inputs = prepare_inputs(read_micro_batch(path), packing=spec.actor.packs)
        loss = compute_negated_mean(backend.forward(inputs, train_mode=True), inputs)
        backend.backward(loss * (num_tokens[path] * len(window) / sum(num_tokens.values())))
        losses.append(abs(loss.item() / reference.answer(path).loss - 1))
    expected = reference.gradients(window)
    parameters = dict(backend.engine.module.named_parameters())
    assert set(parameters) == set(expected)
    gradients = {
        name: max(
            float((found - expected[name]).norm() / expected[name].norm())
            for found in whole_gradients(parameter, expected[name].shape, world)
        )
        for name, parameter in parameters.items()
    }
    num_split = sum(parameter.shape != expected[name].shape for name, parameter in parameters.items())
    norm = backend.end_window(step=False)
    backend.close()
    return {
        "loss": max(losses),
        "gradients": gradients,
        "norm": abs(norm / reference.gradient_norm(window) - 1),
        "num_split": num_split,
        "num_inputs": len(window),
    }


def main() -> int:
    torch.set_num_threads(1)
    with World.from_env(ParallelSpec(tp=2)) as world, graphs_alone():
        found = [world.gather(compare(world, *case)) for case in json.loads(Path(sys.argv[1]).read_text())]
        if world.rank == 0:
            Path(sys.argv[2]).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    leave(main())
