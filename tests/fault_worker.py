"""Replays in one world, each with or without a fault: `python -m tests.fault_worker JOBS.json [TP [RING]]`.

JOBS.json is a list of {"arguments": [of replay], "fault": NAME of tests.faults or ""}. A replay that breaks off ends
the worker.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from actor_init.spec import ParallelSpec
from actor_init.world import World
from replay.cli import app, leave
from replay.session import run_in
from tests.faults import FAULTS


def main() -> int:
    torch.set_num_threads(1)
    tp, ring = (int(text) for text in [*sys.argv[2:], "1", "1"][:2])
    codes = []
    with World.from_env(ParallelSpec(tp=tp, ring=ring)) as world:
        for job in json.loads(Path(sys.argv[1]).read_text()):
            torch.compiler.reset()
            torch.manual_seed(0)
            spec = app(job["arguments"], standalone_mode=False).args[0]
            with FAULTS[job["fault"]].breaks(world) if job["fault"] else nullcontext():
                codes.append(run_in(world, spec, show_traceback=True))
    return max(codes)


if __name__ == "__main__":
    leave(main())
