"""Write failure.txt and the `failure` of run.json, which say what rank and input ended a run. The first rank wins.

Where nodes share no disk that is the first rank of each node, and run.json is on the node of rank 0.
"""

from dataclasses import replace
from pathlib import Path

from actor_init.as_json import to_json
from replay.runlog.run_file import RUN_FILE, RunFailure, RunFile
from replay.runlog.writer import INTERRUPTED
from replay.watch.blame import Failure
from replay.watch.progress import position_file

FAILURE_FILE = "failure.txt"


def claim_failure(folder: Path, failure: Failure, text: str) -> bool:
    """Write which rank and input ended a run into run.json, and `text` into failure.txt. Any rank may call this.

    False if another rank did so before: its failure may be why this one fails, and nothing is written.
    """
    try:
        with (folder / FAILURE_FILE).open("x", encoding="utf-8") as file:
            file.write(text + "\n")
    except FileExistsError:
        return False
    has_begun = (folder / RUN_FILE).is_file()
    if not has_begun and not position_file(folder, 0).is_file():
        return True  # rank 0 is on another node and shares no disk with this one
    position = failure.position
    named = RunFailure(
        kind=failure.kind,
        rank=failure.rank,
        index=None if position is None else position.index,
        source=None if position is None else position.source,
        phase=None if position is None else position.phase,
        error=failure.error,
        ranks=to_json(failure.sightings),
    )
    status, exit_code = ("interrupted", INTERRUPTED) if failure.kind == "interrupted" else ("failed", 1)
    run = RunFile.read(folder) if has_begun else RunFile(status=status)
    replace(run, status=status, failure=named, exit_code=exit_code).write(folder)
    return True
