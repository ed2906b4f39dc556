"""Keep the state of a minimisation in `logs/<time>-minimise/minimise.json`, rewritten after every run.

{"format": 1, "command": "replay minimise --inputs inputs/my-run", "spec": {...}, "limits": {...},
 "num_processes": 1, "redact": false,
 "versions": {...}, "sources": ["inputs/my-run/a.pkl"], "failure": {...}, "num_layers": 4,
 "trials": [{"what": "files", "cuts": [...], "spec": {...}, "num_processes": 1, "num_runs": 1, "found": {...},
             "said": "shows it", "seconds": 1.9}]}

A trial without cuts is the replay as it was typed. Number n is in the folder `trials/<n>`.
"""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self

from actor_init.as_json import from_json, json_bytes
from actor_init.spec import UsageError
from capture.file_format.atomic_write import write_atomically
from replay.minimise.candidate import Candidate, Cut
from replay.minimise.failure import Failure
from replay.minimise.parity_cell import ParityCell
from replay.runlog.writer import refuse_other_versions, versions
from replay.spec import ReplaySpec

FORMAT = 1
FILE = "minimise.json"


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
class Trial:
    """One candidate and what came of it.

    found  the failure, if it is the one that is looked for
    said   what came of it, in words
    """

    what: str
    cuts: list[Cut]
    spec: ReplaySpec
    num_processes: int
    num_runs: int
    found: Failure | None
    said: str
    seconds: float

    @property
    def candidate(self) -> Candidate:
        return Candidate(cuts=tuple(self.cuts), spec=self.spec, num_processes=self.num_processes)


@dataclass(kw_only=True, slots=True)
class MinimiseLog:
    """The state of a minimisation.

    spec       of the replay as it was typed
    sources    captures that it replays, in their order
    parity     what --parity and --cell named
    failure    None until that replay has failed
    num_rows, num_tokens  of the sources, padding included
    """

    folder: Path
    format: int = FORMAT
    command: str
    spec: ReplaySpec
    limits: Limits
    num_processes: int
    redact: bool
    sources: list[Path]
    parity: ParityCell | None = None
    versions: dict[str, str | None] = field(default_factory=versions)
    failure: Failure | None = None
    num_layers: int | None = None
    num_rows: int = 0
    num_tokens: int = 0
    trials: list[Trial] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the log. Raises UsageError for anything but a minimisation of this version, and of these libraries."""
        path = folder / FILE
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(whole, dict) and whole.get("format") != FORMAT:
                form = whole.get("format")
                raise UsageError(f"{path} is of format {form}; this version goes on with {FORMAT} alone")
            log = from_json(cls, {**whole, "folder": str(folder)}, source=f"{path} is damaged")
        except (OSError, ValueError, TypeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{path} is damaged: {error}. Try: replay minimise, from the beginning") from error
        refuse_other_versions(log.versions, folder)
        return log

    def write(self) -> None:
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "folder"}
        write_atomically(self.folder / FILE, json_bytes(values))

    @property
    def num_runs(self) -> int:
        return sum(trial.num_runs for trial in self.trials)

    @property
    def known(self) -> dict[Candidate, Trial]:
        """Return the trials by their candidates."""
        return {trial.candidate: trial for trial in self.trials if trial.cuts}

    def settle(self, trial: Trial) -> None:
        self.trials.append(trial)
        self.write()

    def home_of(self, number: int) -> Path:
        """Return the folder of the trial with this number, from 1."""
        return self.folder / "trials" / f"{number:04d}"
