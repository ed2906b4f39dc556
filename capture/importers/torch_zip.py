"""Read what `torch.save` writes since torch 1.6: a zip of `data.pkl` and one file for the elements of each storage.

torch never compresses, so what is read is no larger than the file; a compressed part is refused.
"""

import io
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch

from capture.file_format.micro_batch import CaptureError
from capture.file_format.saved_tensors import STORAGE_NAMES
from capture.importers.record_pickle import load_records, open_saved_tensors

ZIP_START = b"PK\x03\x04"


def load_torch_zip(
    data: bytes,
    *,
    source: str,
    functions: Mapping[tuple[str, str], Callable[..., Any]] | None = None,
) -> Any:
    """Read the object that was saved: plain data, and tensors as CPU tensors. `functions` as in `load_records`.

    Raises CaptureError for a file that is damaged, compressed, or holds anything else.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _load(archive, len(data), source, functions or {})
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(f"{source}: no file of torch.save, or a damaged one: {str(error)[:100]}") from None


def _load(
    archive: zipfile.ZipFile, num_bytes: int, source: str, functions: Mapping[tuple[str, str], Callable[..., Any]]
) -> Any:
    parts = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    saved = open_saved_tensors(num_bytes, source)
    storages: dict[str, Any] = {}

    def read_part(name: str) -> bytes:
        info = parts.get(name)
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size > num_bytes:
            raise CaptureError(f"{source}: has no {name[:40]!r}, or a compressed one, which torch does not write")
        return archive.read(info)

    def load_storage(persistent_id: Any) -> Any:
        match persistent_id:
            case ("storage", torch.dtype() as dtype, str(key), str(), int(num_elements)):
                if key not in storages:
                    storages[key] = saved.make_storage(read_part(f"data/{key}"), dtype, num_elements)
                return storages[key]
        raise CaptureError(f"{source}: refused: a persistent id that is no storage")

    if "byteorder" in parts and read_part("byteorder") != b"little":
        raise CaptureError(f"{source}: was written by a machine that is not little-endian")
    return load_records(
        read_part("data.pkl"),
        source=source,
        functions=functions,
        saved=saved,
        persistent_load=load_storage,
        constants=STORAGE_NAMES,
    )
