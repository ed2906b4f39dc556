"""Open an actor as for a replay, run accumulation windows through it untimed, and close it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from torch import Tensor

from actor_init.backends.protocol import Backend, free_closed, open_backend
from actor_init.model import ModelSource
from actor_init.spec import ActorSpec
from actor_init.world import World
from capture.file_format.micro_batch import MicroBatch
from replay.options.loss import negated_mean
from replay.runner.observers import PositionMarker
from replay.runner.run_pass import PassInputs, PassObserver, inputs_for, run_pass
from replay.watch.progress import Tracker

ReadT = TypeVar("ReadT")
Gradients = Iterator[tuple[str, Tensor]]


class _Reader(PassObserver, Generic[ReadT]):
    """Calls `read` with the gradients of a window before its end clears them."""

    def __init__(self, backend: Backend, read: Callable[[Gradients], ReadT]) -> None:
        self.results: list[ReadT] = []
        self._backend = backend
        self._read = read

    def after_backward(self) -> None:
        self.results.append(self._read(self._backend.gradients()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    backend: Backend
    spec: ActorSpec
    source: ModelSource
    world: World
    tracker: Tracker

    def read_gradients(
        self, batches: Sequence[MicroBatch], read: Callable[[Gradients], ReadT], *, shares: Sequence[float] = ()
    ) -> tuple[list[float], ReadT]:
        """Run one accumulation window over `batches`, without a step.

        shares  factors on the loss of each pass in its backward; empty: 1 each

        Returns the loss of each pass, and what `read` made of the window's gradients. All ranks must call this.
        """
        reader = _Reader(self.backend, read)
        return self._run(batches, shares, reader=reader), reader.results[0]

    def train(self, batches: Sequence[MicroBatch], *, steps: bool) -> list[float]:
        """Run one accumulation window over `batches`, with a step if `steps`, and return the loss of each pass."""
        return self._run(batches, (), steps=steps)

    def _run(
        self,
        batches: Sequence[MicroBatch],
        shares: Sequence[float],
        *,
        steps: bool = False,
        reader: PassObserver | None = None,
    ) -> list[float]:
        assert self.spec.num_accumulated == len(batches)
        losses = []
        for number, (batch, share) in enumerate(zip(batches, shares or [1.0] * len(batches), strict=True), 1):
            ends_window = number == len(batches)
            self.tracker.begins(self.tracker.position.index + 1, batch.origin.source)
            self.tracker.has_read(batch.num_rows, batch.num_padded_tokens, batch.num_real_tokens)
            fed = inputs_for(batch, self.spec, self.source, self.world)
            inputs = PassInputs(
                fed=fed,
                loss_of=partial(negated_mean, inputs=fed),
                trains=True,
                autograd=True,
                backward=True,
                weight=share,
                ends_window=ends_window,
                steps=ends_window and steps,
                num_columns=batch.sequences_BS.shape[1],
            )
            observers = [PositionMarker(self.tracker), *([reader] if reader is not None and ends_window else [])]
            losses.append(run_pass(self.backend, inputs, observers=observers).loss.item())
        return losses


@contextmanager
def trial(spec: ActorSpec, source: ModelSource, world: World, tracker: Tracker) -> Iterator[Trial]:
    """Open a new actor with the weights of `source`."""
    free_closed()
    backend = open_backend(spec, source, world, lambda _: tracker.goes_on())
    try:
        yield Trial(backend=backend, spec=spec, source=source, world=world, tracker=tracker)
    finally:
        backend.close()
