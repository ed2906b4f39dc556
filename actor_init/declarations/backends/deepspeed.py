"""Declare DeepSpeed's engine: ZeRO stages 0 to 3, AutoTP and DeepCompile."""

from actor_init.declarations.backends.declaration import (
    ActorSettings,
    BackendDeclaration,
    BytesPerParameter,
    SavedStateFacts,
    ShardedMemory,
    StateFormat,
    SuiteTraining,
    element_size,
    moment_size,
)
from actor_init.declarations.backends.deepspeed_config import find_obstacle
from actor_init.option_values import Compile, Dtype, OptimizerName


def _predict_memory(spec: ActorSettings, steps: bool) -> ShardedMemory:
    size, stage = element_size(spec.dtype), spec.resolved_zero_stage
    if not spec.has_optimizer:
        return ShardedMemory(total=BytesPerParameter(weights=size, gradients=size))
    moments = moment_size(spec, steps=steps)
    total = BytesPerParameter(weights=size, gradients=size, masters=4, moments=moments)
    if stage == 0:
        return ShardedMemory(total=total)
    partitioned = BytesPerParameter(
        weights=size if stage == 3 else 0, gradients=size if stage >= 2 else 0, masters=4, moments=moments
    )
    return ShardedMemory(total=total, partitioned=partitioned)


def _cuts_parameters(spec: ActorSettings) -> bool:
    """Tell whether the optimizer gets flat vectors of several parameters, or a tensor-parallel part of each."""
    return bool(spec.resolved_zero_stage) or spec.dtype is not Dtype.FP32 or spec.parallel.tp > 1


def is_partitioned_over(state: SavedStateFacts, world_size: int) -> bool:
    """Can DeepSpeed load the files unchanged on that many ranks? Stage 0 partitions nothing."""
    return not state.zero_stage or state.world_size == world_size


def find_load_obstacle(state: SavedStateFacts, world_size: int) -> str | None:
    """Return why DeepSpeed's universal format cannot load `state` on so many ranks; None if it can, or need not."""
    if is_partitioned_over(state, world_size):
        return None
    reasons = {
        f"is one of {state.optimizer}, not adamw": state.optimizer != OptimizerName.ADAMW,
        "has taken no step": not state.num_steps,
        "is split over tp as well": state.tp > 1,
    }
    for reason, holds in reasons.items():
        if holds:
            return (
                f"was partitioned over {state.world_size} ranks by ZeRO stage {state.zero_stage}, and here are "
                f"{world_size}. DeepSpeed's universal format does not take a state that {reason}. "
                f"Try: torchrun --nproc-per-node {state.world_size} -m replay ..."
            )
    return None


DECLARATION = BackendDeclaration(
    name="deepspeed",
    engine="actor_init.backends.deepspeed:DeepSpeedBackend",
    libraries=("deepspeed",),
    stages={0: "nothing", 1: "optimizer", 2: "+ gradients", 3: "+ weights"},
    stages_help="0 nothing, 1 optimizer (default where there is one), 2 + gradients, 3 + weights",
    default_stage=1,
    default_stage_without_optimizer=0,
    tp=True,
    ring=True,
    exclusive_options=frozenset({"deepspeed_config"}),
    compilers={Compile.DEEPCOMPILE: (1, 3)},
    # Stage and tp are fixed because DeepSpeed's files are partitioned by them, max_norm because loading would restore
    # the saved one.
    state_format=StateFormat(
        library="DeepSpeed", fixed_fields=("zero_stage", "tp", "max_norm"), find_obstacle=find_load_obstacle
    ),
    find_obstacle=find_obstacle,
    accumulating_stages=(2,),
    cuts_parameters=_cuts_parameters,
    rounds_masters=True,
    predict_memory=_predict_memory,
    suite_trainings=(SuiteTraining(zero_stage=2), SuiteTraining(suffix="-autotp", tp=True, is_standard=False)),
)
