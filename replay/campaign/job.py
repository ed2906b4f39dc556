"""Define what one run of a campaign is: a replay, in a number of processes, in an environment."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from actor_init.as_json import to_json
from replay.spec import MeasureSpec, ReplaySpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A replay in processes of its own.

    home      its folder in the campaign's, such as `groups/0001`, which holds a folder for each attempt
    python    path of another environment's interpreter; empty: this one
    repeat    which of several runs of the same
    contents  tells its inputs from others that may lie in the same folder; empty: the folder always holds the same
    """

    home: str
    spec: ReplaySpec
    num_processes: int = 1
    python: str = ""
    repeat: int = 0
    contents: str = ""

    def digest_in(self, folder: Path) -> str:
        """Return a digest of what is run, for the campaign in `folder`.

        Where its files lie makes no other job of it: a campaign's folder may be moved.
        """
        measure = replace(self.spec.measure, log_folder=MeasureSpec().log_folder)
        what = to_json(replace(self, home="", spec=replace(self.spec, measure=measure)))
        text = json.dumps(what, sort_keys=True).replace(f"{json.dumps(str(folder.absolute()))[1:-1]}/", "")
        return hashlib.sha256(text.encode()).hexdigest()[:32]
