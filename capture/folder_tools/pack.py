"""Pack a folder of captures into one zip file of limited size."""

import os
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from capture.file_format.actor_config import ACTOR_CONFIG_NAME
from capture.file_format.manifest import check_folder
from capture.file_format.micro_batch import CaptureError


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """The zip file that `pack_folder` wrote."""

    path: Path
    num_bytes: int
    num_files: int
    left_out: list[str]  # captures that would not have fitted, in recorded order


def pack_folder(folder: Path, target: Path, *, max_bytes: int) -> Package:
    """Pack as many captures as fit, in recorded order, with actor.json and the manifests; all or nothing is written.

    Files keep their names in a folder named like the zip. Raises CaptureError if the folder is damaged, the target is
    there already, or not even one capture fits; OSError.
    """
    if target.exists():
        raise CaptureError(f"{target} exists already. Give another name, or delete it")
    checked = check_folder(folder)
    if not checked.is_whole:
        raise CaptureError(f"{folder} is not whole. Try: capture check {folder}")
    extra = [folder / ACTOR_CONFIG_NAME, *sorted(folder.glob("manifest_rank*.json"))]
    extra = [path for path in extra if path.exists()]
    chosen: list[str] = []
    descriptor, temporary = tempfile.mkstemp(dir=target.absolute().parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(descriptor)
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as package:
            for path in extra:
                package.write(path, f"{target.stem}/{path.name}")
            for name in checked.good:
                path = folder / name
                room = max_bytes - _size_so_far(package) - path.stat().st_size - _OVERHEAD_BYTES - 2 * len(name)
                if room < 0:
                    break
                package.write(path, f"{target.stem}/{name}")
                chosen.append(name)
        num_bytes = os.stat(temporary).st_size
        if not chosen:
            raise CaptureError(f"not one capture of {folder} fits into {max_bytes} bytes. Try: a larger --max-bytes")
        assert num_bytes <= max_bytes
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return Package(path=target, num_bytes=num_bytes, num_files=len(chosen), left_out=checked.good[len(chosen) :])


_OVERHEAD_BYTES = 1024  # for a file's two headers and the end of the directory


def _size_so_far(package: zipfile.ZipFile) -> int:
    """Compute the bytes that are written, with the directory that will follow."""
    assert package.fp is not None
    return package.fp.tell() + sum(46 + len(info.filename) + len(info.extra) for info in package.infolist())
