"""Hold what came of trials: one pass's forward run again under hypotheses, each a small change of what it computes.

A hypothesis under which the job's recorded numbers come out, where the unchanged pass gives others, is what the job
did, as far as one pass can tell.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from actor_init.as_json import AnyFloat
from replay.tolerances.job_bounds import ACTION_TOKENS, LOG_PROBS, LOSS, TOKEN_LOG_PROBS, TOKENS_RMS
from replay.verdict.causes.cause import CauseName
from replay.verdict.findings import Finding, FindingStatus

FORWARD_FINDINGS = (LOSS, LOG_PROBS, TOKEN_LOG_PROBS, ACTION_TOKENS, TOKENS_RMS)
# What the names of trials of other settings of the config begin with.
OF_CONFIG = "config: "
# A number that is nearer than this share of its bound is as near as can be told.
NEAREST_SHARE = 0.01
# A trial that puts one number right may do so by chance, the likelier the more trials there are. Of hypotheses as far
# from each other as the wrong number is from the right one, one in so many comes so near; to be sure, for each trial.
SURE_GAIN_A_TRIAL = 100.0
# Differences below this are rounding of any dtype.
NEAREST = 1e-9
# So many times nearer to the job each number has to come in a coarser dtype.
COARSE_GAIN = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    """One hypothesis about the forward of a pass, and whether the job's numbers come out under it.

    name        what the hypothesis changes, in a few words
    cause       what is wrong if it holds
    says        what the job did then: a sentence
    try_next    what to mend in the job
    agrees      no number of the pass is wrong under it, and at least one is without it
    gain        how many times nearer to the job the farthest number is than without it; 0 where it does not agree
    num_values  how many of the job's numbers it puts right
    is_stated   the recording states the change itself: it is no guess
    is_of_stated_code  it is a mistake of code that the recording states to be another one than the replay's
    is_of_gradient  it was held against the gradient of the job's logits
    """

    name: str
    cause: CauseName
    says: str
    try_next: str
    agrees: bool
    gain: AnyFloat = 0.0
    num_values: int = 0
    is_stated: bool = False
    is_of_stated_code: bool = False
    is_of_gradient: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialReport:
    """The trials of one pass.

    index            of the pass
    confirmed_by     further passes that decided between trials that agree
    results          of those that ran
    num_forwards     of the pass, that were run for them
    log_probs_agree  the job's token log-probs come out of the unchanged pass, and only its loss does not
    recorded_loss    of the job; None where it recorded none, or where it is not wrong
    replayed_loss    of the unchanged pass
    not_run          why other trials could not run; in a few words each
    """

    index: int
    results: Sequence[TrialResult]
    num_forwards: int = 0
    confirmed_by: Sequence[int] = ()
    log_probs_agree: bool = False
    recorded_loss: AnyFloat | None = None
    replayed_loss: AnyFloat | None = None
    not_run: Sequence[str] = ()


def needs_confirmation(results: Sequence[TrialResult]) -> bool:
    """Tell whether the trials that agree may agree by chance: of one number each, or several of them."""
    agreeing = [result for result in results if result.agrees]
    return len(agreeing) > 1 or any(result.gain < SURE_GAIN_A_TRIAL * len(results) for result in agreeing)


def confirm_results(results: Sequence[TrialResult], more: Sequence[TrialResult]) -> list[TrialResult]:
    """Hold what agrees against the trials of a further pass, whose unchanged numbers are wrong, too.

    A trial has to agree in each pass. The chances that it does so in vain multiply, and with them its gains. A trial
    that the further pass cannot tell from another one of it stays as it is.
    """
    by_name = {result.name: result for result in more}
    confirmed: list[TrialResult] = []
    for result in results:
        other = by_name.get(result.name)
        if other is None or not result.agrees:
            confirmed.append(result)
        elif other.agrees:
            gain, num_values = result.gain * other.gain, result.num_values + other.num_values
            confirmed.append(replace(result, gain=gain, num_values=num_values))
        else:
            confirmed.append(replace(result, agrees=False, gain=0.0))
    return confirmed


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialMatch:
    """How near a hypothesis comes to the job's numbers of a pass; the fields are those of `TrialResult`."""

    agrees: bool
    gain: float = 0.0
    num_values: int = 0


def match_findings(unchanged: Sequence[Finding], changed: Sequence[Finding]) -> TrialMatch:
    """Hold the findings of a pass under a hypothesis against those of the unchanged pass.

    Both are of the same claims, in the same order.
    """
    wrong = [finding for finding in unchanged if finding.is_wrong]
    put_right = [
        finding
        for finding, other in zip(changed, unchanged, strict=True)
        if finding.status is FindingStatus.AGREES and other.is_wrong
    ]
    if not put_right or any(finding.is_wrong for finding in changed):
        return TrialMatch(agrees=False)
    farthest = max(finding.share_of_bound for finding in wrong)
    left = max(finding.share_of_bound for finding in put_right)
    return TrialMatch(
        agrees=True,
        gain=farthest / max(left, NEAREST_SHARE),
        num_values=sum(finding.num_values for finding in put_right),
    )


def match_coarse_findings(unchanged: Sequence[Finding], changed: Sequence[Finding]) -> TrialMatch:
    """Do the same where the hypothesis is a coarser dtype: `changed` is judged within that dtype's wide bounds.

    Those bounds alone would let much pass. So each number that is wrong has to come much nearer to the job's, too: it
    lies on the coarser dtype's values. One that a tie rounded the other way is as far as the dtype's spacing.
    """
    pairs = [(other, finding) for other, finding in zip(unchanged, changed, strict=False) if other.is_wrong]
    if not pairs or any(finding.is_wrong for finding in changed):
        return TrialMatch(agrees=False)
    gain = min((other.difference or 0.0) / max(finding.difference or 0.0, NEAREST) for other, finding in pairs)
    if gain < COARSE_GAIN:
        return TrialMatch(agrees=False)
    return TrialMatch(agrees=True, gain=gain, num_values=sum(finding.num_values for _, finding in pairs))


def join_matches(matches: Sequence[TrialMatch]) -> TrialMatch:
    """Join the matches of the ranks whose unchanged pass is wrong: a hypothesis has to hold on each of them."""
    if not matches or not all(match.agrees for match in matches):
        return TrialMatch(agrees=False)
    return TrialMatch(
        agrees=True,
        gain=min(match.gain for match in matches),
        num_values=sum(match.num_values for match in matches),
    )
