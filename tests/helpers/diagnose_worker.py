"""Diagnoses in one world, one after the other: `torchrun ... -m tests.helpers.diagnose_worker JOBS.json [TP [RING]]`.

JOBS.json is a list of {"arguments": [of replay diagnose], "fault": NAME}; NAME is one of FAULTS, or left out.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch

from actor_init.backends.fsdp2 import FSDP2Backend
from actor_init.spec import ParallelSpec
from actor_init.world import World
from replay.command_line.cli import leave, parse_command_line
from tests.helpers.sabotage import SABOTAGES
from tests.helpers.unproved_rows import rows_unproved


@contextmanager
def gradient_not_reduced(world: World) -> Iterator[None]:
    """Each data rank keeps its own gradient (deepspeed, ZeRO 0)."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    with patch.object(DeepSpeedEngine, "allreduce_gradients", lambda *_, **__: None):
        yield


@contextmanager
def gradient_summed(world: World) -> Iterator[None]:
    """The data ranks' gradients are added up, and not averaged (fsdp2)."""
    backward = FSDP2Backend.backward
    with patch.object(FSDP2Backend, "backward", lambda self, loss: backward(self, loss * world.num_data_ranks)):
        yield


FAULTS: Mapping[str, Callable[[World], AbstractContextManager[None]]] = {
    **SABOTAGES,
    "gradient_not_reduced": gradient_not_reduced,
    "gradient_summed": gradient_summed,
}


def main() -> int:
    torch.set_num_threads(1)
    tp, ring = (int(text) for text in [*sys.argv[2:], "1", "1"][:2])
    with World.from_env(ParallelSpec(tp=tp, ring=ring)) as world:
        for job in json.loads(Path(sys.argv[1]).read_text()):
            with ExitStack() as stack:
                stack.enter_context(
                    patch("replay.commands.diagnose.report.World.from_env", lambda _: nullcontext(world))
                )
                if "fault" in job:
                    stack.enter_context(rows_unproved())
                    stack.enter_context(FAULTS[job["fault"]](world))
                parse_command_line(["diagnose", *job["arguments"]])()
    return 0


if __name__ == "__main__":
    leave(main())
