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

HOST_DIGEST = f"{zlib.crc32(platform.node().encode()):08x}"
# It tells this process from a dead one that had the same process id.
_TOKEN = secrets.token_hex(4)
_temporary_numbers = itertools.count()
_TEMPORARY = re.compile(r"^\.(?P<name>.+)\.(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-(?P<token>[0-9a-f]{8})-\d+\.tmp$")
# Whether a process of another host is alive cannot be seen. What it has not changed for so long, it no longer writes.
OTHER_HOST_SECONDS = 3600.0


def choose_temporary_path(path: Path) -> Path:
    """Choose a name beside `path` to write the file under until it is whole. Readers pass such names over."""
    return path.parent / f".{path.name}.{HOST_DIGEST}-{os.getpid()}-{_TOKEN}-{next(_temporary_numbers)}.tmp"


def write_atomically(path: Path, *parts: bytes) -> None:
    """Write a file with mode 0600, of which readers see all or nothing. Raises OSError; then there is no new file."""
    temporary = choose_temporary_path(path)
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
        # Opening a pipe would wait forever.
        if not path.is_file():
            raise CaptureError(f"{path}: no such file")
        with open(path, "rb") as file:
            # Memory for as many bytes as `read` is given is allocated at once, so it is given no more than there are.
            data = file.read(min(max_bytes, path.stat().st_size) + 1)
    except OSError as error:
        raise CaptureError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise CaptureError(f"{path.name}: larger than {max_bytes} bytes, which no capture is")
    return data


def remove_stale_temporaries(folder: Path, rank: int) -> None:
    """Remove temporaries of this rank, and of files that ranks share, if their process is gone. Raises OSError."""
    for file in list(os.scandir(folder)):
        match = _TEMPORARY.match(file.name)
        if match is None:
            continue
        rank_match = re.search(r"_rank(\d+)_", match["name"])
        if rank_match is not None and int(rank_match[1]) != rank:
            continue
        try:
            if _is_stale(match, file, is_shared=rank_match is None):
                os.unlink(file.path)
        except FileNotFoundError:
            # It is gone by now: another rank has removed it, or its writer has given it its final name.
            continue


def remove_temporaries_of_host(folder: Path) -> None:
    """Remove the temporaries below a folder that processes of this host left, and that are gone. Raises OSError."""
    for path in folder.rglob(".*.tmp"):
        match = _TEMPORARY.match(path.name)
        if match is not None and match["host"] == HOST_DIGEST and _is_process_gone(match):
            path.unlink(missing_ok=True)


def _is_stale(match: re.Match[str], file: "os.DirEntry[str]", *, is_shared: bool) -> bool:
    """Tell whether the process that wrote a temporary is gone.

    A file of this rank that another host wrote is stale: the rank now runs on this host.
    """
    if match["host"] != HOST_DIGEST:
        return not is_shared or time.time() - file.stat().st_mtime > OTHER_HOST_SECONDS
    return _is_process_gone(match)


def _is_process_gone(match: re.Match[str]) -> bool:
    """Tell whether the process of this host that wrote a temporary is gone."""
    if int(match["pid"]) == os.getpid():
        return match["token"] != _TOKEN
    try:
        os.kill(int(match["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
