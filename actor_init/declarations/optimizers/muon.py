"""Declare Muon: torch's, and Keller Jordan's, which computes the same step."""

from actor_init.declarations.optimizers.declaration import GroupSetting, JobGroup, OptimizerDeclaration
from actor_init.option_values import OptimizerName

# Keller Jordan's package is called muon. Another implementation may scale its step in another way.
KELLER_JORDAN = "muon"
WITH_ADAM = ("MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam")


def _is_muon(group: JobGroup) -> bool:
    if group.library == KELLER_JORDAN:
        is_muon = group.class_name in WITH_ADAM and group.settings.get("use_muon") is True
        return is_muon or group.class_name in ("Muon", "SingleDeviceMuon")
    is_of_torch = group.library == "torch" or (group.library is None and "ns_coefficients" in group.settings)
    return group.class_name == "Muon" and is_of_torch


MUON = OptimizerDeclaration(
    option_value=OptimizerName.MUON,
    engine=("torch.optim:Muon",),
    help="on the matrices of the layers, and adamw on all else",
    settings=(
        GroupSetting(name="weight_decay", default=0.1, options=("weight_decay",)),
        GroupSetting(name="momentum", default=0.95, options=("momentum",)),
        GroupSetting(name="nesterov", default=True),
        GroupSetting(name="ns_coefficients", default=(3.4445, -4.775, 2.0315)),
        GroupSetting(name="eps", default=1e-7),
        GroupSetting(name="ns_steps", default=5),
        GroupSetting(name="adjust_lr_fn", default=None),
    ),
    state=(frozenset({"momentum_buffer"}),),
    recognise=_is_muon,
    moments=lambda spec: 4,
    is_elementwise=False,
    # A step is made orthogonal in bf16.
    step_dtype="bfloat16",
    companion=OptimizerName.ADAMW,
    steps_matrices=True,
)
