"""Check that this environment can replay, before anything of it is imported, and run the command line.

    replay: replaying needs rich, typer, which the bare install leaves out. Try: pip install 'micro-replay[replay]'

A job's environment has `capture` alone, so this file imports the standard library alone and runs on Python 3.10.
"""

import os
import sys
from importlib.util import find_spec
from typing import NoReturn

FIRST_PYTHON = (3, 11)
NEEDED = ("pydantic", "rich", "safetensors", "transformers", "typer")
NEEDED_BY_THE_DOCTOR = ("typer",)  # it says what else lacks
USAGE_ERROR = 2


def complaint(arguments: list[str], python: tuple[int, int]) -> str | None:
    """Return the line that refuses `replay ARGUMENTS` in this environment, or None if it can run."""
    if python < FIRST_PYTHON:
        here, first = (".".join(map(str, version)) for version in (python, FIRST_PYTHON))
        return (
            f"replaying needs Python {first} or later, and this is {here} ({sys.executable}), which can only capture. "
            f"Try: python{first} -m venv replaying && replaying/bin/pip install 'micro-replay[replay]'"
        )
    needed = NEEDED_BY_THE_DOCTOR if arguments[:1] == ["doctor"] else NEEDED
    if lacking := [name for name in needed if find_spec(name) is None]:
        return (
            f"replaying needs {', '.join(lacking)}, which the bare install leaves out. "
            "Try: pip install 'micro-replay[replay]'"
        )
    return None


def run_and_leave() -> NoReturn:
    """Run what was typed and end the process with its exit code; 2, with one line on stderr, if it cannot run here."""
    if refusal := complaint(sys.argv[1:], sys.version_info[:2]):
        if os.environ.get("RANK", "0") == "0":  # every rank of a launch lacks the same
            print(f"replay: {refusal}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    from replay.cli import run_and_leave as run

    run()
