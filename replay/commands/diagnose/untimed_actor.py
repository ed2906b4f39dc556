"""Open an actor as for a replay, run accumulation windows through it untimed, and close it.

The micro-batches are captured ones, or rows and documents selected from them.

Shape letters: B rows, S tokens a row, A trailing tokens a row with an action mask, L tokens of one document.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from actor_init.backends.protocol import Backend, free_closed_backends, open_backend
from actor_init.inputs.documents import find_documents
from actor_init.model import ModelSource
from actor_init.spec import ActorSpec
from actor_init.world import World
from capture.file_format.micro_batch import IGNORED_LABEL, MicroBatch
from replay.objective.objective import compute_negated_mean
from replay.runner.observers import PhaseReporter
from replay.runner.run_pass import PassInputs, PassObserver, StepTiming, WindowEnd, prepare_actor_inputs, run_pass
from replay.watch.progress import Tracker


def select_rows(batch: MicroBatch, rows: Sequence[int]) -> MicroBatch:
    """Return the given rows of `batch`, in that order; a row may be repeated.

    Documents within a row are kept apart by restarting position ids. Raises CaptureError if they cannot be.
    """
    documents, real_BS = find_documents(batch), batch.attention_mask_BS
    position_BS = torch.where(real_BS, documents.position_BS, 0)
    if documents.has_shared_rows:
        position_BS[real_BS] = documents.compute_restarting_positions(real_BS, batch.origin.source)
    index = torch.tensor(rows)
    return replace(
        batch,
        sequences_BS=batch.sequences_BS[index],
        attention_mask_BS=real_BS[index],
        action_mask_BA=None if batch.action_mask_BA is None else batch.action_mask_BA[index],
        labels_BS=None if batch.labels_BS is None else batch.labels_BS[index],
        extra_tensors={"position_ids": position_BS[index]},
    )


def split_documents(batch: MicroBatch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each document's token ids, position ids and labels [1, L], without padding, labels as Hugging Face takes
    them.

    Labels are not shifted, and -100 where there is no action token. They are derived from the micro-batch rather than
    from the actor's inputs, so that they can be compared with the actor.
    """
    is_first_BS, position_BS = (documents := find_documents(batch)).is_first_BS, documents.position_BS
    label_BS = _derive_labels(batch)
    for row in range(batch.num_rows):
        token_R = batch.attention_mask_BS[row].nonzero().flatten()
        borders = [*is_first_BS[row, token_R].nonzero().flatten().tolist(), len(token_R)]
        for begin, end in pairwise(borders):
            token_L = token_R[begin:end]
            yield batch.sequences_BS[row, token_L][None], position_BS[row, token_L][None], label_BS[row, token_L][None]


def _derive_labels(batch: MicroBatch) -> Tensor:
    """Return labels [B, S]: the action mask selects, else the labels, else every token. The target is the label or
    token.
    """
    captured_BS = batch.labels_BS
    labelled_BS = torch.ones_like(batch.attention_mask_BS) if captured_BS is None else captured_BS != IGNORED_LABEL
    target_BS = batch.sequences_BS if captured_BS is None else torch.where(labelled_BS, captured_BS, batch.sequences_BS)
    counts_BS = labelled_BS
    if batch.action_mask_BA is not None:
        num_tokens, num_actions = batch.sequences_BS.shape[1], batch.action_mask_BA.shape[1]
        counts_BS = F.pad(batch.action_mask_BA, (num_tokens - num_actions, 0))
    return target_BS.masked_fill(~(counts_BS & batch.attention_mask_BS), IGNORED_LABEL)


ReadT = TypeVar("ReadT")
Gradients = Iterator[tuple[str, Tensor]]


class _GradientReader(PassObserver, Generic[ReadT]):
    """Calls `read` with the gradients of a window before its end clears them."""

    def __init__(self, backend: Backend, read: Callable[[Gradients], ReadT]) -> None:
        self.results: list[ReadT] = []
        self._backend = backend
        self._read = read

    def after_backward(self) -> None:
        self.results.append(self._read(self._backend.gradients()))


@dataclass(frozen=True, kw_only=True, slots=True)
class UntimedActor:
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
        reader = _GradientReader(self.backend, read)
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
        assert self.spec.resolved_grad_accumulation == len(batches)
        losses = []
        for number, (batch, share) in enumerate(zip(batches, shares or [1.0] * len(batches), strict=True), 1):
            is_last = number == len(batches)
            self.tracker.begin_pass(self.tracker.position.index + 1, batch.origin.source)
            self.tracker.set_shapes(batch.num_rows, batch.num_padded_tokens, batch.num_real_tokens)
            actor_inputs = prepare_actor_inputs(batch, self.spec, self.source, self.world)
            inputs = PassInputs(
                actor_inputs=actor_inputs,
                compute_loss=partial(compute_negated_mean, inputs=actor_inputs),
                train_mode=True,
                builds_graph=True,
                runs_backward=True,
                loss_weight=share,
                window_end=WindowEnd.COMPLETE if is_last else WindowEnd.NONE,
                step_timing=StepTiming.MEASURED if is_last and steps else StepTiming.NONE,
                captured_row_length=batch.sequences_BS.shape[1],
            )
            observers = [PhaseReporter(self.tracker), *([reader] if reader is not None and is_last else [])]
            losses.append(run_pass(self.backend, inputs, observers=observers).loss.item())
        return losses


@contextmanager
def open_untimed_actor(spec: ActorSpec, source: ModelSource, world: World, tracker: Tracker) -> Iterator[UntimedActor]:
    """Open a new actor with the weights of `source`."""
    free_closed_backends()
    backend = open_backend(spec, source, world, lambda _: tracker.report_progress())
    try:
        yield UntimedActor(backend=backend, spec=spec, source=source, world=world, tracker=tracker)
    finally:
        backend.close()
