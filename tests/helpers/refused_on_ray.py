"""Run a command on a local Ray cluster, whose rank refuses what was typed.

`python -m tests.helpers.refused_on_ray LOGS`
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from actor_init.spec import ParallelSpec
from replay.on_ray.command import RayOptions
from replay.on_ray.launch import run_on_ray


def refuse(arguments: Sequence[str]) -> int:
    """Refuse, in the place of `replay.cli.main`."""
    print(f"replay: {arguments[0]} is not allowed", file=sys.stderr)
    return 2


if __name__ == "__main__":
    logs = Path(sys.argv[1])
    sys.exit(run_on_ray(refuse, ["--this"], RayOptions(address=None), parallel=ParallelSpec(), log_folder=logs))
