"""Feed rows as asked: a fault is to show in a run's numbers, and not to the packing probe before it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from transformers import PretrainedConfig

from actor_init.model_form import Layout
from actor_init.spec import ActorSpec
from actor_init.world import World


@contextmanager
def rows_unproved() -> Iterator[None]:
    with ExitStack() as stack:
        for user in ("replay.resolution.resolve", "replay.commands.diagnose.report"):
            stack.enter_context(patch(f"{user}.choose_layout", _as_asked))
        yield


def _as_asked(
    spec: ActorSpec, config: PretrainedConfig, world: World, *, is_typed: bool, trains: bool = True
) -> tuple[ActorSpec, Layout]:
    return spec, Layout(packs=spec.packs)
