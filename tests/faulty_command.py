"""`replay` in one process, with a fault of its actor: `python -m tests.faulty_command NAME ARGUMENTS`, or `none`."""

import sys
from contextlib import nullcontext
from typing import Any

from replay.cli import leave, main
from tests.faults import FAULTS
from tests.more_faults import MORE_FAULTS

ALL = {**FAULTS, **MORE_FAULTS}

if __name__ == "__main__":
    name, *sys.argv[1:] = sys.argv[1:]
    not_open_yet: Any = None
    with ALL[name].breaks(not_open_yet) if name != "none" else nullcontext():
        code = main()
    leave(code)
