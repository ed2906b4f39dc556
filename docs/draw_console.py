"""Draws README's picture of the console from a real run: `python docs/draw_console.py`."""

import os
import pty
import subprocess
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMAND = ["replay", "--max-inputs", "6"]
WIDTH = 108


def recorded(command: list[str]) -> str:
    """Run `command` on a terminal and return what it shows in the end, with its colours."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(WIDTH), "NO_COLOR": ""}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if not part:
            break
        shown += part
    if process.wait() != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    lines = shown.decode().replace("\r\n", "\n").split("\n")
    return "\n".join(line.rpartition("\r")[2] for line in lines)


def main() -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text(f"$ {' '.join(COMMAND)}\n", style="bold"), end="")
        for line in Text.from_ansi(recorded(COMMAND)).split("\n", allow_blank=True):
            console.print(line, highlight=False)
        picture = Path(__file__).parent / "console.svg"
        console.save_svg(str(picture), title="replay")
    picture.write_text("\n".join(line.rstrip() for line in picture.read_text().splitlines()) + "\n")


if __name__ == "__main__":
    main()
