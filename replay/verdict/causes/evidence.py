"""Hold all that a cause may be told from: the compared passes of a run, its windows, and what was found in them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from replay.verdict.causes.cause import Cause, CauseName
from replay.verdict.causes.trial import TrialReport
from replay.verdict.findings import Finding, VerdictSettings
from replay.verdict.gradient_findings import ComparedPass, list_steps
from replay.verdict.gradient_mix import SinglePassGradient
from replay.verdict.outcomes import Outcome, PassVerdict
from replay.verdict.rank_weights import have_same_weights_after


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseEvidence:
    """What a rule may look at.

    passes       every pass of every rank, with what the job recorded of it
    windows      the passes of each window, in the order of the replay
    verdicts     on passes and on the gradients of windows, in the order of time
    environment  the settings that differ: in the job, here
    trials       what came of running a wrong forward again under hypotheses; None: none ran
    single_pass_gradients  of each pass of the first window whose gradient is wrong, replayed alone; empty: not measured
    """

    passes: Sequence[ComparedPass]
    windows: Sequence[Sequence[ComparedPass]]
    verdicts: Sequence[PassVerdict]
    settings: VerdictSettings
    environment: Mapping[str, tuple[str, str]]
    trials: TrialReport | None = None
    single_pass_gradients: Sequence[SinglePassGradient] = ()

    @property
    def wrong(self) -> Iterator[tuple[PassVerdict, Finding]]:
        """Every finding that differs, or is unsettled, with the verdict that it belongs to, in the order of time."""
        for verdict in self.verdicts:
            if verdict.outcome in (Outcome.DIFFERS, Outcome.UNSETTLED):
                for finding in verdict.findings:
                    if finding.is_wrong:
                        yield verdict, finding

    def find_wrong(self, *names: str) -> tuple[PassVerdict, Finding] | None:
        """Find the first finding of one of these names that differs or is unsettled."""
        return next(((verdict, finding) for verdict, finding in self.wrong if finding.name in names), None)

    def find_pass(self, verdict: PassVerdict) -> ComparedPass | None:
        """Find the pass that this verdict is on; None where it is on a window's gradient."""
        place = verdict.index, verdict.rank
        return next((compared for compared in self.passes if compared.place == place and not verdict.is_window), None)

    def find_window(self, verdict: PassVerdict) -> Sequence[ComparedPass] | None:
        """Find the passes of the window whose gradient this verdict is on."""
        return next((window for window in self.windows if window[-1].record.index == verdict.index), None)

    def find_wrong_window(self, *names: str) -> tuple[PassVerdict, Finding, Sequence[ComparedPass]] | None:
        """Find the first wrong finding of these names, and its window; None where the forward is wrong before it."""
        wrong = None if self.is_forward_wrong else self.find_wrong(*names)
        window = None if wrong is None else self.find_window(wrong[0])
        return None if wrong is None or window is None else (*wrong, window)

    def have_ranks_same_weights_after(self, window: Sequence[ComparedPass]) -> bool | None:
        """Tell whether the job's ranks had the same weights behind the step of this window; None: not known."""
        steps = list_steps(window)
        return have_same_weights_after((each.recorded for each in self.passes), steps[0].number) if steps else None

    def list_wrong_names(self) -> list[str]:
        return list(dict.fromkeys(finding.name for _, finding in self.wrong))

    @property
    def first_wrong(self) -> PassVerdict | None:
        return next((verdict for verdict, _ in self.wrong), None)

    @property
    def has_stated_trial(self) -> bool:
        """Tell whether the job's numbers came out under a change that the recording states: that rule names it."""
        return self.trials is not None and any(result.agrees and result.is_stated for result in self.trials.results)

    @property
    def is_config_acquitted(self) -> bool:
        """Tell whether the pass ran under the job's own config too, and the job's numbers did not come out."""
        stated = [result for result in self.trials.results if result.is_stated] if self.trials is not None else []
        return bool(stated) and not self.has_stated_trial

    @property
    def is_forward_wrong(self) -> bool:
        """Tell whether the first wrong number of the run is one of a forward, before any gradient is wrong."""
        return self.first_wrong is not None and not self.first_wrong.is_window


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseRule:
    """One rule of the table.

    find     returns the cause if the evidence shows it
    means    what the cause is, for docs/verdict.md
    told_by  what it is told from, for docs/verdict.md
    job      the job of tests/broken_jobs that has this cause
    """

    name: CauseName
    find: Callable[[CauseEvidence], Cause | None]
    means: str
    told_by: str
    job: str


def name_time(verdict: PassVerdict) -> str:
    """Say since when: `since the job's step 1` or `since pass 3`."""
    return f"since {verdict.window_name if verdict.is_window else f'pass {verdict.index + 1}'}"
