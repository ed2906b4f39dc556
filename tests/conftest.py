"""One process group for all replays that tests run in their own process, and one thread for each process."""

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from actor_init.spec import ParallelSpec
from actor_init.world import World

torch.set_num_threads(1)  # processes share the cores, and more threads than cores wait for each other
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # compiles where it is asked, without worker processes

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # a shell starts what it puts in the background so, for all below it
        signal.signal(number, usual)


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    with World.from_env(ParallelSpec()) as world:
        yield world


@pytest.fixture
def one_world(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed keeps its process groups for good, so a second group in one process would be none of its own."""
    monkeypatch.setattr("replay.session.World.from_env", lambda _: nullcontext(world))
