"""What one rank alone cannot run is refused on all, before anything is written."""

import pytest

from actor_init.spec import UsageError
from actor_init.world import World
from replay.options.spec import ReplaySpec
from replay.resolution.selection import Selection
from replay.runner import run
from tests.helpers.thread_ranks import CPU, call_on_ranks

SELECTION = Selection(inputs=[], num_left_out_passes=0, num_left_over=0, damaged=[], dealing="")


def test_inputs_that_one_rank_lacks_are_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def select_on(spec: ReplaySpec, world: World) -> Selection:
        if world.rank == 1:
            raise UsageError("--inputs is no folder")
        return SELECTION

    monkeypatch.setattr(run, "_select", select_on)
    results = call_on_ranks(lambda world: run._PreparedReplay.prepare(ReplaySpec(), world), [CPU, CPU])
    says = "on rank 1: --inputs is no folder"
    assert [(type(result), str(result)) for result in results] == [(UsageError, says)] * 2
