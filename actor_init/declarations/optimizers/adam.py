"""Declare AdamW and Adam, and the fused forms that compute the same.

The fused classes of apex, DeepSpeed and Transformer Engine are either of the two, by their `adam_w_mode`; torch's Adam
is AdamW where `decoupled_weight_decay` is on. Without weight decay the two are the same.
"""

from actor_init.declarations.optimizers.declaration import GroupSetting, JobGroup, OptimizerDeclaration
from actor_init.option_values import OptimizerName

PLAIN_LIBRARIES = ("torch", "bitsandbytes")
FUSED_CLASSES = ("FusedAdam", "DeepSpeedCPUAdam", "ZenFlowSelectiveAdamW", "HybridAdam")
# bitsandbytes' names of the classes that keep their state in 32 bits; a paged one moves it to the host.
BITSANDBYTES_ADAMW = ("AdamW32bit", "PagedAdamW", "PagedAdamW32bit")
BITSANDBYTES_ADAM = ("Adam32bit", "PagedAdam", "PagedAdam32bit")


def _is_decoupled(group: JobGroup) -> bool | None:
    """Tell whether weight decay acts on the weights and not on the gradient; None for a class of another family."""
    name, settings = group.class_name, group.settings
    if name in FUSED_CLASSES:
        return bool(settings.get("adam_w_mode", True))
    if name in BITSANDBYTES_ADAMW and group.is_of("bitsandbytes"):
        return True
    if name in BITSANDBYTES_ADAM and group.is_of("bitsandbytes"):
        return False
    if name in ("Adam", "AdamW") and group.is_of(*PLAIN_LIBRARIES):
        return bool(settings.get("decoupled_weight_decay", name == "AdamW"))
    # The groups of an optimizer that is Muon inside the layers and Adam outside say which they are.
    if name in ("MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam") and settings.get("use_muon") is False:
        return bool(settings.get("adam_w_mode", True))
    return None


def _make_settings(weight_decay: float) -> tuple[GroupSetting, ...]:
    return (
        GroupSetting(name="betas", default=(0.9, 0.999), options=("beta1", "beta2")),
        GroupSetting(name="eps", default=1e-8, options=("eps",)),
        GroupSetting(name="weight_decay", default=weight_decay, options=("weight_decay",)),
        GroupSetting(name="amsgrad", default=False),
        GroupSetting(name="maximize", default=False),
    )


ADAMW = OptimizerDeclaration(
    option_value=OptimizerName.ADAMW,
    engine=("torch.optim:AdamW",),
    settings=_make_settings(0.01),
    state=(frozenset({"exp_avg", "exp_avg_sq"}),),
    recognise=lambda group: _is_decoupled(group) is True,
    moments=lambda spec: 8,
    has_fused=True,
)
ADAM = OptimizerDeclaration(
    option_value=OptimizerName.ADAM,
    engine=("torch.optim:Adam",),
    settings=_make_settings(0.0),
    state=(frozenset({"exp_avg", "exp_avg_sq"}),),
    recognise=lambda group: _is_decoupled(group) is False,
    moments=lambda spec: 8,
    has_fused=True,
)
