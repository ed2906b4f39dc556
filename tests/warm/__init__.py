"""Python processes that have already imported what every replay imports.

Most of the processor time of a test that starts a replay is spent on imports: some five seconds a process, and a
launcher is a process too. Here one process a test session imports them once and forks for each program that is asked
of it. `warm_bin()` is a folder of stand-ins for `python`, `torchrun`, `deepspeed` and `replay`: each is a small process
that has a program run in a fork, with its own arguments, environment, folder and standard streams, passes signals on
to it and ends as it ended. `sys.executable` of the fork is the stand-in, so what a launcher starts is warm as well.

What is proved about launchers, console scripts and imports themselves needs real processes: tests/test_commands.py.
"""

import atexit
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent
COLD_BIN = Path(sys.executable).parent
SCRIPTS = ("torchrun", "deepspeed", "replay")
PADDING = "-" * 4096  # of the server's command line: a fork writes its own there


@cache
def warm_bin(more_imports: tuple[str, ...] = ()) -> Path:
    """The folder of the stand-ins; the real one on a machine with GPUs: CUDA does not survive a fork.

    more_imports  modules that are imported on top of a replay's; each choice has a server of its own
    """
    if torch.cuda.is_available():
        return COLD_BIN
    folder = Path(tempfile.mkdtemp(prefix="warm"))  # the server removes it
    address = folder / "socket"
    stand_in = (Path(__file__).parent / "stand_in.py").read_text()
    for name in ("python", *SCRIPTS):
        first = [] if name == "python" else [str(COLD_BIN / name)]
        path = folder / name
        path.write_text(f"#!{sys.executable} -IS\n{stand_in}\nmain({str(address)!r}, {first!r})\n")
        path.chmod(0o700)
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.warm.server", str(address), str(folder / "python"), PADDING, *more_imports],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,  # the server ends when this end of it is gone
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert "ready\n" in server.stdout, "the server of warm processes did not start"
    atexit.register(server.communicate)
    return folder
