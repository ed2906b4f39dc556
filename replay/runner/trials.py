"""Run the first wrong forward again under hypotheses about the job, to prove a cause by experiment.

Only where the verdict is DIFFERS or UNSETTLED because of a number of a forward, and only the first such pass, which ran
on the weights that the replay began with. The rows are fed as the job had them, by a kernel that reads masks, without a
backward. Where sampled log-probs agree and the loss alone does not, the forward is right: then other losses of the same
log-probs are tried, which cost one forward together; else other masks and positions, a forward each.
"""

from collections.abc import Sequence

from replay.options.option_parsing import describe_error
from replay.runner.pass_trials import PassTrials
from replay.runner.rounding_floor import RunRepeater
from replay.tolerances.job_bounds import LOSS
from replay.verdict.causes.trial import (
    FORWARD_FINDINGS,
    TrialReport,
)
from replay.verdict.findings import VerdictSettings
from replay.verdict.gradient_findings import UNKNOWN_OBJECTIVE
from replay.verdict.judge import PassEvidence
from replay.verdict.outcomes import Outcome, Verdict

_WRONG = (Outcome.DIFFERS, Outcome.UNSETTLED)
# Further passes that decide where one loss may agree by chance.
MAX_CONFIRMING = 3


def find_pass_to_try(verdict: Verdict, passes: Sequence[PassEvidence], *, steps: bool) -> int | None:
    """Find the pass whose forward is the first wrong one; None where trials tell nothing.

    steps  the replay updates its weights, which are those that it began with before its first step alone
    """
    wrong = [
        judged
        for judged in [*verdict.passes, *verdict.windows]
        if judged.outcome in _WRONG and any(finding.is_wrong for finding in judged.findings)
    ]
    first = min(wrong, key=lambda judged: (judged.index, judged.is_window), default=None)
    if first is None or first.is_window:
        return None
    if not any(finding.is_wrong and finding.name in FORWARD_FINDINGS for finding in first.findings):
        return None
    has_stepped = any(record.index < first.index and record.result.grad_norm is not None for record, _, _ in passes)
    return None if steps and has_stepped else first.index


def find_pass_of_unknown_loss(verdict: Verdict) -> int | None:
    """Find a pass of the first step, if its gradient is the first unsettled number: of a loss not known here."""
    wrong = next((judged for judged in [*verdict.passes, *verdict.windows] if judged.outcome in _WRONG), None)
    if wrong is None or wrong is not next(iter(verdict.windows), None):
        return None
    return wrong.index if any(finding.doubt == UNKNOWN_OBJECTIVE for finding in wrong.findings) else None


def may_have_other_weights(passes: Sequence[PassEvidence], index: int) -> bool:
    """Tell whether the job had stepped before pass `index`, and nothing shows that the replay has those weights."""
    steps_before = [
        recorded.num_steps_before
        for _, recorded, _ in passes
        if recorded is not None and recorded.num_steps_before is not None
    ]
    return any(
        recorded.num_steps_before is not None
        and recorded.num_steps_before > min(steps_before)
        and not recorded.weight_comparison.are_same
        for record, recorded, _ in passes
        if record.index == index and recorded is not None
    )


def find_passes_to_confirm(
    verdict: Verdict, passes: Sequence[PassEvidence], index: int, *, steps: bool
) -> Sequence[int]:
    """Find further passes of the weights of pass `index` whose loss is wrong, too."""
    wrong = {
        judged.index
        for judged in verdict.passes
        if judged.outcome in _WRONG and any(finding.is_wrong and finding.name == LOSS for finding in judged.findings)
    }
    # A pass whose number is below that of the first step's last pass ran before the step.
    first_step = min((record.index for record, _, _ in passes if record.result.grad_norm is not None), default=None)
    is_before = {other for other in wrong if not steps or first_step is None or other <= first_step}
    others = [other for other in sorted(is_before - {index}) if not may_have_other_weights(passes, other)]
    return others[:MAX_CONFIRMING]


def run_trials(
    repeater: RunRepeater, passes: Sequence[PassEvidence], verdict: Verdict, settings: VerdictSettings
) -> TrialReport | None:
    """Run the first wrong forward again under hypotheses; None where that tells nothing.

    All ranks must call this. On several ranks it raises what opening an actor raises.
    """
    index = find_pass_to_try(verdict, passes, steps=repeater.spec.measure.steps)
    if index is None:
        index = find_pass_of_unknown_loss(verdict)
    if index is None or may_have_other_weights(passes, index):
        return None
    own_passes = {replayed.record.index: replayed for replayed in passes if replayed.record.rank == repeater.world.rank}
    own_pass = own_passes.get(index)
    # With uneven inputs a rank may not have the pass.
    if any(repeater.world.gather(own_pass is None)) or own_pass is None:
        return None
    parallel = repeater.spec.actor.parallel
    if parallel.tp > 1 or parallel.ring > 1:
        return TrialReport(index=index, results=(), not_run=["under tensor parallelism and a ring no trial runs"])
    try:
        confirming = find_passes_to_confirm(verdict, passes, index, steps=repeater.spec.measure.steps)
        others = [own_passes[other] for other in confirming]
        return PassTrials.open(repeater, own_pass, settings, others).run()
    except Exception as error:
        # On several ranks the others wait for this one in a collective, so the run has to end.
        if repeater.world.world_size > 1:
            raise
        return TrialReport(index=index, results=(), not_run=[describe_error(error)])
