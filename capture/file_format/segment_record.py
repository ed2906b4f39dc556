"""What a segment and its index know of one pass without opening it: 128 bytes, little-endian.

    magic, offset, num_bytes, crc32, number, time, flags, rows, row_length, real_tokens, action_tokens, empty_rows,
    optimizer_step, window, 0, crc32 of these

Each is an integer of 8 bytes; `time` counts microseconds since 1970, and what is not known is -1.
"""

import hashlib
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

import torch
from torch import Tensor

from capture.file_format.micro_batch import MAX_TOKENS, CaptureError, MicroBatch

RECORD_BYTES = 128
MAGIC = b"\x93pass\r\n\x01"
NUM_COLUMNS = 16
_LAYOUT = struct.Struct("<8s14qQ")
assert _LAYOUT.size == RECORD_BYTES
COLUMN = {
    name: number
    for number, name in enumerate(
        (
            *("magic", "offset", "num_bytes", "crc32", "number", "time", "flags", "rows", "row_length"),
            *("real_tokens", "action_tokens", "empty_rows", "optimizer_step", "window"),
        )
    )
}
TRAINS, HAS_TOKENS, NON_FINITE, HAS_GRADIENTS, IS_NUMBERED = (1 << bit for bit in range(5))
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
# Numbers above these are none that a recorder writes; the time's is that of the year 10000.
_UPPER_LIMITS = {
    "offset": 2**53,
    "num_bytes": 2**32,
    "number": 2**53,
    "time": 253_402_300_800 * 10**6,
    **dict.fromkeys(("rows", "row_length", "real_tokens", "action_tokens", "empty_rows"), MAX_TOKENS + 1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Rows and tokens of a micro-batch.

    row_length     tokens of a row, padding included
    action_tokens  None without an action mask
    empty_rows     rows without a real token
    """

    rows: int
    row_length: int
    real_tokens: int
    action_tokens: int | None
    empty_rows: int

    @classmethod
    def from_batch(cls, batch: MicroBatch) -> "Counts":
        real_B = batch.attention_mask_BS.sum(1)
        return cls(
            rows=batch.num_rows,
            row_length=batch.sequences_BS.shape[1],
            real_tokens=int(real_B.sum()),
            action_tokens=None if batch.action_mask_BA is None else int(batch.action_mask_BA.sum()),
            empty_rows=int((real_B == 0).sum()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRecord:
    """One pass in a segment.

    offset          offset of this record in the segment; the pass follows it
    crc32           checksum of the pass
    number          number of the forward, as in the capture's name
    time            microseconds since 1970
    forward         `number`, or None if the capture does not say it
    counts          None for a call with embeddings in the place of token ids
    has_non_finite  one of its outputs is not finite
    window          `digest_window` of the passes that went into the step after it; None if it was not the last of one
    """

    offset: int
    num_bytes: int
    crc32: int
    number: int
    time: int
    forward: int | None
    trains: bool
    counts: Counts | None
    has_non_finite: bool
    has_gradients: bool
    optimizer_step: int | None
    window: int | None

    @property
    def end(self) -> int:
        """Return the offset of what follows the pass."""
        return self.offset + RECORD_BYTES + self.num_bytes

    def pack(self) -> bytes:
        """Return the record's RECORD_BYTES, in the layout that this module's docstring describes."""
        flags = self.trains * TRAINS | (self.counts is not None) * HAS_TOKENS | self.has_non_finite * NON_FINITE
        flags |= self.has_gradients * HAS_GRADIENTS | (self.forward is not None) * IS_NUMBERED
        counts = self.counts or Counts(rows=0, row_length=0, real_tokens=0, action_tokens=None, empty_rows=0)
        packed = _LAYOUT.pack(
            *(MAGIC, self.offset, self.num_bytes, self.crc32, self.number, self.time, flags, counts.rows),
            *(counts.row_length, counts.real_tokens, _encode_optional(counts.action_tokens), counts.empty_rows),
            *(_encode_optional(self.optimizer_step), _encode_optional(self.window), 0, 0),
        )[:-8]
        return packed + zlib.crc32(packed).to_bytes(8, "little")

    @classmethod
    def unpack_checked(cls, data: bytes) -> "SegmentRecord":
        """Read what `pack` wrote. Raises CaptureError for anything else."""
        if len(data) != RECORD_BYTES or not data.startswith(MAGIC) or not are_records(data):
            raise CaptureError("no record of a pass")
        return cls.unpack(data)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> "SegmentRecord":
        """Read a record that is known to be one."""
        _, offset, num_bytes, crc32, number, time, flags, rows, row_length, real, action, empty, step, window, _, _ = (
            _LAYOUT.unpack(data)
        )
        counts = Counts(
            rows=rows,
            row_length=row_length,
            real_tokens=real,
            action_tokens=None if action < 0 else action,
            empty_rows=empty,
        )
        return cls(
            offset=offset,
            num_bytes=num_bytes,
            crc32=crc32,
            number=number,
            time=time,
            forward=number if flags & IS_NUMBERED else None,
            trains=bool(flags & TRAINS),
            counts=counts if flags & HAS_TOKENS else None,
            has_non_finite=bool(flags & NON_FINITE),
            has_gradients=bool(flags & HAS_GRADIENTS),
            optimizer_step=None if step < 0 else step,
            window=None if window < 0 else window,
        )


def are_records(data: bytes | bytearray | memoryview) -> bool:
    """Tell whether these are whole records, one after the other, with right checksums and possible numbers."""
    if len(data) % RECORD_BYTES:
        return False
    if not len(data):
        return True
    view, table = memoryview(data), as_table(data)
    starts = range(0, len(data), RECORD_BYTES)
    checksums = array("q", (zlib.crc32(view[start : start + RECORD_BYTES - 8]) for start in starts))
    magic = int.from_bytes(MAGIC, "little", signed=True)
    return (
        torch.equal(table[:, -1], torch.frombuffer(checksums, dtype=torch.int64))
        and bool((table[:, 0] == magic).all())
        and bool((table[:, 1:6] >= 0).all())
        and all(
            bool(((column := table[:, COLUMN[name]]) >= -1).all() and (column < limit).all())
            for name, limit in _UPPER_LIMITS.items()
        )
    )


def as_table(records: bytes | bytearray | memoryview) -> Tensor:
    """Return records as an int64 tensor of shape [records, NUM_COLUMNS]; COLUMN numbers its columns by name."""
    if not len(records):
        return torch.empty(0, NUM_COLUMNS, dtype=torch.int64, device="cpu")
    writable = records if isinstance(records, bytearray) else bytearray(records)
    return torch.frombuffer(writable, dtype=torch.int64).view(-1, NUM_COLUMNS)


def to_microseconds(time: str) -> int:
    """Turn an ISO 8601 time into microseconds since 1970."""
    return (datetime.fromisoformat(time).astimezone(timezone.utc) - _EPOCH) // timedelta(microseconds=1)


def from_microseconds(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)


def digest_window(passes: Sequence[int | None]) -> int:
    """Name a sequence of forwards by 62 bits, which fit into a record's signed integer and leave -1 for none."""
    text = ",".join(map(str, passes)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


def _encode_optional(value: int | None) -> int:
    return -1 if value is None else value
