"""What a launcher started is held against what the machine has."""

import os
from contextlib import nullcontext

import pytest
import torch

from actor_init.spec import ParallelSpec, UsageError
from actor_init.world import World, compute_on_rank0, try_on_all_ranks
from tests.helpers.thread_ranks import CPU, call_on_ranks


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with (
        pytest.raises(UsageError, match=r"3 processes .* 2 GPUs\. Try: deepspeed --num_gpus=2"),
        World.from_env(ParallelSpec()),
    ):
        pass


@pytest.mark.parametrize("tp", [1, 2])
def test_a_process_that_no_launcher_started_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    """Accelerate takes a process with LOCAL_RANK for one of several; DeepSpeed needs it. With tp 2 it is refused."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    expected_error = pytest.raises(UsageError, match="1 processes were started") if tp == 2 else nullcontext()
    with expected_error, World.from_env(ParallelSpec(tp=tp)):
        assert os.environ["LOCAL_RANK"] == "0"
    assert "LOCAL_RANK" not in os.environ


def test_a_launchers_local_rank_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with World.from_env(ParallelSpec()):
        pass
    assert os.environ["LOCAL_RANK"] == "0"


def test_a_single_process_is_its_own_world(world: World) -> None:
    assert (world.rank, world.world_size, world.data_rank, world.num_data_ranks) == (0, 1, 0, 1)
    assert world.gather("here") == ["here"]
    assert world.broadcast_from_rank0(7) == 7


def test_what_the_first_rank_refuses_is_raised_on_the_others_which_decide_nothing() -> None:
    decided_on: list[int] = []

    def refuse(world: World) -> None:
        decided_on.append(world.rank)
        raise UsageError("--routing recorded needs routes of experts")

    results = call_on_ranks(lambda world: compute_on_rank0(world, lambda: refuse(world)), [CPU, CPU])
    assert decided_on == [0]
    assert [(type(result), str(result)) for result in results] == [
        (UsageError, "--routing recorded needs routes of experts")
    ] * 2


@pytest.mark.parametrize(
    ("refusing_ranks", "says"),
    [
        ((1,), ["on rank 1: no file 1"] * 3),
        # The first of several is named.
        ((1, 2), ["on rank 1: no file 1"] * 3),
        ((0, 2), ["on rank 0: no file 0"] * 3),
        ((0, 1, 2), ["no file 0", "no file 1", "no file 2"]),
        ((), ["its model"] * 3),
    ],
)
def test_what_any_rank_refuses_is_raised_on_all_with_its_number_unless_all_refuse(
    refusing_ranks: tuple[int, ...], says: list[str]
) -> None:
    def find(world: World) -> str:
        if world.rank in refusing_ranks:
            raise UsageError(f"no file {world.rank}")
        return "its model"

    results = call_on_ranks(lambda world: try_on_all_ranks(world, lambda: find(world)), [CPU] * 3)
    assert [str(result) for result in results] == says
    assert all(isinstance(result, UsageError) for result in results) is bool(refusing_ranks)
