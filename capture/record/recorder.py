"""Record the micro-batches that go through a model inside a training job: `capture.recordings.recording` opens it."""

import atexit
import multiprocessing.util
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from capture.file_format.folder_layout import find_ranks
from capture.file_format.listing import format_ranges
from capture.record.background_writer import BackgroundWriter, warn
from capture.record.call_arguments import ForwardHooks
from capture.record.host_copy import is_capturing_graph
from capture.record.job_facts import is_in_process_group, prepare_folder, read_rank_and_world_size
from capture.record.observer import JobPosition, Observer, TrainingPhase
from capture.record.optimizer_hooks import OptimizerHooks
from capture.record.parameter_sampler import RawSamples
from capture.record.pass_store import PassStore, RecordingEnded, WriterTask
from capture.record.retention import PassSelector, RetentionSettings
from capture.record.rng_and_outputs import describe_dtypes, find_outputs, sort_noted_values
from capture.record.snapshot import PassNotes, PassOutputs, RecordingClock, RecordingOpened, SnapshotMaker
from capture.record.step_window import StepPart, StepWindow

MAX_FLUSH_SECONDS = 60.0
_OPEN: "list[Recorder]" = []
_held: dict[str, Any] | None = None  # what was noted for the next pass while there is no recording; None: not held
MAX_SECONDS_FOR_OTHER_RANKS = 1.0  # that rank 0 waits at its end for the first file of another one


def note(**values: Any) -> None:
    """Call `Recorder.note` of each recording that is open in this process; without one, do nothing.

    So a job keeps the line, and is recorded by `capture run` or not.
    """
    for recorder in _OPEN:
        recorder.note(**values)


def note_next(**tensors: Any) -> None:
    """Call `Recorder.note_next` of each recording that is open in this process; without one, do nothing.

    Exception: while `capture run` searches for the model, what is noted goes to its first pass.
    """
    if not _OPEN and _held is not None:
        _held.update(tensors)
    for recorder in _OPEN:
        recorder.note_next(**tensors)


def hold_notes() -> None:
    """Begin to hold what `note_next` is given without a recording, until `take_held_notes`."""
    global _held
    _held = {}


def take_held_notes() -> dict[str, Any]:
    """Return what was noted, and hold no more."""
    global _held
    held, _held = _held, None
    return held or {}


def call_at_child_exit(action: Callable[[], object], *, order: int) -> None:
    """Call `action` when this process ends, if multiprocessing started it: that calls nothing of `atexit`.

    order  the highest comes first
    """
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, action, exitpriority=order)


