"""Entry point of `python replay`, `python -m replay`, `deepspeed replay`, `torchrun replay` and their -m forms."""

import sys
from pathlib import Path

if not __package__:  # run as a folder: sys.path[0] is replay/ itself and would hide this package
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from replay.command_line.entry import run_and_leave

if __name__ == "__main__":
    run_and_leave()
