"""Which temporaries a recording removes: those whose process is gone, of its own rank or of files that ranks share."""

import os
import time
from pathlib import Path

import pytest

from capture.file_format.atomic_write import (
    HOST_DIGEST,
    OTHER_HOST_SECONDS,
    choose_temporary_path,
    remove_stale_temporaries,
    remove_temporaries_of_host,
    write_atomically,
)

OTHER_HOST = "0000abcd" if HOST_DIGEST != "0000abcd" else "0000abce"
# No process has the first of these numbers: Linux allows no more than 2**22.
PROCESSES = {"gone": 2**22 + 1, "other": os.getppid(), "own": os.getpid()}
GONE = PROCESSES["gone"]
OF_RANK, OF_OTHER_RANK, SHARED = "end_rank3_x.json", "end_rank30_x.json", "actor.json"


@pytest.mark.parametrize(
    ("name", "host", "process", "age", "stays"),
    [
        (OF_RANK, HOST_DIGEST, "gone", 0.0, False),
        (SHARED, HOST_DIGEST, "gone", 0.0, False),
        (OF_OTHER_RANK, HOST_DIGEST, "gone", 9e9, True),
        (OF_RANK, HOST_DIGEST, "other", 9e9, True),
        # An earlier process had this one's number.
        (OF_RANK, HOST_DIGEST, "own", 0.0, False),
        # The rank runs here now, so nobody writes its files elsewhere.
        (OF_RANK, OTHER_HOST, "own", 0.0, False),
        (OF_OTHER_RANK, OTHER_HOST, "gone", 9e9, True),
        (SHARED, OTHER_HOST, "gone", OTHER_HOST_SECONDS - 600, True),
        (SHARED, OTHER_HOST, "gone", OTHER_HOST_SECONDS + 600, False),
    ],
)
def test_a_temporary_is_removed_if_nobody_writes_it_any_more(
    name: str, host: str, process: str, age: float, stays: bool, tmp_path: Path
) -> None:
    temporary = tmp_path / f".{name}.{host}-{PROCESSES[process]}-01234567-4.tmp"
    temporary.touch()
    written = max(0.0, time.time() - age)
    os.utime(temporary, (written, written))
    own = choose_temporary_path(tmp_path / OF_RANK)
    others = [own, tmp_path / OF_RANK, tmp_path / ".hidden", tmp_path / f".{name}.tmp"]
    for path in others:
        path.touch()
    remove_stale_temporaries(tmp_path, 3)
    assert temporary.exists() == stays
    assert all(path.exists() for path in others)


def test_of_a_host_all_that_its_dead_processes_left_is_removed_and_of_others_nothing(tmp_path: Path) -> None:
    home = tmp_path / "rank30"
    home.mkdir()
    paths = {
        (host, process): home / f".{OF_OTHER_RANK}.{host}-{process}-01234567-0.tmp"
        for host in (HOST_DIGEST, OTHER_HOST)
        for process in (GONE, os.getppid())
    }
    for path in paths.values():
        path.touch()
        os.utime(path, (0, 0))
    remove_temporaries_of_host(tmp_path)
    assert [key for key, path in paths.items() if not path.exists()] == [(HOST_DIGEST, GONE)]


def test_a_file_is_replaced_whole_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "actor.json"
    for parts in ((b"a long first version",), (b"sec", b"", b"ond")):
        write_atomically(path, *parts)
        assert path.read_bytes() == b"".join(parts)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    names = {choose_temporary_path(path) for _ in range(3)}
    assert len(names) == 3
    assert all(name.parent == tmp_path and name.name.startswith(".actor.json.") for name in names)
