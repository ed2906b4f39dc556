"""Declare torch's FSDP2, with tensor parallelism over DTensors."""

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
from actor_init.toggles import OptimizerName


def _holding(spec: Asked, steps: bool) -> Holding:
    if spec.optimizer is OptimizerName.NONE:
        held = Held(weights=size_of(spec.dtype), gradients=size_of(spec.dtype))
    else:
        held = Held(masters=4, gradients=4, moments=moment_bytes(spec.optimizer, steps=steps))
    return Holding(alone=held, shared=held)


DECLARATION = Declaration(
    name="fsdp2",
    engine="actor_init.backends.fsdp2:FSDP2Backend",
    stages={2: "keep weights gathered after forward", 3: "reshard"},
    stages_help="2 keeps weights gathered between forward and backward, 3 (default) does not",
    default_stage=3,
    default_stage_without_optimizer=3,
    tp=True,
    ring=True,
    splits_head=True,
    own_options=frozenset({"tp_plan", "sequence_parallel"}),
    states=States(files="torch.distributed.checkpoint"),
    holding=_holding,
    trainings=(
        Training(),
        Training(suffix="-tp", tp=True),
        Training(suffix="-ring", ring=True),
        Training(suffix="-tp-ring", tp=True, ring=True),
    ),
)
