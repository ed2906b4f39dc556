"""Capture file format 1: what a file holds, writing one and reading it.

A file is two pickles, one after the other, that name no class (protocol 5):

    {"format": 1, "num_bytes": ..., "crc32": ..., "recording": text}    of the second pickle
    {"tensors": {name: {dtype, shape, encoding, data, crc32}}, "call_facts": {name: value},
     "left_out": {name: type}, "trains": bool, "origin": {rank, world_size, step, time, model_name, versions}}

With `reproduce` the second also has what it takes to do the pass again:

    "outputs": {name: value}
    "random": {generator: {name: value}}
    "random_after": {generator: bytes}    marks of torch's generators (`capture/record/generator_marks.py`)
    "training": {"model": bool, "parts": [name]}
    "environment": {name: text}
    "weights": JSON        samples of the weights (`capture/file_format/optimizer_step.py`)
    "optimizer_step": int  number of the optimizer step that the pass went into
    "step": JSON           in the last pass before a step: what it was given (`capture/file_format/optimizer_step.py`)
    "routes": {router: tensor}   the chosen experts of each token, in a mixture of experts

With or without, a pass that the job noted tensors for has them, encoded as the arguments are. One that was recorded has
the id of its recording (`capture/record/recording_id.py`), which the head repeats, so that the heads alone tell the
recordings in one folder apart:

    "notes": {name: tensor}
    "recording": text

Arguments keep the names that the model's forward gave them. Beside the files, `actor.json` holds the model's config.
Both are written under a temporary name, fsynced and renamed, with mode 0600: captured tokens are user data.
"""

import json
import math
import pickle
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from torch import Tensor

from capture.file_format.atomic_write import HOST_DIGEST, read_bytes, write_atomically
from capture.file_format.folder_layout import is_in_segment
from capture.file_format.micro_batch import (
    ID_NAMES,
    LOSS_TARGETS,
    CaptureError,
    MicroBatch,
    Origin,
    check_call,
    explain_misfit,
    has_only_embeddings,
    micro_batch_from_call,
)
from capture.file_format.optimizer_step import OptimizerStep, ParameterSamples
from capture.file_format.safe_unpickler import NamesAClassError, copy_plain, load_plain
from capture.file_format.saved_tensors import read_legacy_dump
from capture.file_format.segment import SegmentHead, format_pass_name, read_pass_bytes
from capture.file_format.segment_record import Counts, SegmentRecord, digest_window, to_microseconds
from capture.file_format.tensor_codec import (
    MAX_TENSOR_BYTES,
    CaptureBody,
    Output,
    RandomStates,
    TrainingMode,
    WrittenOrigin,
    check_body,
    check_total_bytes,
    count_bytes,
    decode_tensors,
    describe_type,
    encode_tensor,
    is_body,
)

FORMAT = 1
ACTION_MASK = "action_mask"
# The most tensors that may be noted for a pass. Each is at most as large as the pass's token ids in int64.
MAX_NOTES = 32
MAX_FILE_BYTES = MAX_TENSOR_BYTES + 16 * 2**20
# The largest facts that are remembered; far below what the reader refuses for its size.
_MAX_REMEMBERED_BYTES = 2**16
# What a file's first pickle fits in.
_MAX_HEAD_BYTES = 1024


