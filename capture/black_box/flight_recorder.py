"""Keep the flight recorder's passes in shared memory too, where they outlive SIGKILL, SIGABRT and `os._exit`.

    /dev/shm/capture-<user>-<folder>-rank<r>-<process>/actor_inputs_rank<r>_<time>_<step>.pkl

This memory belongs to the host. If the process dies, the next recording on the host into the same folder writes the
passes there, and so do `capture salvage FOLDER`, `replay inspect FOLDER` and `capture collect FOLDER`, which hold the
directory's lock meanwhile. The process itself holds the lock while it lives. That tells other containers that it is
alive: there, its number may be that of another process.
"""

import fcntl
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from capture.file_format.capture_file import EncodedCall, read_call
from capture.file_format.micro_batch import CaptureError
from capture.file_format.safe_unpickler import load_plain

SHARED_MEMORY = Path("/dev/shm")
# Files beside the passes.
POSITION_FILE, STACKS_FILE = "position", "stacks.txt"
MAX_SPOOL_BYTES = 256 * 2**20
# A spool takes at most one part in so many of the free memory: a job's data loaders and collectives need it too.
_FREE_MEMORY_PARTS = 8
# Directories of this process, and the descriptors that hold their locks.
_locks: dict[Path, int] = {}


class SharedFolder:
    """One recording's directory in shared memory, locked until `close`. Raises OSError where it cannot be made."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.directory = SHARED_MEMORY / f"{format_directory_prefix(folder)}{rank}-{os.getpid()}-{secrets.token_hex(4)}"
        self.directory.mkdir(mode=0o700)
        _locks[self.directory] = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(_locks[self.directory], fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the directory. A second call does nothing."""
        if (lock := _locks.pop(self.directory, None)) is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(lock)


class Spool:
    """One recording's passes in shared memory; a full one deletes its oldest pass. A pass larger than it is left out.

    It is for one thread. Every method raises OSError.
    """

    def __init__(self, shared: SharedFolder) -> None:
        self._directory = shared.directory
        status = os.statvfs(SHARED_MEMORY)
        self._max_bytes = min(MAX_SPOOL_BYTES, status.f_bavail * status.f_frsize // _FREE_MEMORY_PARTS)
        # Sizes of the passes by name, the oldest first.
        self._sizes: dict[str, int] = {}
        self._num_bytes = 0

    def put(self, encoded: EncodedCall) -> None:
        """Write the pass as it is now, in the place of an earlier version of it."""
        parts = encoded.pickle_parts()
        self.remove(encoded)
        num_bytes = sum(len(part) for part in parts)
        # To delete the others would make no room for it.
        if num_bytes > self._max_bytes:
            return
        while self._num_bytes + num_bytes > self._max_bytes:
            self._remove(next(iter(self._sizes)))
        target = os.path.join(self._directory, encoded.name)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.writelines(parts)
        self._sizes[encoded.name] = num_bytes
        self._num_bytes += num_bytes

    def remove(self, encoded: EncodedCall) -> None:
        if encoded.name in self._sizes:
            self._remove(encoded.name)

    def _remove(self, name: str) -> None:
        self._num_bytes -= self._sizes.pop(name)
        os.unlink(os.path.join(self._directory, name))

    def close(self) -> None:
        while self._sizes:
            name = self._sizes.popitem()[0]
            with suppress(OSError):
                os.unlink(os.path.join(self._directory, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadSpool:
    """What a dead process had in shared memory. `num_cut_short` passes were being written when it died."""

    rank: int
    directory: Path
    calls: list[EncodedCall]
    num_cut_short: int


def find_dead_spools(folder: Path) -> Generator[DeadSpool, None, None]:
    """Find what dead processes of this host that recorded into `folder` had in shared memory. Raises OSError.

    Each is locked until the next one is asked for: no other process salvages it meanwhile.
    """
    if not SHARED_MEMORY.is_dir():
        return
    directory_name = re.compile(re.escape(format_directory_prefix(folder)) + r"(\d+)-(\d+)-[0-9a-f]{8}")
    for directory in sorted(SHARED_MEMORY.iterdir()):
        match = directory_name.fullmatch(directory.name)
        if match is None:
            continue
        with _lock_if_dead(directory, int(match[2])) as is_dead:
            if not is_dead:
                continue
            calls, num_cut_short = [], 0
            for path in sorted(directory.iterdir()):
                if path.name in (POSITION_FILE, STACKS_FILE):
                    continue
                try:
                    calls.append(_read_encoded_call(path))
                except CaptureError:
                    num_cut_short += 1
            yield DeadSpool(rank=int(match[1]), directory=directory, calls=calls, num_cut_short=num_cut_short)


def _read_encoded_call(path: Path) -> EncodedCall:
    call = read_call(path)
    data = path.read_bytes()
    _, start = load_plain(data, source=path.name)
    body, _ = load_plain(data, source=path.name, start=start)
    rank, step, time = call.origin.rank or 0, call.origin.step or 0, str(call.origin.time)
    return EncodedCall(rank=rank, step=step, time=time, body=body, counts=call.count())


def format_directory_prefix(folder: Path) -> str:
    """Return how the names of the directories begin that hold the flight recorders of a folder's ranks."""
    return f"capture-{os.getuid()}-{zlib.crc32(os.fsencode(os.path.realpath(folder))):08x}-rank"


@contextmanager
def _lock_if_dead(directory: Path, process: int) -> Iterator[bool]:
    """Hold the directory's lock if nobody else does, and tell whether its process is dead."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # Its recording has just been closed, and has removed it.
        yield False
        return
    try:
        yield _is_dead(descriptor, directory, process)
    finally:
        os.close(descriptor)


def _is_dead(descriptor: int, directory: Path, process: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Another process may have salvaged and removed it just before it was locked.
    if not directory.exists():
        return False
    # In a container, a process often gets the number of an earlier one: that a process with this process's own number
    # runs tells nothing about the owner of the directory.
    return process == os.getpid() or not _is_running(process)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _close_locks_in_child() -> None:
    """Close the locks in a forked child, such as a data loader, which may outlive the process that owns them."""
    while _locks:
        os.close(_locks.popitem()[1])


os.register_at_fork(after_in_child=_close_locks_in_child)
