"""Declare the job's own loss, as the gradient of its logits tells it."""

from replay.options.declarations.declaration import ObjectiveDeclaration

FROM_LOGIT_GRADIENT = ObjectiveDeclaration(
    name="recorded",
    formula="replay.objective.recorded:RECORDED",
    help="the job's own, read from its gradient",
)
