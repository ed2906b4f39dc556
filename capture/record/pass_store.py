"""Write a pass, keep it in the flight recorder, or let it go, once its copy is on the host.

All of it runs in the background writer's thread.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from capture.file_format.capture_file import EncodedCall, encode_call, utc_now
from capture.file_format.end_record import EndRecord, write_end_record
from capture.file_format.folder_layout import choose_rank_folder
from capture.file_format.manifest import format_stamp
from capture.file_format.micro_batch import CaptureError
from capture.file_format.optimizer_step import OptimizerStep, merge_steps
from capture.record.background_writer import warn
from capture.record.observer import Observer
from capture.record.rank_writer import RankWriter, open_rank_writer
from capture.record.retention import RetentionSettings
from capture.record.rng_and_outputs import read_environment, summarise_outputs
from capture.record.snapshot import PassNotes, PassOutputs, PassSnapshot, RecordingOpened
from capture.record.step_window import StepPart

_MAX_COPY_SECONDS = 1.0  # when an incident waits: a copy that is not there by then stands behind something that hangs
_POLL_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingEnded:
    """Says that a recording was closed: of a rank of several, or one that could not record some training passes."""

    num_passes: int
    num_steps: int | None
    world_size: int
    place: str
    opened: str
    not_recorded: Mapping[str, int]

    def record(self, rank: int) -> EndRecord:
        return EndRecord(
            rank=rank,
            world_size=self.world_size,
            num_passes=self.num_passes,
            num_steps=self.num_steps,
            place=self.place,
            opened=self.opened,
            time=utc_now(),
            not_recorded=self.not_recorded,
        )


WriterTask = PassSnapshot | PassOutputs | PassNotes | StepPart | RecordingOpened | RecordingEnded | Callable[[], None]


class PassStore:
    """Takes the passes, and counts those that did not fail.

    num_written   files
    num_not_kept  passes that a limit or the flight recorder left out, and files that made room for later ones
    num_lost      passes that could not be written at the end
    place         the rank, and the folder of its files
    """

    def __init__(
        self, folder: Path, keep: RetentionSettings, *, opened: str, is_urgent: threading.Event, observer: Observer
    ) -> None:
        self.num_lost = 0
        self.is_full = False
        self._folder = folder
        self._keep = keep
        self._opened = opened
        self._is_urgent = is_urgent
        self._held: deque[EncodedCall] = deque()
        self._observer = observer
        self.place = 0, folder
        self._files: dict[tuple[int, Path], RankWriter] = {}  # by place
        self._num_committed = 0
        self._num_let_go = 0
        self._step: OptimizerStep | None = None  # the latest, as far as its parts have come
        self._holds_latest = keep.reproduce  # its outputs and notes may still come
        self._has_warned_of_notes = False

    @property
    def num_written(self) -> int:
        return self._num_committed - self._num_given_up

    @property
    def num_not_kept(self) -> int:
        return self._num_let_go + self._num_given_up

    @property
    def _num_given_up(self) -> int:
        return sum(files.num_given_up for files in list(self._files.values()))

    def handle(self, item: WriterTask) -> None:
        """Take one item. Raises CaptureError for a pass that could not be read back, OSError where the disk fails."""
        match item:
            case PassSnapshot():
                self._take(item)
            case PassOutputs():
                self._complete(item)
            case PassNotes():
                self._add_notes(item)
            case StepPart():
                self._note_step(item)
            case RecordingOpened():
                self._settle(item.rank, item.world_size)
            case RecordingEnded():
                write_end_record(self.place[1], item.record(self.place[0]), stamp=format_stamp(self._opened))
            case _:
                item()

    def finish(self, failed: bool) -> None:
        """End the recording. The flight recorder's passes are let go: no incident asked for them."""
        try:
            if not failed:
                if self._keep.flight_recorder is None:
                    self.write_held()
                self._num_let_go += len(self._held)
                self._held.clear()
                self.commit()
        finally:
            self.num_lost += len(self._held)
            self._held.clear()
            for files in self._files.values():
                files.close()

    def _take(self, taken: PassSnapshot) -> None:
        origin = taken.origin()
        self._settle(origin.rank or 0, origin.world_size)
        if self._keep.flight_recorder is None:
            self.write_held()
        self._await(taken.copied if taken.notes is None else [*taken.copied, *taken.notes.copied])
        encoded = encode_call(
            taken.tensors,
            taken.call_facts,
            trains=taken.trains,
            origin=origin,
            left_out=taken.left_out,
            random=None if taken.random is None else taken.random.plain(),
            environment={**read_environment(), **taken.settings} if self._keep.reproduce else None,
            weights=None if taken.weights is None else taken.weights.parameter_samples().to_json(),
            optimizer_step=taken.optimizer_step,
            recording=self._opened,
        )
        if taken.notes is not None:
            self._write_notes(encoded, taken.notes)
        self._held.append(encoded)
        if self._keep.flight_recorder is not None:
            while len(self._held) > self._keep.flight_recorder:
                self._observer.on_release(self._held.popleft())
                self._num_let_go += 1
            self._observer.on_hold(encoded)
        elif not self._holds_latest:
            try:
                self.write_held()
            except BaseException:
                self._held.clear()  # the writer counts the pass that it handed in
                raise

    def _complete(self, came: PassOutputs) -> None:
        try:
            self._await(came.copied)
        except CaptureError:  # its pass is not lost
            return
        outputs = {**came.plain, **summarise_outputs(came.tensors)}
        if self._keep.reproduce and self._held and self._held[-1].step == came.forward:
            written = self._held[-1].body.setdefault("outputs", {})
            written.update(outputs)
            if came.weights is not None:
                self._held[-1].body["weights"] = came.weights.parameter_samples().to_json()
            if came.settings:
                self._held[-1].body["environment"].update(came.settings)
            if "step" in self._held[-1].body:
                self._write_step(self._held[-1])
            else:
                self._observer.on_hold(self._held[-1])
        self._observer.on_numbers(came.forward, outputs)

    def _add_notes(self, came: PassNotes) -> None:
        """Put what was noted after a pass into it, unless it is written or was let go."""
        encoded = next((one for one in reversed(self._held) if one.step == came.forward), None)
        if encoded is None:
            if not self._holds_latest:
                self._warn_of_notes(
                    f"what was noted after pass {came.forward} came when its file was written. Passes are held for "
                    "notes from here on. For the first one, note before it (note_next), or record with reproduce"
                )
        else:
            try:
                self._await(came.copied)
            except CaptureError:  # its pass is not lost
                return
            self._write_notes(encoded, came)
            self._observer.on_hold(encoded)
        self._holds_latest = True

    def _write_notes(self, encoded: EncodedCall, notes: PassNotes) -> None:
        refused = {**notes.left_out, **encoded.note(notes.tensors)}
        encoded.body["left_out"].update(refused)
        if refused:
            name, reason = next(iter(refused.items()))
            self._warn_of_notes(f"{name} of pass {notes.forward} is not kept: {reason}")

    def _warn_of_notes(self, text: str) -> None:
        """Warn once: a job would repeat it at each pass."""
        if not self._has_warned_of_notes:
            self._has_warned_of_notes = True
            warn(f"capture: {text}")

    def _note_step(self, part: StepPart) -> None:
        """Put the optimizer's step into the last pass before it, if that is not written yet."""
        try:
            self._await(part.copied)
        except CaptureError:
            return
        step = part.record()
        if self._step is not None and self._step.number == step.number:
            step = merge_steps(self._step, step)
        self._step = step
        window = [encoded for encoded in self._held if encoded.body.get("optimizer_step") == step.number]
        last = next((encoded for encoded in reversed(window) if encoded.body["trains"]), window[-1] if window else None)
        if last is not None:
            outputs = last.body.setdefault("outputs", {})
            if step.grad_norm is not None and not step.is_part_of_norm:
                outputs.setdefault("grad_norm", step.grad_norm)
            self._write_step(last)
        if step.grad_norm is not None:
            self._observer.on_numbers(step.passes[-1], {"grad_norm": step.grad_norm})

    def _write_step(self, last: EncodedCall) -> None:
        """Put the latest step into `last`, with the norm that the job noted if no hook saw a whole one."""
        assert self._step is not None
        step, noted = self._step, last.body.get("outputs", {}).get("grad_norm")
        if isinstance(noted, float) and (step.grad_norm is None or step.is_part_of_norm):
            # what computed it was not seen, and may have clipped too
            is_unclipped = step.is_unclipped and step.grad_norm is not None
            step = replace(step, grad_norm=noted, is_part_of_norm=False, is_unclipped=is_unclipped)
        last.body["step"] = step.to_json()
        self._observer.on_hold(last)

    def write_held(self) -> list[Path]:
        """Write the passes that are held, as far as there is room. Raises OSError."""
        written = []
        while self._held:
            first = self._held[0]
            path = self._files[first.rank, self._home_of(first.rank, first.world_size)].write(first)
            self._observer.on_release(self._held.popleft())
            if path is None:
                self._num_let_go += 1
                self.is_full = self._keep.keep == "first" and self._keep.flight_recorder is None
            else:
                self._num_committed += 1
                written.append(path)
        return written

    def _settle(self, rank: int, world_size: int | None) -> None:
        """Prepare this rank's files. A job may learn its rank after the recording was opened."""
        self.place = rank, self._home_of(rank, world_size)
        if self.place not in self._files:
            self._observer.on_settle()
            self._files[self.place] = open_rank_writer(
                self._folder, self._keep, rank=rank, world_size=world_size, stamp=self._opened
            )
            if self._files[self.place].had_passes and rank == min(self._keep.ranks or {0}):  # one rank speaks for all
                warn(
                    f"capture: {self._folder} has passes of another recording, and a replay judges no two together. "
                    "Give each recording a folder of its own"
                )

    def _home_of(self, rank: int, world_size: int | None) -> Path:
        in_segments = self._keep.segment is not None
        return choose_rank_folder(self._folder, rank=rank, world_size=world_size, in_segments=in_segments)

    def commit(self) -> None:
        """List what was written in manifests. Raises OSError."""
        for files in self._files.values():
            files.commit()

    def _await(self, copied: list[torch.cuda.Event]) -> None:
        """Wait for copies from a device, but never inside the driver, which would not return from a device that hangs.

        Raises CaptureError for a copy that fails, or that does not come while an incident waits.
        """
        deadline: float | None = None
        try:
            while not all(event.query() for event in copied):
                self._observer.on_idle()
                if self._is_urgent.is_set():
                    deadline = deadline or time.monotonic() + _MAX_COPY_SECONDS
                    if time.monotonic() > deadline:
                        raise TimeoutError("the device did not get to it")
                    time.sleep(_POLL_SECONDS)
                else:
                    self._is_urgent.wait(_POLL_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            self._observer.on_lost_copy()
            raise CaptureError(f"its copy to the host was not finished: {error}") from None
