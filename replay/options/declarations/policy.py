"""Declare the clipped policy loss of PPO and GRPO."""

from replay.options.declarations.declaration import ObjectiveDeclaration
from replay.options.declarations.tensor_names import ADVANTAGES

POLICY = ObjectiveDeclaration(
    name="policy",
    formula="replay.objective.policy:POLICY",
    needs=ADVANTAGES,
    help="the clipped ratio of PPO and GRPO",
    own_options=frozenset(
        {
            *("clip_low", "clip_high", "dual_clip", "on_policy"),
            *("reduction", "divisor"),
            *("kl", "kl_coefficient", "entropy_coefficient"),
        }
    ),
)
