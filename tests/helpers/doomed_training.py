"""Workers of Ray Train that are killed: while a checkpoint is written, and in a pass, with their node.

Their job has `marks`, a folder that all nodes see, and `snapshot`, the file where Ray Train lists its checkpoints.
"""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from replay.campaign.training_rank import train
from replay.runner.replayer import Replayer

LOST_PASS = 7
LAST_STATE, KILLED_STATE = 2, "step-000004"
NODE_MAY_GO = "node-may-go"
DOOMED = 1  # rank


def once(job: Mapping[str, Any], what: str) -> bool:
    """Is this the first time?"""
    mark = Path(job["marks"]) / f"{what}-was-killed"
    if mark.exists():
        return False
    mark.touch()
    return True


def doomed(job: Mapping[str, Any]) -> int:
    """Train. Rank 1 dies with half of a state written; later it waits, in a pass, for its node to die."""
    from ray.train.v2._internal.execution.storage import StorageContext

    replayed, persisted = Replayer.replay, StorageContext.persist_current_checkpoint

    def replay(self: Replayer, index: int, path: Path) -> Any:
        if index == LOST_PASS and once(job, "node"):
            wait_for_checkpoint(job, index // 2 * 2)
            (Path(job["marks"]) / NODE_MAY_GO).touch()
            signal.pause()
        return replayed(self, index, path)

    def persist(self: Any, checkpoint: Any, name: str) -> Any:
        if name == KILLED_STATE and once(job, "state"):
            there = Path(self.build_checkpoint_path_from_name(name))
            there.mkdir(exist_ok=True)
            (there / "rank1.jsonl").write_text("half of a li")
            while not (there / "state.json").exists():  # the other worker's part is there
                time.sleep(0.02)
            wait_for_checkpoint(job, LAST_STATE)
            os.kill(os.getpid(), signal.SIGKILL)
        return persisted(self, checkpoint, name)

    if int(os.environ["RANK"]) != DOOMED:
        return train(job)
    with (
        patch.object(Replayer, "replay", replay),
        patch.object(StorageContext, "persist_current_checkpoint", persist),
    ):
        return train(job)


def wait_for_checkpoint(job: Mapping[str, Any], num_steps: int) -> None:
    """Ray Train counts a state when it has looked."""
    snapshot = Path(job["snapshot"])
    while not (snapshot.exists() and f"step-{num_steps:06d}" in snapshot.read_text()):
        time.sleep(0.02)


def hang(job: Mapping[str, Any]) -> int:
    """Say that it runs, and wait to be ended."""
    (Path(job["marks"]) / f"rank{os.environ['RANK']}-{os.getpid()}").touch()
    signal.pause()
    return 0
