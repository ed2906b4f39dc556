"""Record the micro-batches that go through a model inside a training job: `capture.recordings.recording` opens it."""

import atexit
import multiprocessing.util
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from capture.file_format.folder_layout import find_ranks
from capture.file_format.listing import format_ranges
from capture.record.background_writer import BackgroundWriter, warn
from capture.record.forward_hooks import ForwardHooks
from capture.record.generator_marks import GeneratorSnapshot
from capture.record.host_copy import is_capturing_graph
from capture.record.job_facts import is_in_process_group, prepare_folder, read_rank_and_world_size
from capture.record.logit_gradient import watch_logits
from capture.record.observer import JobPosition, RecordingObserver, TrainingPhase
from capture.record.optimizer_hooks import OptimizerHooks, OtherRule
from capture.record.outputs import (
    describe_loss_function,
    describe_outputs,
    find_outputs,
    sort_noted_values,
)
from capture.record.pass_store import PassStore, RecordingEnded, SkippedPasses, WriterItem
from capture.record.recording_id import choose_recording_id
from capture.record.retention import PassSelector, RetentionSettings
from capture.record.route_recorder import RouteRecorder
from capture.record.snapshot import PassEnd, PassNotes, PassOutputs, RecordingClock, RecordingOpened, SnapshotMaker
from capture.record.step_window import StepPart, StepWindow

MAX_FLUSH_SECONDS = 60.0
# How long rank 0 waits at its end for the first file of each other rank.
MAX_SECONDS_FOR_OTHER_RANKS = 1.0

_open_recorders: "list[Recorder]" = []
# What was noted for the next pass while there is no recording; None while such notes are not held.
_held_notes: dict[str, Any] | None = None


def note(**values: Any) -> None:
    """Call `Recorder.note` of each recording that is open in this process; without one, do nothing.

    So a job can keep the line whether `capture run` records it or not.
    """
    for recorder in _open_recorders:
        recorder.note(**values)


def note_next(**tensors: Any) -> None:
    """Call `Recorder.note_next` of each recording that is open in this process; without one, do nothing.

    But while `capture run` searches for the model, what is noted goes to its first pass.
    """
    if not _open_recorders and _held_notes is not None:
        _held_notes.update(tensors)
    for recorder in _open_recorders:
        recorder.note_next(**tensors)


def hold_notes() -> None:
    """Begin to hold what `note_next` is given without a recording, until `take_held_notes`."""
    global _held_notes
    _held_notes = {}


def take_held_notes() -> dict[str, Any]:
    """Return the held notes, and hold no more."""
    global _held_notes
    notes, _held_notes = _held_notes, None
    return notes or {}


def call_at_child_exit(action: Callable[[], object], *, priority: int) -> None:
    """Call `action` when this process ends, if multiprocessing started it: such a process calls nothing of `atexit`.

    priority  the action with the highest one is called first
    """
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, action, exitpriority=priority)


