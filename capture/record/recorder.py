"""Record the micro-batches that go through a model inside a training job.

    with recording(model, "inputs/my-run"):
        train(model)

The job pays for copying a forward's arguments to the host, with `reproduce` also for samples of its weights and
gradients, and for nothing else. No exception of the recorder reaches the job.
"""

import atexit
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn

from capture.file_format.folder_layout import ranks_in
from capture.file_format.listing import ranges_of
from capture.record.background_writer import BackgroundWriter, warn
from capture.record.call_arguments import checked_names
from capture.record.child_end import at_end_of_child
from capture.record.flight_recorder import SHARED_MEMORY, SharedFolder
from capture.record.forward_hooks import ForwardHooks
from capture.record.host_copy import is_capturing_graph
from capture.record.incidents import Incident, incident, incident_of, is_news_to, placed
from capture.record.job_facts import is_in_group, prepare_folder, rank_and_world_size
from capture.record.optimizer_hooks import OptimizerHooks
from capture.record.parameter_sampler import TakenSamples
from capture.record.pass_store import Ended, Item, Store
from capture.record.position import PositionPage
from capture.record.retention import Choice, Keep, Passes, WhichEnd, keep_of
from capture.record.rng_and_outputs import dtypes_of, noted, outputs_of
from capture.record.signal_handlers import listen, unlisten
from capture.record.slow_step import StepWatch
from capture.record.snapshot import Clock, Notes, Opened, Outputs, Taker
from capture.record.step_window import StepPart, StepWindow

MAX_FLUSH_SECONDS = 60.0
_OPEN: "list[Recorder]" = []
_held: dict[str, Any] | None = None  # what was noted for the next pass while there is no recording; None: not held
MAX_SECONDS_BEHIND = 1.0  # that rank 0 waits at its end for the first file of another one


