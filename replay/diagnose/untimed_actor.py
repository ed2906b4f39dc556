"""Open an actor as for a replay, run micro-batches through it untimed, and close it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from actor_init.backends.protocol import Backend, free_closed, open_backend
from actor_init.model import ModelSource
from actor_init.spec import ActorSpec
from actor_init.world import World
from capture.file_format.micro_batch import MicroBatch
from replay.loss import negated_mean
from replay.runner.pass_runner import inputs_for
from replay.watch.progress import Phase, Tracker


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    backend: Backend
    spec: ActorSpec
    source: ModelSource
    world: World
    tracker: Tracker

    def passed(self, batch: MicroBatch, *, share: float = 1.0) -> float:
        """Run forward and backward on `batch` and return its loss; its gradient is multiplied by `share`."""
        self.tracker.begins(self.tracker.position.index + 1, batch.origin.source)
        self.tracker.has_read(batch.num_rows, batch.num_padded_tokens, batch.num_real_tokens)
        inputs = inputs_for(batch, self.spec, self.source, self.world)
        self.tracker.at(Phase.FORWARD)
        loss = negated_mean(self.backend.forward(inputs, trains=True), inputs)
        self.tracker.at(Phase.BACKWARD)
        self.backend.backward(loss * share)
        self.tracker.at(Phase.ENDING)
        return loss.item()


@contextmanager
def trial(spec: ActorSpec, source: ModelSource, world: World, tracker: Tracker) -> Iterator[Trial]:
    """Open a new actor with the weights of `source`."""
    free_closed()
    backend = open_backend(spec, source, world, lambda _: tracker.goes_on())
    try:
        yield Trial(backend=backend, spec=spec, source=source, world=world, tracker=tracker)
    finally:
        backend.close()
