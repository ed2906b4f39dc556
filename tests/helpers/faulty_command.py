"""Run `replay` with a fault of its actor, or `none`: `python -m tests.helpers.faulty_command NAME ARGUMENTS`."""

import sys
from contextlib import ExitStack
from typing import Any

from replay.command_line.cli import leave, main
from tests.helpers.faults import FAULTS
from tests.helpers.more_faults import MORE_FAULTS
from tests.helpers.unproved_rows import rows_unproved

ALL = {**FAULTS, **MORE_FAULTS}

if __name__ == "__main__":
    name, *sys.argv[1:] = sys.argv[1:]
    not_open_yet: Any = None
    with ExitStack() as stack:
        if name != "none":
            stack.enter_context(rows_unproved())
            stack.enter_context(ALL[name].breaks(not_open_yet))
        code = main()
    leave(code)