class Recorder:
    """Records one model; made by `recording`.

    The job is worth more than its record: whatever the recorder raises stops the recording, and never reaches the job.

    After `close`, num_seen = num_written + num_dropped + num_skipped + num_not_kept.

    num_seen     forwards of the model; a forward inside another one is part of it, and one inside a backward repeats
                 a part for activation checkpointing
    num_written  passes written
    num_dropped  passes lost: the disk was slow or failed, or hung until `close` gave up, or the arguments were no
                 micro-batch, or their copy from the device failed
    num_skipped  passes that cannot be replayed from their arguments: with a key-value cache of earlier tokens, and
                 forwards inside a CUDA graph capture
    not_recorded numbers of training passes among the skipped ones, by the reason
    num_unseen_steps  steps that the model's optimizer took without a forward of the model since the step before
    num_not_kept passes that the settings leave out: by number, kind or limit, or because newer ones took their place
                 in the flight recorder
    failure      why recording stopped before `close`, or None
    refusal      why the first pass was dropped whose arguments or their copy were at fault, or None
    rank, world_size  as of the latest pass
    handles_signals   False where the recording was opened outside the main thread: Python handles signals only there
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        *,
        retention: RetentionSettings,
        max_queued: int,
        names: Mapping[str, str],
        observer: RecordingObserver | None = None,
    ) -> None:
        self.folder = folder
        self.retention = retention
        self.num_seen = 0
        self._skipped = SkippedPasses()
        self.num_unseen_steps = 0
        self.rank, self.world_size = read_rank_and_world_size()
        self.position = JobPosition()
        self._observer = observer or RecordingObserver()
        self._was_in_process_group = False
        self._num_not_selected = 0
        self._is_closed = False
        self._unseen_after: int | None = None
        self._process_id = os.getpid()
        self._has_pair_masks = False
        # The running pass, as long as the window of optimizer steps does not know of it.
        self._pass_for_window: int | None = None
        self._last_queued_forward: int | None = None
        self._next_notes: PassNotes | None = None
        self._selector = PassSelector(retention)
        self._forward_hooks = ForwardHooks(self._begin_pass, self._end_pass)
        self._optimizer_hooks = OptimizerHooks(self)
        self._route_recorder = RouteRecorder()
        flush_requested, clock = threading.Event(), RecordingClock()
        self.opened = clock.format_time(time.monotonic_ns())
        self._observer.on_open(self)
        self._store = PassStore(
            folder, retention, opened=self.opened, flush_requested=flush_requested, observer=self._observer
        )
        self._writer: BackgroundWriter[WriterItem] = BackgroundWriter(
            self._store.handle,
            max_queued=max_queued,
            on_idle=self._observer.on_idle,
            on_end=self._finish_writing,
            flush_requested=flush_requested,
            deadline=self._observer,
            on_deadline=self._observer.on_deadline,
        )
        atexit.register(self.close)
        call_at_child_exit(self.close, priority=1)
        # The hooks come last: if the folder cannot be made, or anything else fails, the job runs as if not recorded.
        try:
            model_name = prepare_folder(folder, model)
            self._maker = SnapshotMaker(model, clock, model_name=model_name, reproduce=retention.reproduce, names=names)
            if self._maker.window is not None:
                self._maker.window.on_backward = self._begin_backward
            self._writer.queue_small_item(RecordingOpened(rank=self.rank, world_size=self.world_size))
        except Exception as error:
            self._writer.give_up(error)
            return
        _open_recorders.append(self)
        self._observer.on_attach()
        self._forward_hooks.attach(model)
        if retention.reproduce:
            self._optimizer_hooks.attach()
        if retention.reproduce and retention.routes:
            self._route_recorder.attach(model)

    def _finish_writing(self, failed: bool) -> None:
        try:
            self._store.finish(failed)
        finally:
            self._observer.on_end(failed)

    @property
    def num_written(self) -> int:
        return self._store.num_written

    @property
    def num_skipped(self) -> int:
        return self._skipped.count + self._store.skipped.count

    @property
    def not_recorded(self) -> Counter[str]:
        return self._skipped.by_reason + self._store.skipped.by_reason

    @property
    def num_dropped(self) -> int:
        # Where the writer's thread hangs, what it has not written by the end is lost, until it has.
        num_held = self._store.num_held if self._is_closed else 0
        return self._writer.num_dropped + self._store.num_lost + num_held

    @property
    def handles_signals(self) -> bool:
        return self._observer.handles_signals

    @property
    def rank_and_folder(self) -> tuple[int, Path]:
        return self._store.rank_and_folder

    @property
    def num_not_kept(self) -> int:
        return self._num_not_selected + self._store.num_not_kept

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

        What cannot be kept is one warning, and listed in the capture.
        """
        if self._is_closed or self.failure is not None or not self.num_seen or os.getpid() != self._process_id:
            return
        try:
            forward = self.num_seen - 1
            outputs, plain = sort_noted_values({"noted_loss": loss, "grad_norm": grad_norm, "log_probs": log_probs})
            if self.retention.reproduce:
                plain |= describe_loss_function(loss)
            if outputs or plain:
                self._writer.queue_small_item(PassOutputs.begin_copy(forward, outputs, plain))
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self._update_window(lambda window: window.watch_loss(forward, loss))
            if tensors and self._last_queued_forward == forward:
                self._writer.queue_small_item(PassNotes.begin_copy(forward, tensors))
        except Exception as error:
            self._writer.give_up(error)

    def _note_targets(self, forward: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note what the gradient of a pass's logits tells, in the job's backward. A pass that is gone gets nothing."""
        if self._is_closed or self.failure is not None or self._last_queued_forward != forward:
            return
        self._writer.queue_small_item(PassNotes.begin_copy(forward, tensors))

    def note_next(self, **tensors: Any) -> None:
        """Note tensors for the pass that comes next, as `note` does for the latest."""
        if self._is_closed or self.failure is not None or os.getpid() != self._process_id:
            return
        try:
            notes, earlier_notes = PassNotes.begin_copy(self.num_seen, tensors), self._next_notes
            self._next_notes = notes if earlier_notes is None else earlier_notes.merge(notes)
        except Exception as error:
            self._writer.give_up(error)

    def flush(self, *, max_seconds: float = MAX_FLUSH_SECONDS) -> bool:
        """Wait until all that was handed to the writer's thread is handled. Returns False if it took longer."""
        return self._writer.drain(max_seconds=max_seconds)

    def close(self, *, max_seconds: float = MAX_FLUSH_SECONDS) -> None:
        """Take the hooks off the model and wait for the files, `max_seconds` at most. A second call does nothing."""
        # A forked child has no writer's thread to wait for.
        if self._is_closed or os.getpid() != self._process_id:
            return
        self._is_closed = True
        if self in _open_recorders:
            _open_recorders.remove(self)
        atexit.unregister(self.close)
        self._forward_hooks.remove()
        self._optimizer_hooks.remove()
        self._route_recorder.remove()
        # After a failure nothing is written, and what makes snapshots may never have been made.
        if self.failure is None:
            self._queue_end()
        self._writer.close(max_seconds=max_seconds)
        self._observer.on_close()
        if missing_ranks := self._find_missing_ranks():
            ranks = f"rank{'s' * (len(missing_ranks) > 1)} {format_ranges(missing_ranks)}"
            warn(
                f"capture: {self.folder} has nothing of {ranks} of the job's {self.world_size}. Ranks of other hosts "
                "have folders of their own; those of this one were started where no recording is opened"
            )
        if self.num_seen == 0 and self.failure is None:
            warn(
                "capture: the model was never called while it was recorded, so there are no files. Record what the job "
                "calls: its wrapper if there is one; calls of model.forward(...) and model.compile() bypass the hooks"
            )

    def _queue_end(self) -> None:
        """Queue what the recording's end tells, of a rank of several and where passes, steps or clippings lack."""
        # Whether a mask of pairs can be recorded shows in the writer's thread.
        may_lack = self._skipped.by_reason or self._has_pair_masks
        window, phase = self._maker.window, self.position.phase
        num_late_clippings = 0 if window is None else window.num_late_clippings
        if (self.world_size > 1 and self.num_seen) or may_lack or self.num_unseen_steps or num_late_clippings:
            self._writer.queue_small_item(
                RecordingEnded(
                    num_passes=self.num_seen,
                    num_steps=None if window is None else window.number,
                    world_size=self.world_size,
                    phase="after backward" if phase == "in backward" else phase,
                    opened=self.opened,
                    not_recorded=dict(self._skipped.by_reason),
                    num_unseen_steps=self.num_unseen_steps,
                    unseen_after=self._unseen_after,
                    num_late_clippings=num_late_clippings,
                )
            )

    def _find_missing_ranks(self) -> list[int]:
        """List, on rank 0, the ranks that should have recorded and have left nothing in the folder."""
        if self.rank != 0 or self.world_size == 1 or not self.num_written:
            return []
        expected = set(range(self.world_size)) & (self.retention.ranks or set(range(self.world_size)))
        deadline = time.monotonic() + MAX_SECONDS_FOR_OTHER_RANKS
        try:
            while (missing := expected - find_ranks(self.folder)) and time.monotonic() < deadline:
                time.sleep(0.02)
        except OSError:
            return []
        return sorted(missing)

    # An observer calls these.

    def run_in_writer(self, action: Callable[[], None]) -> None:
        self._writer.queue_small_item(action, is_urgent=True)

    def write_held(self) -> list[Path]:
        return self._store.write_held()

    def commit(self) -> None:
        self._store.commit()

    # The optimizer hooks call these.

    @property
    def wants_norms(self) -> bool:
        return self._maker.window is not None and self._maker.window.may_sign

    def before_clipping(
        self, parameters: Sequence[torch.Tensor], max_norm: Any, norm: Any, other_rule: OtherRule | None = None
    ) -> None:
        self._update_window(lambda window: window.begin_clipping(parameters, max_norm, norm, other_rule))

    def after_schedule_step(self, optimizer: Any, count: int | None, *, is_of_job: bool) -> None:
        self._update_window(lambda window: window.add_schedule_step(optimizer, count, is_of_job=is_of_job))

    def after_clipping(self, norm: Any) -> None:
        self._update_window(lambda window: window.add_clipped_norm(norm))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        part = self._update_window(lambda window: window.begin_step(optimizer))
        if part is not None:
            self._writer.queue_small_item(part)
        window = self._maker.window
        if window is not None and window.has_stepped:
            self.num_unseen_steps, self._unseen_after = window.num_unseen_steps, window.unseen_after
            self._enter_phase("in the optimizer's step")

    def after_step(self) -> None:
        if self.position.phase == "in the optimizer's step":
            self._enter_phase("after the optimizer's step")

    def after_scaled_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._update_window(lambda window: window.end_scaled_step(optimizer))

    def _update_window(self, update: Callable[[StepWindow], StepPart | None]) -> StepPart | None:
        """Call `update` with the window of optimizer steps, if there is one.

        If it raises, no more steps are recorded; the passes still are.
        """
        window = self._maker.window
        if window is None or self.failure is not None:
            return None
        try:
            return update(window)
        except Exception as error:
            self._maker.window = None
            warn(f"capture: no optimizer steps are kept from here on: {type(error).__name__}: {error}")
            return None

    def _begin_backward(self, forward: int) -> None:
        self.position.last_backward = forward
        if forward == self.position.forward and self.position.phase == "after forward":
            self._enter_phase("in backward")

    def _enter_phase(self, phase: TrainingPhase) -> None:
        self.position.phase = phase
        self._observer.on_position_change()

    # The forward hooks call the next two.

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.num_seen += 1
        self.position.forward = self.num_seen - 1
        try:
            self._enter_phase("in forward")
            self._capture_pass(args, kwargs)
        except Exception as error:
            self._writer.give_up(error, num_not_queued=1)

    def _end_pass(self, output: Any, error: BaseException | None) -> None:
        if error is None:
            self._enter_phase("after forward")
        if self.failure is not None:
            return
        try:
            self._add_pass_to_window()
            self._update_rank()
            if error is not None:
                self._end_failed_pass(error)
                return
            random_after = self._maker.take_random_after()
            self._writer.wake(self._copy_outputs(output, self._maker.end_pass(), random_after))
        except Exception as recorder_error:
            self._writer.give_up(recorder_error)

    def _end_failed_pass(self, error: BaseException) -> None:
        # The device may be lost, and copies from it fail. What was copied before still goes to the disk.
        with suppress(Exception):
            self._writer.wake(self._copy_outputs(None, self._maker.end_pass()))
        self._observer.on_error(error, "forward")

    def _add_pass_to_window(self) -> None:
        forward, self._pass_for_window = self._pass_for_window, None
        if forward is not None:
            self._update_window(lambda window: window.begin_pass(forward))

    def _update_rank(self) -> None:
        """Read the rank again: a job may join a process group after the recording was opened, or leave it."""
        self._was_in_process_group = is_in_process_group()
        self.rank, self.world_size = read_rank_and_world_size()

    def _capture_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the pass that begins, and queue it for the writer; count it if it is not recorded."""
        if self.failure is not None:
            self._writer.count_dropped_pass()
            return
        if self._route_recorder.num_routers:
            self._route_recorder.begin(0)
        notes, self._next_notes = self._next_notes, None
        if self.num_seen == 1 or is_in_process_group() != self._was_in_process_group:
            self._update_rank()
        if self.num_seen == 1:
            self._store.recording_id = choose_recording_id(
                self.opened, self.folder, rank=self.rank, world_size=self.world_size
            )
            self._maker.choose_where_to_sample()
        rank, world_size = self.rank, self.world_size
        forward, trains = self.num_seen - 1, torch.is_grad_enabled()
        # The window may learn of the pass where it ends: while a pass begins, a device may stand idle until it gets its
        # first work. But the window tells which weights to sample, so it has to know before these are sampled.
        self._pass_for_window = forward if trains else None
        if not self._maker.samples_at_end:
            self._add_pass_to_window()
        if not self._selector.select(forward=forward, rank=rank, trains=trains) or self._store.is_full:
            self._num_not_selected += 1
            return
        snapshot = self._maker.make(args, kwargs, rank=rank, world_size=world_size, forward=forward, notes=notes)
        if isinstance(snapshot, str):
            self._skipped.add(snapshot, trains=trains)
            return
        self._has_pair_masks |= snapshot.pair_mask is not None
        if self._writer.queue_pass(snapshot, snapshot.num_bytes):
            self._last_queued_forward = forward
            if self._route_recorder.num_routers:
                self._route_recorder.begin(snapshot.num_tokens)

    def _copy_outputs(
        self,
        output: Any,
        end: PassEnd,
        random_after: GeneratorSnapshot | None = None,
    ) -> PassOutputs | None:
        """Begin to copy what is kept of a pass that ends; None if that is nothing."""
        forward, outputs = self.num_seen - 1, find_outputs(output, with_rows=self.retention.reproduce)
        plain: dict[str, str] = {}
        if self.retention.reproduce:
            loss = outputs.get("loss")
            if loss is not None and torch.is_grad_enabled():
                self._update_window(lambda window: window.watch_loss(forward, loss))
            if (pass_logits := self._maker.take_logits(output)) is not None:
                outputs["token_log_probs"] = pass_logits.log_probs
                # A loss that the model does not compute shows in the gradient of its logits alone.
                if loss is None and not self._maker.has_labels and pass_logits.logits.requires_grad:
                    on_gradient = partial(self._note_targets, forward)
                    watch_logits(
                        pass_logits.logits,
                        pass_logits.ids,
                        on_gradient,
                        self._writer.give_up,
                        self._maker.read_engine_scale,
                    )
            plain = describe_outputs(output, loss)
        routes = self._route_recorder.take()
        has_any = outputs or not end.is_empty or random_after or routes
        if not has_any or is_capturing_graph(outputs):
            return None
        return PassOutputs.begin_copy(forward, outputs, plain, end, random_after, routes)
