"""Plan a minimisation, and keep its trials.

`minimise.json` (campaign.py) has what is known in its result, written after every trial:

    {"failure": {...}, "num_layers": 4, "num_rows": 16, "num_tokens": 640,
     "trials": [{"what": "files", "candidate": {"cuts": [...], "spec": {...}, "num_processes": 1}, "num_runs": 1,
                 "found": {...}, "said": "shows it", "seconds": 1.9}]}

A candidate without cuts is the replay as it was typed, or what the folder that is written at the end holds. The logs of
trial number n are in `trials/<n>`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from replay.campaign.campaign import Campaign
from replay.commands.minimise.candidate import Candidate
from replay.commands.minimise.failure import Failure
from replay.commands.minimise.parity_cell import ParityCell
from replay.options.spec import ReplaySpec

AS_TYPED = "as typed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of a minimisation.

    tries     runs of the replay as it was typed, at most, to see it fail
    run       seconds for one run
    num_runs  of replays, all together
    """

    tries: int
    run: float
    num_runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MinimisePlan:
    """What is minimised.

    spec     of the replay as it was typed
    sources  captures that it replays, in their order
    parity   what --parity and --cell named
    """

    spec: ReplaySpec
    num_processes: int
    limits: Limits
    redact: bool
    sources: list[Path]
    parity: ParityCell | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One candidate and what came of it.

    found  the failure, if it is the one that is looked for
    said   what came of it, in words
    """

    what: str
    candidate: Candidate
    num_runs: int
    found: Failure | None
    said: str
    seconds: float


@dataclass(kw_only=True, slots=True)
class MinimiseLog:
    """What a minimisation has found out so far.

    failure     None until the replay has failed
    num_layers  of its model; None: not known
    num_rows, num_tokens  of the sources, padding included
    """

    campaign: Campaign[MinimisePlan]
    failure: Failure | None = None
    num_layers: int | None = None
    num_rows: int = 0
    num_tokens: int = 0
    trials: list[Trial] = field(default_factory=list)

    @property
    def plan(self) -> MinimisePlan:
        return self.campaign.plan

    @property
    def folder(self) -> Path:
        return self.campaign.folder

    @property
    def num_runs(self) -> int:
        return sum(trial.num_runs for trial in self.trials)

    @property
    def num_tries(self) -> int:
        """Return how often the replay was run as it was typed."""
        return sum(trial.what == AS_TYPED for trial in self.trials)

    def settle(self, trial: Trial) -> None:
        self.trials.append(trial)
        names = ("failure", "num_layers", "num_rows", "num_tokens", "trials")
        self.campaign.result = {name: getattr(self, name) for name in names}
        self.campaign.write()
