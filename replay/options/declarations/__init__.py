"""Register the objectives. To add one, write a file that declares it, its formula, and one entry here."""

from replay.options.declarations.declaration import ObjectiveDeclaration
from replay.options.declarations.dpo import DPO
from replay.options.declarations.policy import POLICY
from replay.options.declarations.recorded import FROM_LOGIT_GRADIENT

OBJECTIVES: dict[str, ObjectiveDeclaration] = {
    objective.name: objective for objective in (POLICY, DPO, FROM_LOGIT_GRADIENT)
}


def list_objectives_with(option: str) -> list[str]:
    """List the objectives that take an option, a field of ObjectiveSpec."""
    return [name for name, objective in OBJECTIVES.items() if option in objective.own_options]