def recording(
    model: nn.Module,
    folder: str | Path,
    *,
    every: int = 1,
    forwards: str | range | tuple[int, int] | None = None,
    ranks: str | int | Iterable[int] | None = None,
    passes: Passes = "all",
    max_files: int | None = None,
    max_bytes: int | None = None,
    keep: WhichEnd = "first",
    flight_recorder: int | None = None,
    slow_step: float | str | None = None,
    reproduce: bool | None = None,
    segment: str | int | None = None,
    max_queued: int = 64,
    arguments: Mapping[str, str] | None = None,
    **unknown: NoReturn,
) -> "Recorder":
    """Write the forwards of `model` until the recorder is closed or the process ends.

    model       what the job calls: the bare model or its wrapper (DDP, DeepSpeed's engine, torch.compile's)
    folder      made if it is not there, with mode 0700; several ranks share it
    every       every Nth forward, of those that `forwards`, `ranks` and `passes` allow; not every Nth optimizer step
    forwards    numbers of forwards, as `100:200` (without 200), a range or a pair; `100:` has no end
    ranks       ranks that record, as `0,3` or numbers
    passes      `train` (autograd on), `rollout` (autograd off) or `all`
    max_files, max_bytes   for each rank by itself, and for all its files in the folder, also of earlier recordings;
                1 KiB a file is set aside for the manifest
    keep        what a full folder does: `first` takes no more, `last` deletes its oldest files, or segments
    flight_recorder  the last N passes stay in memory, and only an incident writes them: an exception, a loss or
                gradient norm that is not finite, out of memory, SIGTERM, SIGINT, SIGQUIT, SIGUSR1 (the job goes on),
                a slow step
    slow_step   a step, from one forward to the next, of more than this many times the median is an incident; as `60s`,
                one of more than 60 seconds, also before there is a median
    reproduce   keep what it takes to do a pass again and to judge it: random states (10 kB), outputs, environment,
                samples of the weights (1 kB, the first pass more), and of gradients at each step of the optimizer. By
                default on with a flight recorder. A pass is then complete, and without a flight recorder written,
                when the next one begins
    segment     put many passes into one file of about this size, as `64MB` or a number of bytes, in a folder for each
                rank. Without it each pass is a file, and a rank has a folder of its own if there are more than 16
    max_queued  passes that may wait for the disk; further ones are dropped and counted
    arguments   names of the forward's arguments to those that a capture gives them, for a model whose forward has names
                of its own: `{"idx": "input_ids", "targets": "labels"}`. `labels` are those of transformers, which
                shifts them itself; targets that are the next tokens already are `shift_labels`

    Raises TypeError or ValueError for arguments of the wrong kind. A failure with the folder, then or later, is one
    warning, and the recorder's `failure` says what it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"recording needs a torch.nn.Module, not {type(model).__name__}")
    if max_queued < 1:
        raise ValueError(f"max_queued must be 1 or more, not {max_queued}")
    kept = keep_of(
        every=every,
        forwards=forwards,
        ranks=ranks,
        passes=passes,
        max_files=max_files,
        max_bytes=max_bytes,
        keep=keep,
        flight_recorder=flight_recorder,
        slow_step=slow_step,
        reproduce=reproduce,
        segment=segment,
        **unknown,
    )
    names = checked_names(arguments)
    return Recorder(model, Path(folder).absolute(), keep=kept, max_queued=max_queued, names=names)


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
        self, model: nn.Module, folder: Path, *, keep: Keep, max_queued: int, names: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.num_seen = 0
        self.num_skipped = 0
        self.not_recorded: Counter[str] = Counter()
        self.hears_signals = False
        self.rank, self.world_size = 0, 1
        self._is_in_group = False
        self._num_passed_over = 0
        self._is_closed = False
        self._process = os.getpid()
        self._taken: int | None = None  # the latest forward that was handed to the writer
        self._notes_of_next: Notes | None = None
        self._choice = Choice(keep)
        self._forward_hooks = ForwardHooks(self._pass_begins, self._pass_ends)
        self._optimizer_hooks = OptimizerHooks(self)
        is_watched = keep.slow_step is not None or keep.slow_seconds is not None
        self._watch = StepWatch(keep.slow_step, max_seconds=keep.slow_seconds) if is_watched else None
        is_urgent, clock = threading.Event(), Clock()
        self._opened = clock.at(time.monotonic_ns())
        self._position = PositionPage()
        self._store = Store(folder, keep, opened=self._opened, is_urgent=is_urgent, shared=self._share_position(folder))
        self._writer: BackgroundWriter[Item] = BackgroundWriter(
            self._store.handle,
            max_queued=max_queued,
            rest=self._store.spool,
            finish=self._store.finish,
            is_urgent=is_urgent,
            deadline=self._watch,
            when_late=self._tell_slow_step,
        )
        atexit.register(self.close)
        at_end_of_child(self.close, order=1)
        try:
            model_name = prepare_folder(folder, model)
            self._taker = Taker(model, clock, model_name=model_name, reproduce=keep.reproduce, names=names)
            if self._taker.window is not None:
                self._taker.window.on_backward = self._backward_begins
            self.rank, self.world_size = rank_and_world_size()
            self._writer.tell(Opened(rank=self.rank, world_size=self.world_size))
        except Exception as error:  # the job is worth more than its record
            self._writer.stop(error)
            return
        _OPEN.append(self)
        self.hears_signals = listen(self)
        self._forward_hooks.attach(model)
        if keep.reproduce:
            self._optimizer_hooks.attach()

    def _share_position(self, folder: Path) -> SharedFolder | None:
        """Keep the position in shared memory, where there is some."""
        if not SHARED_MEMORY.is_dir():
            return None
        shared = None
        with suppress(OSError):
            self._position.rank, self._position.world_size = rank_and_world_size()
            shared = SharedFolder(folder, self._position.rank)
            self._position.open(shared, opened=self._opened)
        return shared

    @property
    def num_written(self) -> int:
        return self._store.num_written

    @property
    def num_dropped(self) -> int:
        return self._writer.num_dropped + self._store.num_lost

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
            self.hear_exception(error, "loop")
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
            outputs, plain = noted({"noted_loss": loss, "grad_norm": grad_norm, "log_probs": log_probs})
            if outputs or plain:
                self._writer.tell(Outputs.of(self.num_seen - 1, outputs, plain))
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                forward = self.num_seen - 1
                self._watch_steps(lambda window: window.watch_loss(forward, loss))
            if tensors and self._taken == self.num_seen - 1:
                self._writer.tell(Notes.of(self.num_seen - 1, tensors))
        except Exception as error:  # the job is worth more than its record
            self._writer.stop(error)

    def note_next(self, **tensors: Any) -> None:
        """Note tensors for the pass that comes next, as `note` does for the latest."""
        if self._is_closed or self.failure is not None or os.getpid() != self._process:
            return
        try:
            came = Notes.of(self.num_seen, tensors)
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
                Ended(
                    num_passes=self.num_seen,
                    num_steps=None if window is None else window.number,
                    world_size=self.world_size,
                    place="after backward" if self._position.place == "in backward" else self._position.place,
                    opened=self._opened,
                    not_recorded=dict(self.not_recorded),
                )
            )
        self._position.close()
        self._writer.close(max_seconds=MAX_FLUSH_SECONDS)
        unlisten(self)
        if missing := self._missing_ranks():
            named = f"rank{'s' * (len(missing) > 1)} {ranges_of(missing)}"
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
        deadline = time.monotonic() + MAX_SECONDS_BEHIND
        try:
            while (missing := wanted - ranks_in(self.folder)) and time.monotonic() < deadline:
                time.sleep(0.02)
        except OSError:
            return []
        return sorted(missing)

    def hear_signal(self, number: int) -> None:
        self._tell_incident(incident("signal", signal.Signals(number).name, self._forward))

    def hear_exception(self, error: BaseException, where: str) -> None:
        is_ordinary = isinstance(error, SystemExit) or (isinstance(error, KeyboardInterrupt) and self.hears_signals)
        if not is_ordinary and is_news_to(id(self), error):
            self._tell_incident(incident_of(error, where, self._forward))

    def _tell_incident(self, happened: Incident) -> None:
        with suppress(Exception):  # an incident without its stacks is better than none
            happened = placed(
                happened,
                self._position.place,
                last_backward=self._position.last_backward,
                world_size=self.world_size,
                opened=self._opened,
            )
        self._position.was_told = happened.ends_job
        self._writer.tell(happened, is_urgent=True)

    def clips(self, parameters: Sequence[torch.Tensor], max_norm: Any, norm: Any) -> None:
        self._watch_steps(lambda window: window.clips(parameters, max_norm, norm))

    def clipped(self, norm: Any) -> None:
        self._watch_steps(lambda window: window.clipped(norm))

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        part = self._watch_steps(lambda window: window.steps(optimizer))
        if part is not None:
            self._writer.tell(part)
        if self._taker.window is not None and self._taker.window.has_stepped:
            self._position.at("in the optimizer's step")

    def stepped(self) -> None:
        if self._position.place == "in the optimizer's step":
            self._position.at("after the optimizer's step")

    def _backward_begins(self, forward: int) -> None:
        self._position.last_backward = forward
        if forward == self._position.forward and self._position.place == "after forward":
            self._position.at("in backward")

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

    @property
    def _forward(self) -> int | None:
        return self.num_seen - 1 if self.num_seen else None

    def _pass_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.num_seen += 1
        self._position.begins(self.num_seen - 1)
        try:
            if self._watch is not None and self._watch.begin(self.num_seen - 1):
                self._tell_slow_step()
            self._take(args, kwargs)
        except Exception as error:  # the job is worth more than its record
            self._writer.stop(error, num_lost=1)

    def _look_at_rank(self) -> None:
        """Look at the rank again: a job may join a process group after the recording was opened, or leave it."""
        self._is_in_group = is_in_group()
        self.rank, self.world_size = rank_and_world_size()
        self._position.rank, self._position.world_size = self.rank, self.world_size

    def _pass_ends(self, output: Any, error: BaseException | None) -> None:
        if error is None:
            self._position.at("after forward")
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
        self.hear_exception(error, "forward")

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.failure is not None:
            self._writer.drop()
            return
        notes, self._notes_of_next = self._notes_of_next, None
        if self.num_seen == 1 or is_in_group() != self._is_in_group:
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

    def _outputs_of(self, output: Any, settings: Mapping[str, str], weights: TakenSamples | None) -> Outputs | None:
        forward, outputs = self.num_seen - 1, outputs_of(output, with_rows=self.keep.reproduce)
        plain: dict[str, str] = {}
        if self.keep.reproduce:
            loss = outputs.get("loss")
            if loss is not None and torch.is_grad_enabled():
                self._watch_steps(lambda window: window.watch_loss(forward, loss))
            if (few := self._taker.log_probs_of(output)) is not None:
                outputs["token_log_probs"] = few
            plain = dtypes_of(output, loss)
        if not (outputs or settings or weights) or is_capturing_graph(outputs):
            return None
        return Outputs.of(forward, outputs, plain, settings, weights)

    def _tell_slow_step(self) -> None:
        assert self._watch is not None
        while (late := self._watch.take()) is not None:
            self._tell_incident(incident("slow step", "step", late[0], late[1]))
