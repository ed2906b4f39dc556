"""Record from many processes into one folder at once: `python -m tests.helpers.many_writers FOLDER NUM_RANKS PASSES`.

They are forked from this process, which has loaded torch; none begins before all are there. Prints what they wrote.
"""

import os
import sys
from pathlib import Path

import torch

from capture import recording
from tests.helpers.small_jobs import TinyModel

IDS_BS = torch.tensor([[0, 5, 9, 7], [3, 3, 0, 0]])


def main(folder: Path, num_ranks: int, num_passes: int) -> int:
    waiting, going = os.pipe()
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if not child:
            os.close(going)
            _write(folder, rank, num_ranks, num_passes, waiting)
        children.append(child)
    os.close(waiting)
    # Now all begin: their reads of the pipe end.
    os.close(going)
    return int(any(os.waitpid(child, 0)[1] for child in children))


def _write(folder: Path, rank: int, num_ranks: int, num_passes: int, waiting: int) -> None:
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        model = TinyModel()
        os.read(waiting, 1)
        with recording(model, folder, segment="1MB") as recorder:
            for step in range(num_passes):
                model((IDS_BS + step) % 16)
        code = int((recorder.num_written, recorder.num_dropped) != (num_passes, 0))
    finally:
        os._exit(code)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
