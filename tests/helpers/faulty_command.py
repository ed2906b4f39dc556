"""Run `replay` with a fault of its actor, or `none`: `python -m tests.helpers.faulty_command NAME ARGUMENTS`."""

import sys
from contextlib import nullcontext
from typing import Any

from replay.cli import leave, main
from tests.helpers.faults import FAULTS
from tests.helpers.more_faults import MORE_FAULTS

ALL = {**FAULTS, **MORE_FAULTS}

if __name__ == "__main__":
    name, *sys.argv[1:] = sys.argv[1:]
    not_open_yet: Any = None
    with ALL[name].breaks(not_open_yet) if name != "none" else nullcontext():
        code = main()
    leave(code)
