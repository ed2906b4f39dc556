"""Declare the loss of direct preference optimisation."""

from replay.options.declarations.declaration import ObjectiveDeclaration
from replay.options.declarations.tensor_names import REF_CHOSEN, REF_LOG_PROBS

DPO = ObjectiveDeclaration(
    name="dpo",
    formula="replay.objective.dpo:DPO",
    needs=(*REF_LOG_PROBS, *REF_CHOSEN),
    help="of preference pairs",
    own_options=frozenset({"dpo_beta", "label_smoothing", "pairs", "average_log_probs"}),
)
