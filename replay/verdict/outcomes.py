"""Hold what a verdict says: the outcome of a run, of each pass and of each step's gradient."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from actor_init.as_json import to_json
from replay.tolerances.job_bounds import NoiseFloor
from replay.verdict.causes.cause import Cause
from replay.verdict.causes.trial import TrialReport
from replay.verdict.findings import Finding, FindingStatus
from replay.verdict.model_facts import ModelDifference
from replay.verdict.recorded_pass import WeightComparison

OTHER_WEIGHTS, FAILED = "other weights", "the pass failed"
# Each is the reason for all numbers of a pass at once. So a gradient that has such a reason is not left open
# (`_is_inconclusive_gradient` of pass_verdicts.py), and they come last in `count_reasons`.
WHOLE_PASS_REASONS = (OTHER_WEIGHTS, FAILED)
FINER_DTYPE = "computed in a finer dtype than the job"
NOT_REPLAYED = "what was recorded was not replayed"


class Outcome(StrEnum):
    """The outcomes of a pass, of a window's gradient, and of a run.

    UNSETTLED    something differs or looks wrong, and nothing tells whether it is an error; or the ranks of the job had
                 several weights or settings, of which a replay can take one; or the numbers agree, but in a finer dtype
                 than the job's, which was typed; or none of the recorded gradients could be judged
    CANNOT TELL  numbers cannot be compared: other weights, other dropout masks, a failed pass, or nothing recorded that
                 could be judged
    """

    REPRODUCED = "REPRODUCED"
    DIFFERS = "DIFFERS"
    UNSETTLED = "UNSETTLED"
    CANNOT_TELL = "CANNOT TELL"


@dataclass(frozen=True, kw_only=True, slots=True)
class PassVerdict:
    """The outcome of one pass, or of the gradient of the window that ends with it.

    index           of the pass, or of the last pass of the window
    first_index     of the window's first pass; None where a pass is judged
    optimizer_step  the number of the job's optimizer step that took this gradient; None where a pass is judged, and
                    where the job counted no steps
    """

    index: int
    source: str
    rank: int
    outcome: Outcome
    reason: str | None
    findings: Sequence[Finding]
    first_index: int | None = None
    optimizer_step: int | None = None

    @property
    def is_window(self) -> bool:
        """Is this the verdict on a window's gradient? A window has no class of its own."""
        return self.first_index is not None

    @property
    def window_name(self) -> str:
        """The window as a sentence names it: `the job's step 3`, or by its passes where the job counted no steps."""
        assert self.first_index is not None
        if self.optimizer_step is not None:
            return f"the job's step {self.optimizer_step + 1}"
        if self.first_index == self.index:
            return f"the window of pass {self.index + 1}"
        return f"the window of passes {self.first_index + 1} to {self.index + 1}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """How many passes and optimizer steps of a run were judged.

    A quantity counts as judged if it agrees or differs within a bound that would show it gone, HIDING_BOUND at most.

    num_passes          micro-batches, of all data ranks
    num_judged          those of which everything that training uses was judged: of a pass that trains the forward and
                        the gradient of its window, of any other pass the forward
    num_forward_judged  those that train and whose forward alone was judged
    num_steps           steps that the job is known to have taken after the passes that train
    num_steps_judged    those whose gradient was judged
    """

    num_passes: int = 0
    num_judged: int = 0
    num_forward_judged: int = 0
    num_steps: int = 0
    num_steps_judged: int = 0

    @property
    def is_whole(self) -> bool:
        return self.num_judged == self.num_passes and self.num_steps_judged == self.num_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The outcome of a run, and the findings that it rests on.

    reason         why the outcome is UNSETTLED, or the most frequent reason of the passes that are CANNOT TELL
    counts         passes by outcome
    window_counts  windows by outcome of their gradient
    first          the first pass or window that DIFFERS, or is UNSETTLED, if that is the outcome
    worst          of each quantity that was judged, the finding nearest to its bound or farthest beyond it
    open           of each quantity that was not judged, or is unsettled, one finding with the reason
    weights        the comparison of weights of the first pass with other weights, else of all passes together
    environment    the settings that differ, each with the job's value and the replay's
    dtypes         what the job and the replay computed in; each bound is that of the coarser one
    floors         the measured noise floors, by quantity
    model_differences  what the job's model is known to have other than the replay's
    causes         what is wrong, the surest first; empty where nothing differs, or where no cause is known
    unexplained    the quantities that differ, or are unsettled, and that no cause explains
    may_follow     further ones, which may follow from the causes: they differ only after a wrong step that one explains
    trials         what came of running a wrong forward again under hypotheses; None: none ran
    """

    outcome: Outcome
    reason: str | None
    counts: Mapping[Outcome, int]
    window_counts: Mapping[Outcome, int]
    first: PassVerdict | None
    worst: Sequence[Finding]
    open: Sequence[Finding]
    weights: WeightComparison | None
    environment: Mapping[str, tuple[str, str]]
    dtypes: tuple[str, str]
    floors: Mapping[str, NoiseFloor] = field(default_factory=dict)
    model_differences: Sequence[ModelDifference] = ()
    passes: Sequence[PassVerdict] = ()
    windows: Sequence[PassVerdict] = ()
    causes: Sequence[Cause] = ()
    unexplained: Sequence[str] = ()
    may_follow: Sequence[str] = ()
    coverage: Coverage = Coverage()
    trials: TrialReport | None = None

    @property
    def reproduced(self) -> bool:
        """Whether all that was judged agrees; `coverage.is_whole` tells whether that is everything."""
        return self.outcome is Outcome.REPRODUCED

    @property
    def cause(self) -> Cause | None:
        """The surest cause of what differs; None where nothing does, or where no cause is known."""
        return self.causes[0] if self.causes else None

    @property
    def try_next(self) -> str | None:
        """What to try next, by the surest cause."""
        return None if self.cause is None else self.cause.try_next

    def to_dict(self) -> dict[str, Any]:
        """Return the `verdict` of run.json."""
        values: dict[str, Any] = to_json(self)
        return values


def count_reasons(verdicts: Sequence[PassVerdict]) -> dict[str, int]:
    """Count the verdicts CANNOT TELL by their reason: the most frequent first, WHOLE_PASS_REASONS last."""
    counts = Counter(str(verdict.reason) for verdict in verdicts if verdict.outcome is Outcome.CANNOT_TELL)

    def sort_key(count: tuple[str, int]) -> tuple[int, int]:
        reason, number = count
        place = WHOLE_PASS_REASONS.index(reason) if reason in WHOLE_PASS_REASONS else -1
        return place, -number

    return dict(sorted(counts.items(), key=sort_key))


def select_worst_findings(verdicts: Sequence[PassVerdict]) -> list[Finding]:
    """Select of each quantity that agrees or differs the finding that used most of its bound."""
    worst: dict[str, Finding] = {}
    for verdict in verdicts:
        for finding in verdict.findings if verdict.outcome is not Outcome.CANNOT_TELL else ():
            if finding.difference is None or not (finding.agrees or finding.status is FindingStatus.DIFFERS):
                continue
            if finding.name not in worst or finding.share_of_bound > worst[finding.name].share_of_bound:
                worst[finding.name] = finding
    return list(worst.values())
