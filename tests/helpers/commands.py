"""Run `replay` and the launchers as a user would."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.helpers.ports import free_port
from tests.helpers.replay_worker import PATIENCE
from tests.warm import GRAPHS, warm_bin

ROOT = Path(__file__).parents[2]


BIN = Path(sys.executable).parent


LIMIT = 1800  # seconds; a run takes about ten, where nothing else runs


def port_for(program: str) -> list[str]:
    """Return what gives a launcher a port of its own; nothing for another program.

    Tests run side by side, and both launchers would take port 29500 for each (torchrun before torch 2.13).
    """
    return ["--master_port", str(free_port())] if Path(program).name in ("deepspeed", "torchrun") else []


def run(
    command: str, log_folder: Path, *, cold: bool = False, graphs: bool = False
) -> subprocess.CompletedProcess[str]:
    """As it is typed, but for the launcher's port and --timeout; unless it is `cold`, all imports are there already.

    With `graphs`, what is compiled has graphs alone; not if `cold`.
    """
    program, *arguments = shlex.split(command)
    return subprocess.run(
        [program, *port_for(program), *arguments, "--log-folder", str(log_folder), *PATIENCE],
        cwd=ROOT,
        env=os.environ
        | {"PATH": f"{BIN if cold else warm_bin()}{os.pathsep}{os.environ['PATH']}"}
        | ({GRAPHS: "1"} if graphs else {}),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
