"""Declare DeepSpeed's engine: ZeRO stages 0 to 3, AutoTP and DeepCompile."""

from actor_init.declarations.backends.declaration import (
    Asked,
    Declaration,
    Held,
    Holding,
    States,
    Training,
    moment_bytes,
    size_of,
)
from actor_init.declarations.backends.deepspeed_config import complaint
from actor_init.declarations.backends.deepspeed_states import why_not_on
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


DECLARATION = Declaration(
    name="deepspeed",
    engine="actor_init.backends.deepspeed.engine:DeepSpeedBackend",
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
