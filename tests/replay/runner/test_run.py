"""What one rank alone cannot run is refused on all, before anything is written."""

import threading

import pytest

from actor_init.spec import UsageError
from actor_init.world import World
from replay.options.resolved import ChosenBy, ResolvedChoice
from replay.options.spec import ReplaySpec
from replay.resolution.selection import Selection
from replay.runner import run
from tests.helpers import thread_ranks
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


@pytest.mark.parametrize(
    ("labels", "by", "loss", "num_selections"),
    [
        ([False, False], ChosenBy.JOB, "policy", 1),
        ([True, False], ChosenBy.JOB, "policy", 2),
        ([False, True], ChosenBy.JOB, "policy", 2),
        ([True, True], ChosenBy.TYPED, "policy", 1),
        ([True, True], ChosenBy.JOB, "sft", 1),
    ],
)
def test_inputs_are_selected_again_on_all_ranks_or_on_none(
    labels: list[bool], by: ChosenBy, loss: str, num_selections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels were counted before it was known that the job's loss is not theirs. A rank's first pass may have none."""
    monkeypatch.setattr(thread_ranks, "LIMIT", 60)
    ranks: list[int] = []
    rank_of_thread = threading.local()

    def select_on(spec: ReplaySpec, world: World) -> Selection:
        ranks.append(world.rank)
        rank_of_thread.rank = world.rank
        return SELECTION

    monkeypatch.setattr(run, "_select", select_on)
    monkeypatch.setattr(run, "_make_meter", lambda spec, world: None)
    monkeypatch.setattr(run, "read_first_call", lambda selection: None)
    monkeypatch.setattr(run, "choose_loss", lambda *_: ResolvedChoice(setting="measure.loss", value=loss, by=by))
    monkeypatch.setattr(run, "_has_labels", lambda call: labels[rank_of_thread.rank])
    monkeypatch.setattr(run, "_open_objective", lambda *_: None)
    monkeypatch.setattr(run, "resolve", lambda *_: None)
    results = call_on_ranks(lambda world: run._PreparedReplay.prepare(ReplaySpec(), world), [CPU, CPU])
    assert [type(result) for result in results] == [run._PreparedReplay] * 2
    assert sorted(ranks) == [0] * num_selections + [1] * num_selections
