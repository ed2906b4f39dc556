"""Runs a list of replays in one world, one after the other: `python -m tests.helpers.replay_worker COMMANDS.json [TP]`.

COMMANDS.json is a list of lists of `replay` arguments. Starting a process for each would take longer than the replays.
"""

import json
import sys
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from actor_init.spec import ParallelSpec
from actor_init.world import World
from replay.cli import app, leave
from replay.runner.session import run_in

PATIENCE = ("--timeout", "3600")  # a machine under load is no hang


def graphs_alone() -> AbstractContextManager[Any]:
    """Let `--compile` make graphs, forward and backward, and run them without kernels, which take seconds each."""
    return patch.object(torch, "compile", partial(torch.compile, backend="aot_eager"))


def main() -> int:
    torch.set_num_threads(1)
    tp = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with World.from_env(ParallelSpec(tp=tp)) as world:
        codes = []
        for command in json.loads(Path(sys.argv[1]).read_text()):
            torch.compiler.reset()
            spec = app([*command, *PATIENCE], standalone_mode=False).args[0]
            codes.append(run_in(world, spec, show_traceback=True))
    return max(codes)


if __name__ == "__main__":
    leave(main())
