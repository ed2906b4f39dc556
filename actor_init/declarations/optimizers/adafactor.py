"""Declare the two algorithms that are called Adafactor: torch's, and that of transformers, which its Trainer takes.

They differ in more than their settings: transformers' clips an update before it scales it, and has no least step.
"""

from actor_init.declarations.optimizers.declaration import GroupSetting, JobGroup, OptimizerDeclaration
from actor_init.option_values import OptimizerName


def _is_of_transformers(group: JobGroup) -> bool:
    is_there = group.library == "transformers" or (group.library is None and "clip_threshold" in group.settings)
    return group.class_name == "Adafactor" and is_there


def _is_of_torch(group: JobGroup) -> bool:
    is_there = group.library == "torch" or (group.library is None and "beta2_decay" in group.settings)
    return group.class_name == "Adafactor" and is_there


ADAFACTOR = OptimizerDeclaration(
    option_value=OptimizerName.ADAFACTOR,
    engine=("torch.optim:Adafactor",),
    help="torch's, which is another algorithm than transformers'",
    settings=(
        GroupSetting(name="weight_decay", default=0.0, options=("weight_decay",)),
        GroupSetting(name="beta2_decay", default=-0.8),
        GroupSetting(name="eps", default=(None, 1e-3)),
        GroupSetting(name="d", default=1.0),
        GroupSetting(name="maximize", default=False),
    ),
    state=(
        frozenset({"row_var", "col_var"}),
        frozenset({"variance"}),
    ),
    recognise=_is_of_torch,
    is_elementwise=False,
)
TRANSFORMERS_ADAFACTOR = OptimizerDeclaration(
    option_value=OptimizerName.TRANSFORMERS_ADAFACTOR,
    engine=("transformers.optimization:Adafactor",),
    help="that of transformers, as its Trainer sets it up",
    settings=(
        GroupSetting(name="weight_decay", default=0.0, options=("weight_decay",)),
        GroupSetting(name="beta1", default=None, options=("beta1",)),
        GroupSetting(name="eps", default=(1e-30, 1e-3)),
        GroupSetting(name="clip_threshold", default=1.0),
        GroupSetting(name="decay_rate", default=-0.8),
        # The class has other defaults for these: it computes its own learning rate. Trainer turns that off.
        GroupSetting(name="scale_parameter", default=False),
        GroupSetting(name="relative_step", default=False),
        GroupSetting(name="warmup_init", default=False),
    ),
    state=(
        frozenset({"exp_avg_sq_row", "exp_avg_sq_col"}),
        frozenset({"exp_avg_sq"}),
    ),
    recognise=_is_of_transformers,
    is_elementwise=False,
)
