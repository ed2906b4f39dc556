"""An objective in one file, for tests: X times the plain policy gradient's loss, where X is --kl-coefficient.

`python -m tests.helpers.toy_objective ...` is `replay` with it.
"""

import sys

from torch import Tensor

from replay.objective.inputs import ObjectiveInputs
from replay.objective.objective import Formula, Need
from replay.options.declarations import OBJECTIVES
from replay.options.declarations.declaration import ObjectiveDeclaration
from replay.options.declarations.tensor_names import ADVANTAGES
from replay.options.spec import ObjectiveSpec

TOY = ObjectiveDeclaration(
    name="toy",
    formula="tests.helpers.toy_objective:FORMULA",
    help="the advantages' share of the window",
    own_options=frozenset({"kl_coefficient"}),
)


def toy_loss(inputs: ObjectiveInputs, spec: ObjectiveSpec) -> Tensor:
    total = (inputs.log_probs_BA * inputs.of_tokens(*ADVANTAGES)).sum()
    return -spec.kl_coefficient * total / inputs.num_window_tokens


FORMULA = Formula(
    loss=toy_loss,
    describe=lambda spec: [f"times {spec.kl_coefficient:g}"],
    needs=lambda recorded, spec: [Need(names=ADVANTAGES, or_else="or --loss sft")],
    sums_over_window=lambda spec: True,
)


def main() -> int:
    OBJECTIVES[TOY.name] = TOY
    from replay.command_line.cli import main as replay

    return replay(sys.argv[1:])


if __name__ == "__main__":
    code = main()
    from replay.command_line.cli import leave

    leave(code)
