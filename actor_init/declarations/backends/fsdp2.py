"""Declare torch's FSDP2, with tensor parallelism over DTensors."""

from actor_init.declarations.backends.declaration import (
    ActorSettings,
    BackendDeclaration,
    BytesPerParameter,
    ShardedMemory,
    StateFormat,
    SuiteTraining,
    element_size,
    moment_size,
)


def _predict_memory(spec: ActorSettings, steps: bool) -> ShardedMemory:
    if not spec.has_optimizer:
        total = BytesPerParameter(weights=element_size(spec.dtype), gradients=element_size(spec.dtype))
    else:
        total = BytesPerParameter(masters=4, gradients=4, moments=moment_size(spec, steps=steps))
    return ShardedMemory(total=total, partitioned=total)


DECLARATION = BackendDeclaration(
    name="fsdp2",
    engine="actor_init.backends.fsdp2:FSDP2Backend",
    clips_by_any_rule=True,
    stages={2: "keep weights gathered after forward", 3: "reshard"},
    stages_help="2 keeps weights gathered between forward and backward, 3 (default) does not",
    default_stage=3,
    default_stage_without_optimizer=3,
    tp=True,
    ring=True,
    splits_head=True,
    exclusive_options=frozenset({"tp_plan", "sequence_parallel"}),
    state_format=StateFormat(library="torch.distributed.checkpoint"),
    predict_memory=_predict_memory,
    suite_trainings=(
        SuiteTraining(),
        SuiteTraining(suffix="-tp", tp=True),
        SuiteTraining(suffix="-ring", ring=True),
        SuiteTraining(suffix="-tp-ring", tp=True, ring=True),
    ),
)
