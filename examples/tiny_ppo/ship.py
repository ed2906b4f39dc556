"""Copy what train.py recorded, without what a replay of it has no use for: so is inputs/sample made.

    python examples/tiny_ppo/ship.py inputs/my-run inputs/sample

Left out are manifests, and the random states of each pass, a quarter of its file: the model draws no random numbers,
and Python's and NumPy's generators, which are not seeded, are in other states each time.
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from capture import capture_files
from capture.file_format.capture_file import read_call


def ship(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path in capture_files(source):
        written = replace(read_call(path), random={}, random_after={}).write(target)
        assert written.name == path.name
    for pattern in ("actor.json", "model_rank*.json"):
        for path in source.glob(pattern):
            shutil.copy(path, target)


if __name__ == "__main__":
    ship(Path(sys.argv[1]), Path(sys.argv[2]))
