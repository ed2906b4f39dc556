"""Declare torch's DistributedDataParallel."""

from actor_init.declarations.backends.declaration import BackendDeclaration, StateFormat, SuiteTraining

DECLARATION = BackendDeclaration(
    name="ddp",
    engine="actor_init.backends.ddp:DDPBackend",
    help="torch's, and nobody shards: to hold the others against",
    state_format=StateFormat(library="torch.distributed.checkpoint"),
    suite_trainings=(SuiteTraining(is_standard=False),),
)
