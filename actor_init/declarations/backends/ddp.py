"""Declare torch's DistributedDataParallel."""

from actor_init.declarations.backends.declaration import Declaration, States, Training

DECLARATION = Declaration(
    name="ddp",
    engine="actor_init.backends.ddp:DDPBackend",
    help="torch's, and nobody shards: to hold the others against",
    states=States(files="torch.distributed.checkpoint"),
    trainings=(Training(is_standard=False),),
)