def write_call(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    call_facts: Mapping[str, object],
    *,
    trains: bool,
    origin: Origin,
    left_out: Mapping[str, str] | None = None,
) -> Path:
    """Write one forward's arguments as a new file `actor_inputs_rank<rank>_<time>_<step>.pkl`, and return its path.

    `tensors`, on the CPU, and `call_facts` have the names of the forward's arguments. `origin.source` is not written:
    it is the file's name. Without a time in `origin` it is now; what else it does not say is None.

    Raises CaptureError for a call that `read_call` would refuse, TypeError for a call fact that is not plain data, and
    OSError; then there is no file.
    """
    call = CapturedCall(tensors=tensors, call_facts=call_facts, left_out=left_out or {}, trains=trains, origin=origin)
    return call.write(folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedCall:
    """One call of the job's model, as a capture holds it: its arguments by name, and what was recorded beside them.

    format       None for an older dump
    outputs      what the forward gave: `loss` (the forward's), `noted_loss` (the loop's), `grad_norm`,
                 `token_log_probs` at `choose_sampled_tokens`; longer outputs as `<name>_row_sums` and
                 `<name>_crc32`, and `log_probs` and `output` also as `<name>_values`, flat, of `<name>_shape`;
                 `logits_dtype`, `loss_dtype`; `loss_function`, autograd's name of what made the loss
    random       the generators' states before the pass, for `restore_random_states`
    random_after marks of the states of torch's generators where the forward ended
    training     whether the model was in training mode, and the parts of it that were not as the rest
    environment  settings that change numbers
    weights      samples of the weights before the pass
    optimizer_step  number of steps that the job's optimizer had taken before the pass, counted by this rank's recorder
    step         the optimizer's step after the pass, if it was the last pass before a step
    notes        tensors that the job's loop noted for the pass, such as advantages
    recording    the recording's id: when it began, ISO 8601, equal on all ranks; where they could not agree, when it
                 began on this rank, and ` of rank 1` behind that; None: not known
    routes       the chosen experts [tokens, experts a token] of each router, by its name in the job; the tokens are
                 those of the token ids, flattened, padding included
    """

    format: int | None = FORMAT
    tensors: Mapping[str, Tensor]
    call_facts: Mapping[str, object]
    left_out: Mapping[str, str]
    trains: bool
    origin: Origin
    outputs: Mapping[str, Output] = field(default_factory=dict)
    random: RandomStates = field(default_factory=RandomStates)
    random_after: Mapping[str, bytes] = field(default_factory=dict)
    training: TrainingMode | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    weights: ParameterSamples | None = None
    optimizer_step: int | None = None
    step: OptimizerStep | None = None
    notes: Mapping[str, Tensor] = field(default_factory=dict)
    recording: str | None = None
    routes: Mapping[str, Tensor] = field(default_factory=dict)

    def output_numbers(self, name: str) -> list[float] | None:
        """Return the output of that name; None unless there is one and it is a list of numbers."""
        output = self.outputs.get(name)
        return [float(number) for number in output] if isinstance(output, list) else None

    def micro_batch(self) -> MicroBatch:
        """Name the arguments of the call; the action mask may have been noted instead.

        Raises CaptureError for a call without token ids.
        """
        tensors = add_noted_mask(self.tensors, self.notes)
        batch = micro_batch_from_call(
            tensors, self.call_facts, trains=self.trains, origin=self.origin, left_out=self.left_out
        )
        targets = self.notes.get(LOSS_TARGETS)
        fits = targets is not None and targets.shape == batch.sequences_BS.shape
        return replace(
            batch,
            has_noted_mask=ACTION_MASK not in self.tensors and ACTION_MASK in tensors,
            loss_targets_BS=targets.long() if targets is not None and fits else None,
        )

    def count(self) -> Counts | None:
        """Count rows and tokens; None for a call with embeddings in the place of token ids. Raises CaptureError."""
        return None if has_only_embeddings(self.tensors) else Counts.from_batch(self.micro_batch())

    def write(self, folder: str | Path) -> Path:
        """Write the call as a new file of format 1 and return its path. Raises what `write_call` does."""
        encoded = self.encode()
        path = encoded.choose_path(Path(folder))
        write_atomically(path, *encoded.pickle_parts())
        return path

    def encode(self) -> "EncodedCall":
        """Encode the call. Raises what `encode_call` does."""
        encoded = encode_call(
            self.tensors,
            self.call_facts,
            trains=self.trains,
            origin=self.origin,
            left_out=self.left_out,
            random=self.random,
            training=self.training,
            environment=self.environment,
            weights=None if self.weights is None else self.weights.to_json(),
            optimizer_step=self.optimizer_step,
            recording=self.recording,
        )
        if self.outputs:
            encoded.body["outputs"] = dict(self.outputs)
        if self.random_after:
            encoded.body["random_after"] = dict(self.random_after)
        if self.step is not None:
            encoded.body["step"] = self.step.to_json()
        if self.notes:
            encoded.body["notes"] = {name: encode_tensor(tensor) for name, tensor in self.notes.items()}
        if self.routes:
            encoded.body["routes"] = {name: encode_tensor(choice) for name, choice in self.routes.items()}
        return encoded


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedCall:
    """One forward as it will be written; `body` is plain data and may still get outputs.

    step    number of the forward
    counts  rows and tokens; None for a call with embeddings in the place of token ids
    """

    rank: int
    step: int
    time: str
    body: CaptureBody
    counts: Counts | None

    def pickle_parts(self) -> tuple[bytes, bytes]:
        """Return the file's two pickles."""
        payload = pickle.dumps(self.body, protocol=5)
        head: dict[str, int | str] = {"format": FORMAT, "num_bytes": len(payload), "crc32": zlib.crc32(payload)}
        if "recording" in self.body:
            head["recording"] = self.body["recording"]
        return pickle.dumps(head, protocol=5), payload

    @property
    def name(self) -> str:
        """The file's name, unless another file has it already."""
        return format_pass_name(self.rank, to_microseconds(self.time), self.step)

    @property
    def world_size(self) -> int | None:
        return self.body["origin"]["world_size"]

    def note(self, notes: Mapping[str, Tensor]) -> dict[str, str]:
        """Add tensors that the job noted, on the CPU; return the names of those that were refused, with the reason."""
        refused: dict[str, str] = {}
        accepted = self.body.setdefault("notes", {})
        for name, tensor in notes.items():
            counts = self.counts
            reason = (
                None if counts is None else explain_misfit(tensor.shape, rows=counts.rows, row_length=counts.row_length)
            )
            if reason is None and len(accepted) >= MAX_NOTES and name not in accepted:
                reason = f"beyond the {MAX_NOTES} tensors that may be noted for a pass"
            if reason is None:
                accepted[name] = encode_tensor(tensor)
            else:
                refused[name] = reason
        self.body["left_out"].update(refused)
        if not accepted:
            del self.body["notes"]
        return refused

    def segment_record(self) -> SegmentRecord:
        """Describe the call as a segment's index does, without its offset, length and checksum."""
        step = json.loads(self.body["step"]) if "step" in self.body else None
        return SegmentRecord(
            offset=0,
            num_bytes=0,
            crc32=0,
            number=self.step,
            time=to_microseconds(self.time),
            forward=self.body["origin"]["step"],
            trains=self.body["trains"],
            counts=self.counts,
            has_non_finite=bool(find_non_finite(self.body.get("outputs", {}))),
            has_gradients=step is not None and step["gradients"] is not None,
            optimizer_step=self.body.get("optimizer_step"),
            window=None if step is None else digest_window(step["passes"]),
        )

    def segment_head(self) -> SegmentHead:
        """Return what the call shares with the other passes of its segment."""
        origin = self.body["origin"]
        return SegmentHead(
            rank=origin["rank"],
            world_size=origin["world_size"],
            model_name=origin["model_name"],
            versions=origin["versions"],
            host=HOST_DIGEST,
            recording=self.body.get("recording"),
        )

    def choose_path(self, folder: Path) -> Path:
        """Choose the file's name. Names of a rank sort by time, then step; a taken name gets the next free step."""
        step = self.step
        while (path := folder / format_pass_name(self.rank, to_microseconds(self.time), step)).exists():
            step += 1
        return path


def encode_call(
    tensors: Mapping[str, Tensor],
    call_facts: Mapping[str, object],
    *,
    trains: bool,
    origin: Origin,
    left_out: Mapping[str, str] | None = None,
    random: RandomStates | None = None,
    training: TrainingMode | None = None,
    environment: Mapping[str, str] | None = None,
    weights: str | None = None,
    optimizer_step: int | None = None,
    recording: str | None = None,
) -> EncodedCall:
    """Encode one forward. What it does not give, such as `random`, gets no key in the body.

    Raises CaptureError for a call that could not be read back, TypeError for a call fact that is not plain data.
    """
    time = origin.time or utc_now()
    name = format_pass_name(origin.rank or 0, to_microseconds(time), origin.step or 0)
    origin = replace(origin, source=name, time=time)
    check_total_bytes(sum(count_bytes(tensor.shape, tensor.dtype) for tensor in tensors.values()), name)
    batch = check_call(tensors, call_facts, trains=trains, origin=origin)
    written_origin: WrittenOrigin = {
        "rank": origin.rank,
        "world_size": origin.world_size,
        "step": origin.step,
        "time": origin.time,
        "model_name": origin.model_name,
        "versions": dict(origin.versions),
    }
    body: CaptureBody = {
        "tensors": {key: encode_tensor(tensor) for key, tensor in tensors.items()},
        "call_facts": copy_plain(dict(call_facts)),
        "left_out": copy_plain(dict(left_out or {})),
        "trains": trains,
        "origin": copy_plain(written_origin),
    }
    if random:
        body["random"] = copy_plain(dict(random))
    if training is not None:
        body["training"] = copy_plain(training)
    if environment:
        body["environment"] = copy_plain(dict(environment))
    if weights:
        body["weights"] = weights
    if optimizer_step is not None:
        body["optimizer_step"] = optimizer_step
    if recording is not None:
        body["recording"] = recording
    counts = None if batch is None else Counts.from_batch(batch)
    encoded = EncodedCall(rank=origin.rank or 0, step=origin.step or 0, time=time, body=body, counts=counts)
    _read_back_check.check(encoded, name)
    return encoded


class ReadBackCheck:
    """Reads a body back, unless it differs from the latest one that was read back in its tensors' bytes alone.

    Most passes of a job differ in these alone, which cannot make a body unreadable, and the reader is slow.

    read  reads a pickled body, and raises CaptureError for one that cannot be read
    """

    def __init__(self, read: Callable[..., object] = load_plain) -> None:
        self._read = read
        # The latest facts, pickled, with which a body could be read back.
        self._latest_readable_facts = b""

    def check(self, encoded: EncodedCall, source: str) -> None:
        """Raise CaptureError for a body that cannot be read back."""
        body = encoded.body
        origin = {key: value for key, value in body["origin"].items() if key not in ("step", "time")}
        parts = [
            body["call_facts"],
            body["left_out"],
            origin,
            list(body["tensors"]),
            body.get("environment"),
            body.get("training"),
        ]
        facts = pickle.dumps(parts, protocol=5)
        if facts != self._latest_readable_facts:
            self._read(encoded.pickle_parts()[1], source=source)
            self._latest_readable_facts = facts if len(facts) <= _MAX_REMEMBERED_BYTES else b""


_read_back_check = ReadBackCheck()


def add_noted_mask(tensors: Mapping[str, Tensor], notes: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a call's tensors, and the action mask that was noted if the call has none.

    A noted mask of whole rows loses its first token, which no model predicts.
    """
    mask = notes.get(ACTION_MASK)
    if mask is None or ACTION_MASK in tensors:
        return tensors
    ids = next((tensors[name] for name in ID_NAMES if name in tensors), None)
    has_whole_rows = ids is not None and mask.shape == ids.shape
    return {**tensors, ACTION_MASK: mask[:, 1:] if has_whole_rows else mask}


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def read_micro_batch(path: str | Path) -> MicroBatch:
    """Read a file of format 1 or a dump of OpenRLHF's actor, as CPU tensors with their captured dtypes.

    Nothing in the file can run code. Raises CaptureError, and nothing else, for a file that is missing, truncated,
    damaged, hostile, foreign or of a later format.
    """
    content = _read(path)
    return content if isinstance(content, MicroBatch) else content.micro_batch()


def read_call(path: str | Path) -> CapturedCall:
    """Read a file as the call that it was; it may have embeddings in the place of token ids.

    Raises what `read_micro_batch` does, also for a call with neither.
    """
    content = _read(path)
    if isinstance(content, CapturedCall):
        check_call(content.tensors, content.call_facts, trains=content.trains, origin=content.origin)
        return content
    arguments = {
        "sequences": content.sequences_BS,
        "attention_mask": content.attention_mask_BS,
        "action_mask": content.action_mask_BA,
        "labels": content.labels_BS,
    }
    tensors = {name: tensor for name, tensor in arguments.items() if tensor is not None}
    return CapturedCall(
        format=None,
        tensors=tensors | dict(content.extra_tensors),
        call_facts=content.call_facts,
        left_out=content.left_out,
        trains=content.trains,
        origin=content.origin,
    )


def _read(path: str | Path) -> CapturedCall | MicroBatch:
    """Read a call of format 1, or the micro-batch of a dump."""
    source = Path(path).name
    data = read_capture_bytes(Path(path))
    try:
        head, end = load_plain(data, source=source)
    except NamesAClassError:
        return read_legacy_dump(data, source)
    body = _read_body(head, data, end, source)
    # The file's bytes go before the tensors are decoded, so that both are not in memory at once.
    del data
    return CapturedCall(
        tensors=decode_tensors(body["tensors"], source),
        call_facts=body["call_facts"],
        left_out=body["left_out"],
        trains=body["trains"],
        origin=Origin(source=source, **body["origin"]),
        outputs=body.get("outputs", {}),
        random=body.get("random", {}),
        random_after=body.get("random_after", {}),
        training=body.get("training"),
        environment=body.get("environment", {}),
        weights=ParameterSamples.from_json(body["weights"], source) if "weights" in body else None,
        optimizer_step=body.get("optimizer_step"),
        step=OptimizerStep.from_json(body["step"], source) if "step" in body else None,
        notes=decode_tensors(body["notes"], source) if "notes" in body else {},
        recording=body.get("recording"),
        routes=decode_tensors(body["routes"], source) if "routes" in body else {},
    )


def read_recording_id(path: Path) -> str | None:
    """Read the id of a capture's recording from the head of its file; None if it has none.

    Raises CaptureError for a file that cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_HEAD_BYTES)
    except OSError as error:
        raise CaptureError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        head, _ = load_plain(data, source=path.name)
    except NamesAClassError:
        return None
    recording = head.get("recording") if isinstance(head, dict) else None
    return recording if isinstance(recording, str) else None


def read_capture_bytes(path: Path) -> bytes:
    """Read a capture as it was written, from a file of its own or from a segment. Raises CaptureError."""
    return (read_pass_bytes if is_in_segment(path) else read_bytes)(path, MAX_FILE_BYTES)


def find_non_finite(outputs: Mapping[str, Output]) -> dict[str, float]:
    """Return the outputs that are numbers and not finite."""
    return {name: value for name, value in outputs.items() if isinstance(value, float) and not math.isfinite(value)}


def _read_body(head: object, data: bytes, start: int, source: str) -> CaptureBody:
    """Read the body at byte `start` of `data`. Raises CaptureError if `head` says otherwise, or it is no capture."""
    payload = memoryview(data)[start:]
    _check_head(head, payload, source)
    body, end = load_plain(payload, source=source)
    if end != len(payload) or not is_body(body):
        raise CaptureError(
            f"{source}: the checksum is right, but this is no body of format {FORMAT}: {describe_type(body)}"
        )
    return check_body(body, source)


def _check_head(head: object, payload: memoryview, source: str) -> None:
    """Raise CaptureError if `head` is of no capture of this format, or does not fit the bytes after it."""
    if not isinstance(head, dict) or "format" not in head:
        raise CaptureError(
            f"{source}: a pickle, but no capture: expected a dict with `format`, got {describe_type(head)}"
        )
    if head["format"] != FORMAT:
        raise CaptureError(describe_other_format(source, head["format"]))
    types = {key: type(value) for key, value in head.items()}
    if types.pop("recording", str) is not str or types != dict.fromkeys(("format", "num_bytes", "crc32"), int):
        raise CaptureError(f"{source}: the file's head is damaged. Delete the file or copy it again")
    if len(payload) != head["num_bytes"]:
        raise CaptureError(
            f"{source}: {'truncated' if len(payload) < head['num_bytes'] else 'damaged'}: {head['num_bytes']} bytes "
            f"were written after the head, {len(payload)} are here. Delete the file or copy it again"
        )
    if zlib.crc32(payload) != head["crc32"]:
        raise CaptureError(f"{source}: the checksum is wrong: the file is damaged. Delete it or copy it again")


def describe_other_format(source: str, file_format: object) -> str:
    """Say that a file has another format than this version reads."""
    advice = "Upgrade micro-replay to read it"
    return f"{source}: format {repr(file_format)[:20]}; this version reads format {FORMAT}. {advice}"
