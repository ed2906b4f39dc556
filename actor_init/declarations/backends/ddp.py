"""Declare torch's DistributedDataParallel."""

from actor_init.declarations.backends.declaration import BackendDeclaration, StateFormat, SuiteTraining

DECLARATION = BackendDeclaration(
    name="ddp",
    engine="actor_init.backends.ddp:DDPBackend",
    help="torch's DDP, unsharded, to compare the others with",
    clips_by_any_rule=True,
    state_format=StateFormat(library="torch.distributed.checkpoint"),
    suite_trainings=(SuiteTraining(is_standard=False),),
)