class Recorder:
    """Records one model; made by `recording`.

    After `close`, num_seen = num_written + num_dropped + num_skipped + num_not_kept.

    num_seen     forwards of the model; a forward inside another one is part of it, and one inside a backward is a
                 checkpoint's re-run
    num_written  passes written
    num_dropped  passes lost: the disk was slow or failed, or the arguments were no micro-batch
    num_skipped  passes that cannot be replayed from their arguments: with a key-value cache of earlier tokens, and
                 forwards inside a CUDA graph capture
    not_recorded training passes among the skipped ones, by the reason
    num_not_kept passes that the settings leave out: by number, kind or limit, or because newer ones took their place
                 in the flight recorder
    failure      why recording stopped before `close`, or None
    refusal      why the first of the passes that are no micro-batch was dropped, or None
    rank, world_size  as of the latest pass
    hears_signals  False where the recording was opened outside the main thread: Python handles signals in that alone
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        *,
        keep: RetentionSettings,
        max_queued: int,
        names: Mapping[str, str],
        observer: Observer | None = None,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.num_seen = 0
        self.num_skipped = 0
        self.not_recorded: Counter[str] = Counter()
        self.rank, self.world_size = read_rank_and_world_size()
        self.position = JobPosition()
        self._observer = observer or Observer()
        self._is_in_group = False
        self._num_passed_over = 0
        self._is_closed = False
        self._process = os.getpid()
        self._taken: int | None = None  # the latest forward that was handed to the writer
        self._notes_of_next: PassNotes | None = None
        self._choice = PassSelector(keep)
        self._forward_hooks = ForwardHooks(self._pass_begins, self._pass_ends)
        self._optimizer_hooks = OptimizerHooks(self)
        is_urgent, clock = threading.Event(), RecordingClock()
        self.opened = clock.at(time.monotonic_ns())
        self._observer.on_open(self)
        self._store = PassStore(folder, keep, opened=self.opened, is_urgent=is_urgent, observer=self._observer)
        self._writer: BackgroundWriter[WriterTask] = BackgroundWriter(
            self._store.handle,
            max_queued=max_queued,
            rest=self._observer.on_idle,
            finish=self._finish,
            is_urgent=is_urgent,
            deadline=self._observer,
            when_late=self._observer.on_deadline,
        )
        atexit.register(self.close)
        call_at_child_exit(self.close, order=1)
        try:
            model_name = prepare_folder(folder, model)
            self._taker = SnapshotMaker(model, clock, model_name=model_name, reproduce=keep.reproduce, names=names)
            if self._taker.window is not None:
                self._taker.window.on_backward = self._backward_begins
            self._writer.tell(RecordingOpened(rank=self.rank, world_size=self.world_size))
        except Exception as error:  # the job is worth more than its record
            self._writer.stop(error)
            return
        _OPEN.append(self)
        self._observer.on_attach()
        self._forward_hooks.attach(model)
        if keep.reproduce:
            self._optimizer_hooks.attach()

    def _finish(self, failed: bool) -> None:
        try:
            self._store.finish(failed)
        finally:
            self._observer.on_end(failed)

    @property
    def num_written(self) -> int:
        return self._store.num_written

    @property
    def num_dropped(self) -> int:
        return self._writer.num_dropped + self._store.num_lost

    @property
    def hears_signals(self) -> bool:
        return self._observer.hears_signals

    @property
    def place(self) -> tuple[int, Path]:
        return self._store.place

    @property
    def num_not_kept(self) -> int:
        return self._num_passed_over + self._store.num_not_kept

    @property
    def failure(self) -> Exception | None:
        return self._writer.failure

    @property
    def refusal(self) -> str | None:
        return self._writer.refusal

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, GeneratorExit):
            self._observer.on_error(error, "loop")
        self.close()

    def note(self, *, loss: Any = None, grad_norm: Any = None, log_probs: Any = None, **tensors: Any) -> None:
        """Note what the job computed from the latest pass, or for it: on any device, without waiting for it.

        loss, grad_norm  one number each; a number that is not finite is an incident. A loss that is noted as a tensor
                         before its backward also tells what the pass weighs in the gradient
        log_probs        the log-probs of each row's actions
        tensors          what the job's loss needs beside the forward's arguments, by name: `advantages`,
                         `old_log_probs`, `ref_log_probs`, `rollout_log_probs`, `action_mask`, ... (docs/objectives.md):
                         a number, [rows], or [rows, tokens] that cover the last tokens of the rows

        What cannot be kept is one warning, and said in the capture.
        """
        if self._is_closed or self.failure is not None or not self.num_seen or os.getpid() != self._process:
            return
        try:
            outputs, plain = sort_noted_values({"noted_loss": loss, "grad_norm": grad_norm, "log_probs": log_probs})
            if outputs or plain:
                self._writer.tell(PassOutputs.of(self.num_seen - 1, outputs, plain))
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                forward = self.num_seen - 1
                self._watch_steps(lambda window: window.watch_loss(forward, loss))
            if tensors and self._taken == self.num_seen - 1:
                self._writer.tell(PassNotes.of(self.num_seen - 1, tensors))
        except Exception as error:  # the job is worth more than its record
            self._writer.stop(error)

    def note_next(self, **tensors: Any) -> None:
        """Note tensors for the pass that comes next, as `note` does for the latest."""
        if self._is_closed or self.failure is not None or os.getpid() != self._process:
            return
        try:
            came = PassNotes.of(self.num_seen, tensors)
            before = self._notes_of_next
            self._notes_of_next = came if before is None else before.joined(came)
        except Exception as error:  # the job is worth more than its record
            self._writer.stop(error)

    def flush(self, *, max_seconds: float = MAX_FLUSH_SECONDS) -> bool:
        """Wait until all that was handed over is done. Returns False if it took longer."""
        return self._writer.drain(max_seconds=max_seconds)

    def close(self) -> None:
        """Take the hooks off the model and wait for the files, up to a minute. A second call does nothing."""
        if self._is_closed or os.getpid() != self._process:  # a forked child has no writer thread
            return
        self._is_closed = True
        if self in _OPEN:
            _OPEN.remove(self)
        atexit.unregister(self.close)
        self._forward_hooks.remove()
        self._optimizer_hooks.remove()
        if (self.world_size > 1 and self.num_seen) or self.not_recorded:
            window = self._taker.window
            self._writer.tell(
                RecordingEnded(
                    num_passes=self.num_seen,
                    num_steps=None if window is None else window.number,
                    world_size=self.world_size,
                    place="after backward" if self.position.place == "in backward" else self.position.place,
                    opened=self.opened,
                    not_recorded=dict(self.not_recorded),
                )
            )
        self._writer.close(max_seconds=MAX_FLUSH_SECONDS)
        self._observer.on_close()
        if missing := self._missing_ranks():
            named = f"rank{'s' * (len(missing) > 1)} {format_ranges(missing)}"
            warn(
                f"capture: {self.folder} has nothing of {named} of the job's {self.world_size}. Ranks of other hosts "
                "have folders of their own; those of this one were started where no recording is opened"
            )
        if self.num_seen == 0 and self.failure is None:
            warn(
                "capture: the model was never called while it was recorded, so there are no files. Record what the job "
                "calls: its wrapper if there is one; calls of model.forward(...) and model.compile() bypass the hooks"
            )

    def _missing_ranks(self) -> list[int]:
        """List the ranks that should have recorded and have left nothing, on rank 0; others may be a moment behind."""
        if self.rank != 0 or self.world_size == 1 or not self.num_written:
            return []
        wanted = set(range(self.world_size)) & (self.keep.ranks or set(range(self.world_size)))
        deadline = time.monotonic() + MAX_SECONDS_FOR_OTHER_RANKS
        try:
            while (missing := wanted - find_ranks(self.folder)) and time.monotonic() < deadline:
                time.sleep(0.02)
        except OSError:
            return []
        return sorted(missing)

    def do_in_writer(self, action: Callable[[], None]) -> None:
        self._writer.tell(action, is_urgent=True)

    def write_held(self) -> list[Path]:
        return self._store.write_held()

    def commit(self) -> None:
        self._store.commit()

    def clips(self, parameters: Sequence[torch.Tensor], max_norm: Any, norm: Any) -> None:
        self._watch_steps(lambda window: window.clips(parameters, max_norm, norm))

    def clipped(self, norm: Any) -> None:
        self._watch_steps(lambda window: window.clipped(norm))

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        part = self._watch_steps(lambda window: window.steps(optimizer))
        if part is not None:
            self._writer.tell(part)
        if self._taker.window is not None and self._taker.window.has_stepped:
            self._move("in the optimizer's step")

    def stepped(self) -> None:
        if self.position.place == "in the optimizer's step":
            self._move("after the optimizer's step")

    def _backward_begins(self, forward: int) -> None:
        self.position.last_backward = forward
        if forward == self.position.forward and self.position.place == "after forward":
            self._move("in backward")

    def _move(self, place: TrainingPhase) -> None:
        self.position.place = place
        self._observer.on_move()

    def _watch_steps(self, look: Callable[[StepWindow], StepPart | None]) -> StepPart | None:
        """Call `look`, and give up optimizer steps if it fails: the passes are still recorded."""
        window = self._taker.window
        if window is None or self.failure is not None:
            return None
        try:
            return look(window)
        except Exception as error:  # the job is worth more than its record
            self._taker.window = None
            warn(f"capture: no optimizer steps are kept from here on: {type(error).__name__}: {error}")
            return None

    def _pass_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.num_seen += 1
        self.position.forward = self.num_seen - 1
        try:
            self._move("in forward")
            self._take(args, kwargs)
        except Exception as error:  # the job is worth more than its record
            self._writer.stop(error, num_lost=1)

    def _look_at_rank(self) -> None:
        """Look at the rank again: a job may join a process group after the recording was opened, or leave it."""
        self._is_in_group = is_in_process_group()
        self.rank, self.world_size = read_rank_and_world_size()

    def _pass_ends(self, output: Any, error: BaseException | None) -> None:
        if error is None:
            self._move("after forward")
        if self.failure is not None:
            return
        try:
            self._look_at_rank()
            if error is not None:
                self._end_broken_pass(error)
                return
            settings, weights = self._taker.end_pass()
            self._writer.rouse(self._outputs_of(output, settings, weights))
        except Exception as own:  # the job is worth more than its record
            self._writer.stop(own)

    def _end_broken_pass(self, error: BaseException) -> None:
        with suppress(Exception):  # the device may be lost: what was taken before goes to the disk
            settings, weights = self._taker.end_pass()
            self._writer.rouse(self._outputs_of(None, settings, weights))
        self._observer.on_error(error, "forward")

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.failure is not None:
            self._writer.drop()
            return
        notes, self._notes_of_next = self._notes_of_next, None
        if self.num_seen == 1 or is_in_process_group() != self._is_in_group:
            self._look_at_rank()
        rank, world_size = self.rank, self.world_size
        forward, trains = self.num_seen - 1, torch.is_grad_enabled()
        if trains:
            self._watch_steps(lambda window: window.begin_pass(forward))
        if not self._choice.takes(forward=forward, rank=rank, trains=trains) or self._store.is_full:
            self._num_passed_over += 1
            return
        taken = self._taker.take(args, kwargs, rank=rank, world_size=world_size, forward=forward, notes=notes)
        if isinstance(taken, str):
            self.num_skipped += 1
            self.not_recorded.update([taken] if trains else [])
        elif self._writer.offer(taken, taken.num_bytes):
            self._taken = forward

    def _outputs_of(self, output: Any, settings: Mapping[str, str], weights: RawSamples | None) -> PassOutputs | None:
        forward, outputs = self.num_seen - 1, find_outputs(output, with_rows=self.keep.reproduce)
        plain: dict[str, str] = {}
        if self.keep.reproduce:
            loss = outputs.get("loss")
            if loss is not None and torch.is_grad_enabled():
                self._watch_steps(lambda window: window.watch_loss(forward, loss))
            if (few := self._taker.log_probs_of(output)) is not None:
                outputs["token_log_probs"] = few
            plain = describe_dtypes(output, loss)
        if not (outputs or settings or weights) or is_capturing_graph(outputs):
            return None
        return PassOutputs.of(forward, outputs, plain, settings, weights)
