"""Write a pass, hold it in the flight recorder, or drop it, once its copy is on the host.

All of this runs in the background writer's thread.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from capture.file_format.capture_file import EncodedCall, encode_call, utc_now
from capture.file_format.end_record import EndRecord, write_end_record
from capture.file_format.folder_layout import choose_rank_folder
from capture.file_format.manifest import format_stamp
from capture.file_format.micro_batch import CaptureError
from capture.file_format.model_facts import write_model_facts
from capture.file_format.optimizer_step import OptimizerStep, merge_steps
from capture.file_format.safe_unpickler import copy_plain
from capture.file_format.tensor_codec import encode_tensor
from capture.record.background_writer import warn
from capture.record.job_facts import read_environment
from capture.record.model_facts import RawModelFacts
from capture.record.observer import RecordingObserver
from capture.record.outputs import summarise_outputs
from capture.record.rank_writer import RankWriter, open_rank_writer
from capture.record.retention import RetentionSettings
from capture.record.snapshot import WITH_MASK_OF_PAIRS, PassNotes, PassOutputs, PassSnapshot, RecordingOpened
from capture.record.step_window import StepPart

# How long a copy may take once an incident waits for it. A later one waits in the device's queue for work that hangs.
_MAX_COPY_SECONDS = 1.0
_POLL_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingEnded:
    """Says that a recording was closed.

    It is queued on a rank of several, and where training passes were not recorded, forwards not
    seen, or gradients clipped after a step.
    """

    num_passes: int
    num_steps: int | None
    world_size: int
    phase: str
    opened: str
    not_recorded: Mapping[str, int]
    num_unseen_steps: int
    unseen_after: int | None
    num_late_clippings: int

    def make_record(self, rank: int, recording_id: str) -> EndRecord:
        return EndRecord(
            rank=rank,
            world_size=self.world_size,
            num_passes=self.num_passes,
            num_steps=self.num_steps,
            place=self.phase,
            opened=self.opened,
            time=utc_now(),
            not_recorded=self.not_recorded,
            recording=recording_id,
            num_unseen_steps=self.num_unseen_steps,
            unseen_after=self.unseen_after,
            num_late_clippings=self.num_late_clippings,
        )


class SkippedPasses:
    """Counts passes that cannot be replayed from their arguments, and training passes among them by the reason."""

    def __init__(self) -> None:
        self.count = 0
        self.by_reason: Counter[str] = Counter()

    def add(self, reason: str, *, trains: bool) -> None:
        """Count a pass. There is a warning for the first training pass of each reason."""
        self.count += 1
        if trains:
            if reason not in self.by_reason:
                warn(f"capture: a training pass is not recorded, {reason}. Others like it are counted only")
            self.by_reason[reason] += 1


WriterItem = PassSnapshot | PassOutputs | PassNotes | StepPart | RecordingOpened | RecordingEnded | Callable[[], None]


class PassStore:
    """Takes the passes of one recording, and counts them.

    num_written    passes that are in files now
    num_not_kept   passes that a limit or the flight recorder left out, and written ones that made room for later ones
    num_held       passes that wait in memory to be written, or for an incident
    num_lost       passes that could not be written at the end
    skipped        passes that cannot be replayed from their arguments, as showed on the host alone
    rank_and_folder  the rank, and the folder of its files
    recording_id     of the recording; set before the first pass is queued
    """

    def __init__(
        self,
        folder: Path,
        retention: RetentionSettings,
        *,
        opened: str,
        flush_requested: threading.Event,
        observer: RecordingObserver,
    ) -> None:
        self.num_lost = 0
        self.skipped = SkippedPasses()
        self.is_full = False
        self._folder = folder
        self._retention = retention
        self._opened = opened
        self._flush_requested = flush_requested
        self._held_passes: deque[EncodedCall] = deque()
        self._observer = observer
        self.rank_and_folder = 0, folder
        self.recording_id = opened
        self._writers: dict[tuple[int, Path], RankWriter] = {}
        self._num_passes_written = 0
        self._num_passes_dropped = 0
        # The latest optimizer step, with those of its parts that have arrived.
        self._step: OptimizerStep | None = None
        # Steps that GradScaler left out inside a fused optimizer, which the job's thread has counted: the device alone
        # knew. And the number of the latest such step, which is one only if no other optimizer takes a part of it.
        self._num_steps_left_out = 0
        self._step_left_out: int | None = None
        # Whether the latest pass is held in memory until the next one comes: its outputs and notes come later than it.
        self._holds_latest = retention.reproduce
        self._has_warned_of_notes = False

    @property
    def num_written(self) -> int:
        return self._num_passes_written - self._num_deleted

    @property
    def num_not_kept(self) -> int:
        return self._num_passes_dropped + self._num_deleted

    @property
    def num_held(self) -> int:
        return len(self._held_passes)

    @property
    def _num_deleted(self) -> int:
        # The job's thread reads this while the writer's thread may add a writer, so it sums over a copy.
        return sum(writer.num_deleted for writer in list(self._writers.values()))

    def handle(self, item: WriterItem) -> None:
        """Handle one item. Raises CaptureError for a pass that could not be read back, OSError where the disk fails."""
        match item:
            case PassSnapshot():
                self._add_pass(item)
            case PassOutputs():
                self._add_outputs(item)
            case PassNotes():
                self._add_notes(item)
            case StepPart():
                self._add_step_part(item)
            case RecordingOpened():
                self._prepare_rank_folder(item.rank, item.world_size)
            case RecordingEnded():
                rank, rank_folder = self.rank_and_folder
                end = item.make_record(rank, self.recording_id)
                end = replace(end, not_recorded=dict(Counter(end.not_recorded) + self.skipped.by_reason))
                if end.num_steps is not None:
                    end = replace(end, num_steps=self._count_taken(end.num_steps))
                write_end_record(rank_folder, end, stamp=format_stamp(self._opened))
            case _:
                item()

    def finish(self, failed: bool) -> None:
        """End the recording. The flight recorder's passes are dropped: no incident asked for them."""
        try:
            if not failed:
                if self._retention.flight_recorder is None:
                    self.write_held()
                self._num_passes_dropped += len(self._held_passes)
                self._held_passes.clear()
                self.commit()
        finally:
            self.num_lost += len(self._held_passes)
            self._held_passes.clear()
            for writer in self._writers.values():
                writer.close()

    def _add_pass(self, snapshot: PassSnapshot) -> None:
        """Encode a pass, and hold it in memory or write it."""
        origin, notes = snapshot.make_origin(), snapshot.notes
        self._prepare_rank_folder(origin.rank or 0, origin.world_size)
        if self._retention.flight_recorder is None:
            self.write_held()
        events = snapshot.copies.events
        self._wait_for_copies(events if notes is None else [*events, *notes.copy_events])
        if snapshot.model_facts is not None:
            self._write_model_facts(snapshot.model_facts)
        tensors = dict(snapshot.copies.tensors)
        if snapshot.pair_mask is not None:
            if (documents := snapshot.pair_mask.describe_documents(tensors)) is None:
                self.skipped.add(WITH_MASK_OF_PAIRS, trains=snapshot.trains)
                return
            tensors |= documents
        encoded = encode_call(
            tensors,
            snapshot.call_facts,
            trains=snapshot.trains,
            origin=origin,
            left_out=snapshot.left_out,
            random=None if snapshot.random is None else snapshot.random.to_plain(),
            training=snapshot.training,
            environment=self._describe_environment(snapshot),
            weights=None if snapshot.weights is None else snapshot.weights.to_parameter_samples().to_json(),
            optimizer_step=None if snapshot.optimizer_step is None else self._count_taken(snapshot.optimizer_step),
            recording=self.recording_id,
        )
        snapshot.copies.give_back()
        if notes is not None:
            self._write_notes(encoded, notes)
        # A pass is held only when it is done with: until then the background writer counts it.
        if self._retention.flight_recorder is not None:
            while len(self._held_passes) >= self._retention.flight_recorder:
                self._observer.on_release(self._held_passes.popleft())
                self._num_passes_dropped += 1
            self._observer.on_hold(encoded)
            self._held_passes.append(encoded)
        elif self._holds_latest:
            self._held_passes.append(encoded)
        else:
            self._write(encoded)

    def _describe_environment(self, snapshot: PassSnapshot) -> dict[str, str] | None:
        if not self._retention.reproduce:
            return None
        environment = read_environment()
        for settings in snapshot.settings:
            environment.update(settings)
        return environment

    def _write_model_facts(self, raw_facts: RawModelFacts) -> None:
        self._wait_for_copies(raw_facts.copy_events)
        rank, rank_folder = self.rank_and_folder
        try:
            facts = raw_facts.to_model_facts(rank=rank, recording=self.recording_id)
        except Exception as error:
            warn(f"capture: what the model is will not be kept: {type(error).__name__}: {error}")
            return
        write_model_facts(rank_folder, facts, stamp=format_stamp(self._opened))

    def _add_outputs(self, pass_outputs: PassOutputs) -> None:
        """Put the outputs of a pass into it, if it is held, and show them to the observer."""
        # If the copy of the outputs is lost, the pass itself is still kept.
        try:
            self._wait_for_copies(pass_outputs.copy_events)
        except CaptureError:
            return
        outputs, end = {**pass_outputs.plain, **summarise_outputs(pass_outputs.tensors)}, pass_outputs.end
        if end.model_facts is not None:
            self._write_model_facts(end.model_facts)
        if self._retention.reproduce and self._held_passes and self._held_passes[-1].step == pass_outputs.forward:
            encoded = self._held_passes[-1]
            encoded.body.setdefault("outputs", {}).update(outputs)
            if end.weights is not None:
                encoded.body["weights"] = end.weights.to_parameter_samples().to_json()
            if end.training is not None:
                encoded.body["training"] = copy_plain(end.training)
            if end.host_states is not None:
                # A state has changed since the pass before, in this forward or before it, and nothing tells which. So
                # no end is kept: an end equal to the beginning would say that the forward drew nothing.
                states, earlier = end.host_states.to_plain(), encoded.body["random"]
                encoded.body["random"] = {**states, "torch": {**earlier["torch"], **states["torch"]}}
            elif pass_outputs.random_after is not None:
                encoded.body["random_after"] = pass_outputs.random_after.to_marks()
            if pass_outputs.routes:
                encoded.body["routes"] = {
                    name: encode_tensor(choice_TK)
                    for names, choices_RTK in pass_outputs.routes
                    for name, choice_TK in zip(names, choices_RTK, strict=True)
                }
            if end.settings:
                encoded.body["environment"].update(end.settings)
            if "step" in encoded.body:
                self._write_step(encoded)
            else:
                self._observer.on_hold(encoded)
        self._observer.on_outputs(pass_outputs.forward, outputs)

    def _add_notes(self, notes: PassNotes) -> None:
        """Put what was noted after a pass into it, unless the pass is written or was dropped."""
        encoded = next((encoded for encoded in reversed(self._held_passes) if encoded.step == notes.forward), None)
        if encoded is None:
            if not self._holds_latest:
                self._warn_of_notes(
                    f"what was noted after pass {notes.forward} came when its file was written. Passes are held for "
                    "notes from here on. For the first one, note before it (note_next), or record with reproduce"
                )
        else:
            try:
                self._wait_for_copies(notes.copy_events)
            except CaptureError:
                return
            self._write_notes(encoded, notes)
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

    def _add_step_part(self, part: StepPart) -> None:
        """Put an optimizer step into the last pass before it, if that is not written yet."""
        try:
            self._wait_for_copies(part.copy_events)
        except CaptureError:
            return
        step, number = part.make_step(), self._count_taken(part.step.number)
        if step is None:
            # Another optimizer may have taken its part of the step before.
            is_taken = self._step is not None and self._step.number == number
            self._step_left_out = None if is_taken else part.step.number
            return
        self._step_left_out = None
        step = replace(step, number=number)
        if self._step is not None and self._step.number == step.number:
            step = merge_steps(self._step, step)
        self._step = step
        window = [encoded for encoded in self._held_passes if encoded.body.get("optimizer_step") == step.number]
        candidates = [encoded for encoded in window if encoded.body["trains"]] or window
        if candidates:
            last = candidates[-1]
            outputs = last.body.setdefault("outputs", {})
            if step.grad_norm is not None and not step.is_part_of_norm:
                outputs.setdefault("grad_norm", step.grad_norm)
            self._write_step(last)
        if step.grad_norm is not None:
            self._observer.on_outputs(step.passes[-1], {"grad_norm": step.grad_norm})

    def _count_taken(self, number: int) -> int:
        """Return how many of the first `number` steps that the job's thread has counted were taken."""
        if self._step_left_out is not None and number > self._step_left_out:
            self._num_steps_left_out += 1
            self._step_left_out = None
        return number - self._num_steps_left_out

    def _write_step(self, last: EncodedCall) -> None:
        """Put the latest step into `last`, with the norm that the job noted if no hook saw a whole one."""
        assert self._step is not None
        step, noted_norm = self._step, last.body.get("outputs", {}).get("grad_norm")
        if isinstance(noted_norm, float) and (step.grad_norm is None or step.is_part_of_norm):
            # The hooks did not see what computed the noted norm, and it may have clipped the gradients too.
            is_unclipped = step.is_unclipped and step.grad_norm is not None
            step = replace(step, grad_norm=noted_norm, is_part_of_norm=False, is_unclipped=is_unclipped)
        last.body["step"] = step.to_json()
        self._observer.on_hold(last)

    def write_held(self) -> list[Path]:
        """Write the passes that are held, as far as there is room. Raises OSError."""
        written = []
        while self._held_passes:
            if (path := self._write(self._held_passes[0])) is not None:
                written.append(path)
            self._held_passes.popleft()
        return written

    def _write(self, encoded: EncodedCall) -> Path | None:
        """Write a pass and return its path; None if there is no room for it. Raises OSError."""
        path = self._writers[encoded.rank, self._choose_rank_folder(encoded.rank, encoded.world_size)].write(encoded)
        self._observer.on_release(encoded)
        if path is None:
            self._num_passes_dropped += 1
            self.is_full = self._retention.keep == "first" and self._retention.flight_recorder is None
        else:
            self._num_passes_written += 1
        return path

    def _prepare_rank_folder(self, rank: int, world_size: int | None) -> None:
        """Prepare the folder of this rank's files. A job may learn its rank after the recording was opened."""
        self.rank_and_folder = rank, self._choose_rank_folder(rank, world_size)
        if self.rank_and_folder in self._writers:
            return
        self._observer.on_new_rank_folder()
        writer = open_rank_writer(self._folder, self._retention, rank=rank, world_size=world_size, stamp=self._opened)
        self._writers[self.rank_and_folder] = writer
        # All ranks see the same folder, so only one of them warns.
        warns_for_all_ranks = rank == min(self._retention.ranks or {0})
        if writer.had_passes and warns_for_all_ranks:
            warn(
                f"capture: {self._folder} has passes of another recording. `replay` takes the latest recording of a "
                "folder, and `replay inspect` lists them"
            )

    def _choose_rank_folder(self, rank: int, world_size: int | None) -> Path:
        in_segments = self._retention.segment is not None
        return choose_rank_folder(self._folder, rank=rank, world_size=world_size, in_segments=in_segments)

    def commit(self) -> None:
        """List what was written in manifests. Raises OSError."""
        for writer in self._writers.values():
            writer.commit()

    def _wait_for_copies(self, events: list[torch.cuda.Event]) -> None:
        """Wait for copies from a device. Raises CaptureError if one fails, or takes too long while an incident waits.

        It polls: waiting inside the driver would never end on a device that hangs.
        """
        deadline: float | None = None
        try:
            while not all(event.query() for event in events):
                self._observer.on_idle()
                if self._flush_requested.is_set():
                    deadline = deadline or time.monotonic() + _MAX_COPY_SECONDS
                    if time.monotonic() > deadline:
                        raise TimeoutError("the device did not get to it")
                    time.sleep(_POLL_SECONDS)
                else:
                    self._flush_requested.wait(_POLL_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            self._observer.on_lost_copy()
            raise CaptureError(f"its copy to the host was not finished: {error}") from None
