"""Tell when the replay did not run on the weights that the job had."""

from replay.output.text import pluralise
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.evidence import CauseRule, Evidence, name_some
from replay.verdict.outcomes import OTHER_WEIGHTS, Outcome


def find_other_weights(evidence: Evidence) -> Cause | None:
    """Name the weights that are not the job's, if that keeps every pass from being judged."""
    judged = [verdict for verdict in evidence.verdicts if verdict.outcome is not Outcome.CANNOT_TELL]
    other = next(iter(evidence.verdicts), None)
    # Later passes have other weights in any job whose steps are not replayed, so the first pass decides.
    if judged or other is None or other.reason != OTHER_WEIGHTS:
        return None
    weights = next(compared.weights for compared in evidence.passes if compared.weights.differing)
    first = weights.first
    element = (
        ""
        if first is None
        else f": element {first.index} of {first.name} is {first.recorded:.6g} in the job, {first.replayed:.6g} here"
    )
    step = next(
        (
            compared.recorded.num_steps_before
            for compared in evidence.passes
            if compared.record.index == other.index and compared.recorded.num_steps_before is not None
        ),
        None,
    )
    of_step = f", which the job had after {pluralise(step, 'step')}" if step else ""
    return Cause(
        name=CauseName.OTHER_WEIGHTS,
        sureness=Sureness.IS,
        sentence=f"the replay runs on other weights than pass {other.index + 1} did{of_step}: "
        f"{name_some(weights.differing)} {'differs' if len(weights.differing) == 1 else 'differ'}{element}",
        try_next="--model FOLDER, with the weights that the job had before this pass",
    )


RULES = (
    CauseRule(
        name=CauseName.OTHER_WEIGHTS,
        find=find_other_weights,
        means="the replay does not run on the weights that the job had",
        told_by="samples of the weights in the capture",
        job="still-one-weight",
    ),
)
