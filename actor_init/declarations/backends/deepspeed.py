"""Declare DeepSpeed's engine: ZeRO stages 0 to 3, AutoTP and DeepCompile."""

from actor_init.declarations.backends.declaration import (
    Asked,
    Declaration,
    Held,
    Holding,
    Saved,
    States,
    Training,
    moment_bytes,
    size_of,
)
from actor_init.declarations.backends.deepspeed_config import complaint
from actor_init.toggles import Compile, OptimizerName


def _holding(spec: Asked, steps: bool) -> Holding:
    size, stage = size_of(spec.dtype), spec.resolved_zero_stage
    if spec.optimizer is OptimizerName.NONE:
        return Holding(alone=Held(weights=size, gradients=size))
    moments = moment_bytes(spec.optimizer, steps=steps)
    alone = Held(weights=size, gradients=size, masters=4, moments=moments)
    if stage == 0:
        return Holding(alone=alone)
    shared = Held(weights=size if stage == 3 else 0, gradients=size if stage >= 2 else 0, masters=4, moments=moments)
    return Holding(alone=alone, shared=shared)


def is_partitioned_over(state: Saved, world_size: int) -> bool:
    """Can DeepSpeed load the files unchanged on that many ranks? Stage 0 partitions nothing."""
    return not state.zero_stage or state.world_size == world_size


def why_not_on(state: Saved, world_size: int) -> str | None:
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
                f"Try: torchrun --nproc-per-node {state.world_size} replay ..."
            )
    return None


DECLARATION = Declaration(
    name="deepspeed",
    engine="actor_init.backends.deepspeed:DeepSpeedBackend",
    libraries=("deepspeed",),
    stages={0: "nothing", 1: "optimizer", 2: "+ gradients", 3: "+ weights"},
    stages_help="0 nothing, 1 optimizer (default where there is one), 2 + gradients, 3 + weights",
    default_stage=1,
    default_stage_without_optimizer=0,
    tp=True,
    ring=True,
    own_options=frozenset({"deepspeed_config"}),
    compilers={Compile.DEEPCOMPILE: (1, 3)},
    # its files are partitioned by stage and tp, and loading would restore the saved max_norm
    states=States(files="DeepSpeed", same=("zero_stage", "tp", "max_norm"), complaint=why_not_on),
    complaint=complaint,
    accumulating_stages=(2,),
    holding=_holding,
    trainings=(Training(zero_stage=2), Training(suffix="-autotp", tp=True, is_standard=False)),
)
