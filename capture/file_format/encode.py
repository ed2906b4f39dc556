"""One forward as the bytes of a format 1 file: what `capture/file_format/capture_file.py` reads is made here."""

import pickle
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from capture.file_format.micro_batch import Origin, check_call
from capture.file_format.plain_data import plain_copy
from capture.file_format.safe_unpickler import load_plain
from capture.file_format.tensor_codec import check_total, encode_tensor, size_in_bytes

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedCall:
    """One forward as it will be written; `body` is plain data and may still get outputs."""

    rank: int
    step: int
    time: str
    body: dict[str, Any]

    def parts(self) -> tuple[bytes, bytes]:
        """The file's two pickles."""
        payload = pickle.dumps(self.body, protocol=5)
        head = {"format": FORMAT, "num_bytes": len(payload), "crc32": zlib.crc32(payload)}
        return pickle.dumps(head, protocol=5), payload

    def new_path(self, folder: Path) -> Path:
        """Names of a rank sort by time, then step; a name that is taken gets the next free step."""
        step = self.step
        while (path := folder / _file_name(self.rank, self.time, step)).exists():
            step += 1
        return path


def encode_call(
    tensors: Mapping[str, Tensor],
    call_facts: Mapping[str, Any],
    *,
    trains: bool,
    origin: Origin,
    left_out: Mapping[str, str] | None = None,
    random: Mapping[str, Mapping[str, Any]] | None = None,
    environment: Mapping[str, str] | None = None,
    weights: str | None = None,
    optimizer_step: int | None = None,
) -> EncodedCall:
    """Raises CaptureError for a call that could not be read back, TypeError for a call fact that is not plain data."""
    time = origin.time or utc_time()
    name = _file_name(origin.rank or 0, time, origin.step or 0)
    origin = replace(origin, source=name, time=time)
    check_total(sum(size_in_bytes(tensor.shape, tensor.dtype) for tensor in tensors.values()), name)
    check_call(tensors, call_facts, trains=trains, origin=origin)
    written_origin = asdict(origin)
    del written_origin["source"]
    body = {
        "tensors": {key: encode_tensor(tensor) for key, tensor in tensors.items()},
        "call_facts": plain_copy(dict(call_facts)),
        "left_out": plain_copy(dict(left_out or {})),
        "trains": trains,
        "origin": plain_copy(written_origin),
    }
    body |= {"random": plain_copy(dict(random))} if random else {}
    body |= {"environment": plain_copy(dict(environment))} if environment else {}
    body |= {"weights": weights} if weights else {}
    body |= {} if optimizer_step is None else {"optimizer_step": optimizer_step}
    encoded = EncodedCall(rank=origin.rank or 0, step=origin.step or 0, time=time, body=body)
    load_plain(encoded.parts()[1], source=name)
    return encoded


def utc_time() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _file_name(rank: int, time: str, step: int) -> str:
    compact = datetime.fromisoformat(time).astimezone(UTC).strftime("%Y%m%d_%H%M%S_%f")
    return f"actor_inputs_rank{rank}_{compact}_{step:08d}.pkl"


def other_format(source: str, written: object) -> str:
    return f"{source}: format {repr(written)[:20]}; this version reads format {FORMAT}. Upgrade micro-replay to read it"
