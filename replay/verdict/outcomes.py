"""Hold what a verdict says: the outcome of a run, of each pass and of each step's gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from actor_init.as_json import to_json
from replay.tolerances.job_bounds import NoiseFloor
from replay.verdict.causes.cause import Cause
from replay.verdict.causes.trial import TrialReport
from replay.verdict.findings import Finding
from replay.verdict.model_facts import ModelDifference
from replay.verdict.pass_values import WeightComparison

OTHER_WEIGHTS, FAILED = "other weights", "the pass failed"
# These hold for every number of a pass, so none of them is an open question.
WHOLE_PASS_REASONS = (OTHER_WEIGHTS, FAILED)
NOT_REPLAYED = "what was recorded was not replayed"


class Outcome(StrEnum):
    """The outcomes of a pass, of a window's gradient, and of a run.

    UNSETTLED  a number differs, and nothing tells whether the replay or something else is the cause
    """

    REPRODUCED = "REPRODUCED"
    DIFFERS = "DIFFERS"
    UNSETTLED = "UNSETTLED"
    CANNOT_TELL = "CANNOT TELL"


@dataclass(frozen=True, kw_only=True, slots=True)
class PassVerdict:
    """The outcome of one pass, or of the gradient of the window that ends with it.

    optimizer_step  the number of the job's optimizer step that took this gradient; None where a pass is judged
    """

    index: int
    source: str
    rank: int
    outcome: Outcome
    reason: str | None
    findings: Sequence[Finding]
    optimizer_step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """How many passes and optimizer steps of a run were judged.

    A quantity counts as judged if it agrees or differs within a bound that would show it gone, HIDING_BOUND at most.

    num_passes          micro-batches, of all data ranks
    num_judged          those of which everything that training uses was judged: of a pass that trains the forward and
                        the gradient of its window, of any other pass the forward
    num_forward_judged  those that train and whose forward alone was judged
    num_steps           windows of passes that train
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

    reason         why the outcome is UNSETTLED, or why one cannot tell of some passes
    counts         passes by outcome
    window_counts  windows by outcome of their gradient
    first          the first pass or window that DIFFERS, or is UNSETTLED, if that is the outcome
    worst          of each quantity that was judged, the finding nearest to its bound or farthest beyond it
    open           of each quantity that was not judged, or is unsettled, one finding with the reason
    weights        of the first pass with other weights, else of all passes together
    environment    the settings that differ: in the job, here
    dtypes         what the job and the replay computed in; each bound is that of the coarser one
    floors         the measured noise floors, by quantity
    model_differences  what the job's model is known to have other than the replay's
    causes         what is wrong, the surest first; empty where nothing differs, or where no cause is known
    unexplained    the quantities that differ, or are unsettled, and that no cause explains
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
    coverage: Coverage = Coverage()
    trials: TrialReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the `verdict` of run.json."""
        values: dict[str, Any] = to_json(self)
        return values
