"""Declare SGD, with and without momentum."""

from actor_init.declarations.optimizers.declaration import GroupSetting, OptimizerDeclaration
from actor_init.option_values import OptimizerName

SGD = OptimizerDeclaration(
    option_value=OptimizerName.SGD,
    engine=("torch.optim:SGD",),
    settings=(
        GroupSetting(name="momentum", default=0.0, options=("momentum",)),
        GroupSetting(name="weight_decay", default=0.0, options=("weight_decay",)),
        GroupSetting(name="dampening", default=0.0),
        GroupSetting(name="nesterov", default=False),
        GroupSetting(name="maximize", default=False),
    ),
    state=(frozenset({"momentum_buffer"}),),
    recognise=lambda group: group.class_name == "SGD" and group.is_of("torch"),
    moments=lambda spec: 4 if spec.momentum else 0,
)
