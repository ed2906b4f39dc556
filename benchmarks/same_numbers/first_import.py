"""Import before anything else in each process of a tree: seed torch, and write down the way of each rank.

torch seeds each process by chance, which decides masks of dropout where the job's random states are not known. The way
of a rank is its phases in their order, each with the collectives that the rank had entered when it began, by process
group.
"""

import json
from collections.abc import Callable

import torch

from replay.watch.progress import RankPosition, Tracker


def _write_way(move: Callable[[Tracker, RankPosition], None]) -> Callable[[Tracker, RankPosition], None]:
    """Return `move` with a line for each border, in `rank<k>.way.jsonl` beside the position of the rank."""

    def moved(tracker: Tracker, position: RankPosition) -> None:
        move(tracker, position)
        line = {"index": position.index, "phase": position.phase, "collectives": dict(tracker._count_collectives())}
        with tracker._file_path.with_suffix("").with_suffix(".way.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    return moved


torch.manual_seed(0)
type.__setattr__(Tracker, "_move", _write_way(Tracker._move))
