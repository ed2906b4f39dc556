"""Write files of which readers see all or nothing, remove temporaries that dead processes left, and read files."""

import itertools
import os
import platform
import re
import secrets
import time
import zlib
from pathlib import Path

from capture.file_format.micro_batch import CaptureError

HOST = f"{zlib.crc32(platform.node().encode()):08x}"
_TOKEN = secrets.token_hex(4)  # tells this process from a dead one of the same number
_number = itertools.count()
_TEMPORARY = re.compile(r"^\.(?P<name>.+)\.(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-(?P<token>[0-9a-f]{8})-\d+\.tmp$")
OTHER_HOSTS_SECONDS = 3600.0  # by then what another host may have been writing is a dead process's


def write_atomically(path: Path, *parts: bytes) -> None:
    """Write a file with mode 0600, of which readers see all or nothing. Raises OSError; then there is no new file."""
    temporary = path.parent / f".{path.name}.{HOST}-{os.getpid()}-{_TOKEN}-{next(_number)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Read a whole file. Raises CaptureError if it cannot be read, is no file, or is larger than `max_bytes`."""
    try:
        if not path.is_file():  # opening a pipe would wait forever
            raise CaptureError(f"{path}: no such file")
        with open(path, "rb") as file:
            data = file.read(min(max_bytes, path.stat().st_size) + 1)  # memory for that many bytes is allocated at once
    except OSError as error:
        raise CaptureError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise CaptureError(f"{path.name}: larger than {max_bytes} bytes, which no capture is")
    return data


def remove_stale_temporaries(folder: Path, rank: int) -> None:
    """Remove temporaries of this rank, and of files that ranks share, if their process is gone. Raises OSError."""
    for entry in list(os.scandir(folder)):
        match = _TEMPORARY.match(entry.name)
        if match is None or ((ranked := re.search(r"_rank(\d+)_", match["name"])) and int(ranked[1]) != rank):
            continue
        try:
            if _is_stale(match, entry, is_shared=ranked is None):
                os.unlink(entry.path)
        except FileNotFoundError:  # another rank was quicker
            continue


def _is_stale(match: re.Match[str], entry: "os.DirEntry[str]", *, is_shared: bool) -> bool:
    if match["host"] != HOST:
        return not is_shared or time.time() - entry.stat().st_mtime > OTHER_HOSTS_SECONDS
    if int(match["pid"]) == os.getpid():
        return match["token"] != _TOKEN
    try:
        os.kill(int(match["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
