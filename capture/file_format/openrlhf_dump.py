"""Read the unversioned dumps of OpenRLHF's actor: a pickled dict of tensors and call facts, without a checksum.

Their tensors name three functions; `capture/file_format/saved_tensors.py` has stand-ins for them.
"""

from torch import Tensor

from capture.file_format.micro_batch import CaptureError, MicroBatch, Origin, micro_batch_from_call
from capture.file_format.safe_unpickler import load_plain, plain_copy
from capture.file_format.saved_tensors import SavedTensors


def read_legacy(data: bytes, source: str) -> MicroBatch:
    """Read a whole file, given as `data`. Raises CaptureError for everything that is no such dump."""
    dump, end = load_plain(data, source=source, names=SavedTensors(source).names)
    if end != len(data):
        raise CaptureError(f"{source}: {len(data) - end} bytes after the end of the dump: the file is damaged")
    if not isinstance(dump, dict):
        raise CaptureError(f"{source}: a pickled {type(dump).__name__} is no micro-batch; a dump is a dict")
    tensors = {name: value for name, value in dump.items() if isinstance(value, Tensor)}
    try:
        facts = {name: plain_copy(value) for name, value in dump.items() if name not in tensors}
    except TypeError as error:
        raise CaptureError(f"{source}: holds a {error}; a dump holds tensors and plain data") from None
    return _micro_batch(tensors, facts, source)


def _micro_batch(tensors: dict[str, Tensor], facts: dict[str, object], source: str) -> MicroBatch:
    trains = facts.get("return_output")
    rank, time = facts.pop("rank", None), facts.pop("timestamp", None)
    if type(trains) is not bool or "sequences" not in tensors:
        raise CaptureError(
            f"{source}: a pickle without `format`, and not a dump of OpenRLHF's actor either: such a dump has a tensor "
            f"`sequences` and `return_output` True or False; this has {str(sorted((*tensors, *facts)))[:200]}"
        )
    if not isinstance(rank, int | None) or not isinstance(time, str | None):
        raise CaptureError(f"{source}: rank must be an integer and timestamp a text, not {rank!r:.40} and {time!r:.40}")
    written_shape = [facts.pop(name, None) for name in ("batch_size", "seq_len")]
    for size, written in zip(tensors["sequences"].shape, written_shape, strict=False):
        if written not in (None, size):
            raise CaptureError(
                f"{source}: batch_size, seq_len say {written_shape}, "
                f"the token ids have shape {list(tensors['sequences'].shape)}: the file is damaged"
            )
    origin = Origin(source=source, rank=rank, time=time)
    return micro_batch_from_call(tensors, facts, trains=trains, origin=origin)
