"""Declare optimizers that are neither torch's nor transformers': Lion, and bitsandbytes' 8-bit forms.

A replay has them where their package is installed. bitsandbytes rounds an optimizer's state in blocks of a parameter's
elements, so a flat partition of it would be rounded otherwise. Eight bits are coarser than bf16 where a number is small
beside its block, and finer where it is large; bf16 stands for both.
"""

from actor_init.declarations.optimizers.declaration import GroupSetting, JobGroup, OptimizerDeclaration
from actor_init.option_values import OptimizerName

LION_CLASSES = ("Lion", "FusedLion", "DeepSpeedCPULion", "Lion32bit", "PagedLion", "PagedLion32bit")


def _is_lion(group: JobGroup) -> bool:
    is_known = group.is_of("lion_pytorch", "bitsandbytes", "deepspeed")
    return is_known and group.class_name in LION_CLASSES and not group.settings.get("decoupled_weight_decay")


def _is_8_bit(group: JobGroup, name: str) -> bool:
    # torchao has classes of the same names, with another rounding.
    return group.library == "bitsandbytes" and group.class_name in (f"{name}8bit", f"Paged{name}8bit")


def _make_adam_settings(weight_decay: float) -> tuple[GroupSetting, ...]:
    return (
        GroupSetting(name="betas", default=(0.9, 0.999), options=("beta1", "beta2")),
        GroupSetting(name="eps", default=1e-8, options=("eps",)),
        GroupSetting(name="weight_decay", default=weight_decay, options=("weight_decay",)),
    )


LION_SETTINGS = (
    GroupSetting(name="betas", default=(0.9, 0.99), options=("beta1", "beta2")),
    GroupSetting(name="weight_decay", default=0.0, options=("weight_decay",)),
)
LION = OptimizerDeclaration(
    option_value=OptimizerName.LION,
    engine=("lion_pytorch:Lion", "bitsandbytes.optim:Lion"),
    help="of lion-pytorch or bitsandbytes",
    settings=LION_SETTINGS,
    state=(frozenset({"exp_avg"}),),
    recognise=_is_lion,
    moments=lambda spec: 4,
)
ADAMW_8BIT = OptimizerDeclaration(
    option_value=OptimizerName.ADAMW_8BIT,
    engine=("bitsandbytes.optim:AdamW8bit",),
    settings=_make_adam_settings(0.01),
    state=(frozenset({"state1", "state2"}),),
    recognise=lambda group: _is_8_bit(group, "AdamW"),
    moments=lambda spec: 2,
    is_elementwise=False,
    step_dtype="bfloat16",
)
ADAM_8BIT = OptimizerDeclaration(
    option_value=OptimizerName.ADAM_8BIT,
    engine=("bitsandbytes.optim:Adam8bit",),
    settings=_make_adam_settings(0.0),
    state=(frozenset({"state1", "state2"}),),
    recognise=lambda group: _is_8_bit(group, "Adam"),
    moments=lambda spec: 2,
    is_elementwise=False,
    step_dtype="bfloat16",
)
LION_8BIT = OptimizerDeclaration(
    option_value=OptimizerName.LION_8BIT,
    engine=("bitsandbytes.optim:Lion8bit",),
    help="the 8-bit ones are bitsandbytes'",
    settings=LION_SETTINGS,
    state=(frozenset({"state1"}),),
    recognise=lambda group: _is_8_bit(group, "Lion"),
    moments=lambda spec: 1,
    is_elementwise=False,
    step_dtype="bfloat16",
)
