"""Find the state of the job's optimizer that a replay begins with, before its actor is opened."""

from dataclasses import replace
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from actor_init.declarations.backends import BACKENDS, find_backend_declaration
from actor_init.model import ModelSource, build_on_meta, make_trainable
from actor_init.optimizers.saved_state import OptimizerState
from actor_init.optimizers.state_loading import AssignedState, TrainedParameter, assign_state
from actor_init.spec import UsageError
from actor_init.world import World, try_on_all_ranks
from capture.facts import Setting
from replay.options.resolved import ResolvedReplay
from replay.runner.checkpoint import SAFE_LOAD_VERSION, StateWeights


def find_job_optimizer_state(spec: ResolvedReplay, source: ModelSource, world: World) -> ModelSource:
    """Return `source` with the state of --optimizer-state, if one was given. All ranks must call this.

    Raises UsageError, on all ranks, if it cannot be read, does not fit the model, or cannot be had under the backend.
    """
    path = spec.state.optimizer_state
    if path is None:
        return source
    # Each rank reads the file: on nodes that share no disk it may be missing on some.
    state = try_on_all_ranks(world, lambda: _read_state(spec, source, path))
    return replace(source, optimizer_state=state)


def count_loaded_steps(source: ModelSource) -> tuple[int, ...] | None:
    """List the counts of steps in the state that a replay's optimizer begins with; None where it begins without one."""
    if source.optimizer_state is not None:
        return source.optimizer_state.counts
    weights = source.weights
    return (weights.num_steps,) if isinstance(weights, StateWeights) and weights.num_steps else None


def _refuse_what_cannot_load(spec: ResolvedReplay, path: Path) -> None:
    setting, declaration = Setting("optimizer_state", path), find_backend_declaration(spec.actor.backend)
    if TorchVersion(torch.__version__) < SAFE_LOAD_VERSION:
        why = f"needs torch {SAFE_LOAD_VERSION} or later, whose torch.load runs no code from a file"
        raise UsageError(setting, f"{why}, and {torch.__version__} is installed")
    if declaration.cuts_parameters(spec.actor):
        others = [name for name, other in BACKENDS.items() if not other.cuts_parameters(spec.actor)]
        advice = f"Try: {', or '.join(str(Setting('backend', name)) for name in others)}"
        why = f"is not there for {declaration.name}, whose optimizer has pieces of parameters"
        raise UsageError(setting, why, f"{advice}; or a state of {Setting('save_state')}, with {Setting('load_state')}")


def _read_state(spec: ResolvedReplay, source: ModelSource, path: Path) -> AssignedState:
    _refuse_what_cannot_load(spec, path)
    model = build_on_meta(source.config, attention="eager", dtype=torch.float32)
    make_trainable(model, source)
    parameters = [
        TrainedParameter(name=name, shape=tuple(parameter.shape))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    groups = [
        [parameter.name for parameter in parameters if parameter.name in group.names]
        for group in source.optimizer_groups
    ]
    return assign_state(OptimizerState.read(path), parameters, spec.actor, groups)
