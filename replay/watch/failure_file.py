"""Write failure.txt and the `failure` of run.json, which say what rank and input ended a run. The first rank wins.

Where nodes share no disk that is the first rank of each node, and run.json is on the node of rank 0.
"""

import json
from pathlib import Path

from replay.runlog.writer import INTERRUPTED, RUN_FILE, replace_run
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
    path = folder / RUN_FILE
    if not path.is_file() and not position_file(folder, 0).is_file():
        return True  # rank 0 is on another node and shares no disk with this one
    run = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}  # none while the actor is opened
    position = failure.position
    named = {
        "kind": failure.kind,
        "rank": failure.rank,
        "index": position and position.index,
        "source": position and position.source,
        "phase": position and position.phase,
        "error": failure.error,
        "ranks": failure.sightings,
    }
    status, exit_code = ("interrupted", INTERRUPTED) if failure.kind == "interrupted" else ("failed", 1)
    replace_run(folder, {**run, "status": status, "failure": named, "exit_code": exit_code})
    return True
