"""Replays in one world, each with or without a fault: `python -m tests.helpers.fault_worker JOBS.json [TP [RING]]`.

JOBS.json is a list of {"job": of a child, as JSON, "fault": NAME of tests.helpers.faults or ""}. With "compare": FILE,
the first pass is also recorded by torch's DebugMode with hashes of all tensors, and FILE gets what torch says of it
beside the job before: the number of different hashes, or why the two cannot be compared.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._debug_mode import DebugMode

from actor_init.spec import ParallelSpec
from actor_init.world import World
from replay.command_line.cli import leave
from replay.processes.child_job import ChildJob
from replay.runner.replayer import Replayer
from replay.runner.run import run_in
from tests.helpers.faults import FAULTS
from tests.helpers.more_faults import MORE_FAULTS
from tests.helpers.unproved_rows import rows_unproved

ALL = {**FAULTS, **MORE_FAULTS}


def recorded(into: list[Any]) -> Any:
    """The first pass under DebugMode; `into` gets its operations."""
    measured = Replayer.run_micro_batch

    def watched(self: Replayer, *args: Any) -> Any:
        if into:
            return measured(self, *args)
        with DebugMode() as mode, DebugMode.log_tensor_hashes():
            found = measured(self, *args)
        into.extend(mode.logs)
        return found

    return patch.object(Replayer, "run_micro_batch", watched)


def said(before: list[Any], after: list[Any]) -> str:
    try:
        mismatches = DebugMode.check_hash_mismatches(before, after)
    except ValueError as error:
        return str(error)
    return str(len(mismatches))


def main() -> int:
    torch.set_num_threads(1)
    tp, ring = (int(text) for text in [*sys.argv[2:], "1", "1"][:2])
    codes = []
    logs: list[Any] = []
    with World.from_env(ParallelSpec(tp=tp, ring=ring)) as world:
        for job in json.loads(Path(sys.argv[1]).read_text()):
            torch.compiler.reset()
            torch.manual_seed(0)
            spec = ChildJob.parse(job["job"], source="a job").spec
            before, logs = logs, []
            with ExitStack() as stack:
                if job["fault"]:
                    stack.enter_context(rows_unproved())
                    stack.enter_context(ALL[job["fault"]].breaks(world))
                if "compare" in job:
                    stack.enter_context(recorded(logs))
                codes.append(run_in(world, spec, show_traceback=True).exit_code)
            if "compare" in job:
                answers = world.gather(said(before, logs))
                Path(job["compare"]).write_text(json.dumps(answers))
    return max(codes)


if __name__ == "__main__":
    leave(main())
