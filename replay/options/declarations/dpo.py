"""Declare the loss of direct preference optimisation."""

from replay.options.declarations.declaration import ObjectiveDeclaration

DPO = ObjectiveDeclaration(
    name="dpo",
    formula="replay.objective.dpo:DPO",
    help="of preference pairs",
    own_options=frozenset({"dpo_beta", "label_smoothing", "pairs", "average_log_probs"}),
)
