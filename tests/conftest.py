"""One process group for all replays that tests run in their own process."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from actor_init.spec import ParallelSpec
from actor_init.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    with World.from_env(ParallelSpec()) as world:
        yield world


@pytest.fixture
def one_world(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed keeps its process groups for good, so a second group in one process would be none of its own."""
    monkeypatch.setattr("replay.session.World.from_env", lambda _: nullcontext(world))
