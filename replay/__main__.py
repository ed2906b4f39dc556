"""Entry point of `python replay`, `python -m replay`, `deepspeed replay`, `torchrun replay` and their -m forms."""

import sys
from pathlib import Path

# Run as a folder, python puts replay/ itself first on the path, which would hide this package.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from replay.command_line.entry import run_and_leave

if __name__ == "__main__":
    run_and_leave()
