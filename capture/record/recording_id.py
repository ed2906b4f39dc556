"""Give a recording an id that is the same on all ranks of a job, and another one in each recording."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from capture.record.job_facts import is_in_process_group

# How often this process agreed on an id of a recording into a folder of this name.
_num_agreed: Counter[str] = Counter()


def choose_recording_id(
    opened: str,
    folder: Path,
    *,
    rank: int,
    world_size: int,
    store: Any = None,
    num_agreed: Counter[str] = _num_agreed,
) -> str:
    """Return when the recording began by the clock of the rank whose first pass came first; it is the recording's id.

    The ranks agree on it through the store of their process group: each offers its own time under one key, and the
    first offer stays. That is one question to the store, and no rank waits for another one. A job that is started again
    has another store. Without a process group of several ranks, or where its store does not answer, a rank has an id
    that names the rank.

    opened      when this rank opened its recording, ISO 8601
    store       what the ranks agree through; None: the store of the process group, if there is one
    num_agreed  how often this process agreed on an id, by the folder's name; counted on
    """
    if world_size == 1 and rank == 0:
        return opened
    if store is not None or is_in_process_group():
        num_agreed[folder.name] += 1
        key = f"micro-replay/recording/{folder.name}/{num_agreed[folder.name]}"
        try:
            if store is None:
                store = torch.distributed.distributed_c10d._get_default_store()
            return str(store.compare_set(key, "", opened).decode())
        except Exception:
            # A store of another kind, or one that is gone. The reader puts such ranks together.
            pass
    return f"{opened} of rank {rank}"
