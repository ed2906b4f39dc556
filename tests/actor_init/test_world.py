"""What a launcher started is held against what the machine has."""

import pytest
import torch

from actor_init.spec import ParallelSpec, UsageError
from actor_init.world import World


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


def test_a_single_process_is_its_own_world(world: World) -> None:
    assert (world.rank, world.world_size, world.data_rank, world.num_data_ranks) == (0, 1, 0, 1)
    assert world.gather("here") == ["here"]
    assert world.from_first(7) == 7
