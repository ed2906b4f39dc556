"""Python processes that have already imported what every replay imports.

Most of the processor time of a test that starts a replay is spent on imports: some five seconds a process, and a
launcher is a process too. Here one process a test session, for all of pytest's workers, imports them once and forks for
each program that is asked of it. `warm_bin()` is a folder of stand-ins for `python`, `torchrun`, `deepspeed` and
`replay`: each is a small process that has a program run in a fork, with its own arguments, environment, folder and
standard streams, passes signals on to it and ends as it ended. `sys.executable` of the fork is the stand-in, so what a
launcher starts is warm as well.

What is proved about launchers, console scripts and imports themselves needs real processes: tests/test_commands.py.
"""

import atexit
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
COLD_BIN = Path(sys.executable).parent
SCRIPTS = ("torchrun", "deepspeed", "replay")
PADDING = "-" * 4096  # of the server's command line: a fork writes its own there
# Objects before a collection, and collections before one of the older objects: with Python's own (700, 10, 10) a
# twentieth of the tests' time is spent on looking for garbage, most of it in vain.
GARBAGE_THRESHOLDS = 100_000, 20, 20
HOME, OWNER = "WARM_HOME", "WARM_OWNER"  # variables that tests/conftest.py sets: a folder, and the session's process
GRAPHS = "WARM_GRAPHS"  # variable of a program: what it compiles has graphs alone, and no kernels


@cache
def warm_bin(more_imports: tuple[str, ...] = ()) -> Path:
    """The folder of the stand-ins; the real one on a machine with GPUs: CUDA does not survive a fork.

    more_imports  modules that are imported on top of a replay's; each choice has a server of its own
    """
    import torch

    if torch.cuda.is_available():
        return COLD_BIN
    home = Path(os.environ.get(HOME) or _home_of_this_process())
    folder = home / f"warm-{zlib.crc32(repr(more_imports).encode()):x}"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _start_server(folder, more_imports)
    return folder


def _cold_script(name: str) -> Path:
    """The script beside this Python; where a package was installed for another folder, the one on PATH."""
    beside, on_path = COLD_BIN / name, shutil.which(name)
    return beside if beside.exists() or on_path is None else Path(on_path)


def _home_of_this_process() -> str:
    home = tempfile.mkdtemp(prefix="warm")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


def _start_server(folder: Path, more_imports: tuple[str, ...]) -> None:
    """Start one that ends, and removes the folder, when the session's process has ended."""
    address, owner = folder / "socket", os.environ.get(OWNER, str(os.getpid()))
    folder.mkdir()
    stand_in = (Path(__file__).parent / "stand_in.py").read_text()
    for name in ("python", *SCRIPTS):
        first = [] if name == "python" else [str(_cold_script(name))]
        path = folder / name
        path.write_text(f"#!{sys.executable} -IS\n{stand_in}\nmain({str(address)!r}, {first!r})\n")
        path.chmod(0o700)
    program = [sys.executable, "-u", "-m", "tests.warm.server"]
    server = subprocess.Popen(
        [*program, str(address), str(folder / "python"), owner, PADDING, *more_imports],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    if "ready\n" not in server.stdout:
        # The next test that asks finds no folder, and is told the same, not that a socket refuses.
        shutil.rmtree(folder)
        raise RuntimeError("the server of warm processes did not start: standard error says why")
