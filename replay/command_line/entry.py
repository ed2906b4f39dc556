"""Check that this environment can replay, before anything of it is imported, and run the command line.

    replay: replaying needs rich, typer, which the bare install leaves out. Try: pip install 'micro-replay[replay]'

A job's environment has `capture` alone, so this file imports the standard library alone and runs on Python 3.10.
"""

import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NoReturn

FIRST_PYTHON = (3, 11)
NEEDED = ("jinja2", "pydantic", "rich", "safetensors", "transformers", "typer")
FIRST_VERSIONS = {
    # 2.6 has `get_total_norm` apart from `clip_grads_with_norm_`.
    "torch": (2, 6),
    # Until 4.51 its masks let packed documents see each other.
    "transformers": (4, 57),
}
# The doctor itself reports what else is missing.
NEEDED_BY_THE_DOCTOR = ("typer",)
USAGE_ERROR = 2


def find_version(name: str) -> str | None:
    """Return the version of a package; None of one that is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        # It is there, but not as a package (on PYTHONPATH, say): its version is unknown, and what imports it may fail.
        return None


def complaint(
    arguments: list[str],
    python: tuple[int, int],
    *,
    find_module: Callable[[str], object] = find_spec,
    find_version: Callable[[str], str | None] = find_version,
) -> str | None:
    """Return the line that refuses `replay ARGUMENTS` in this environment, or None if it can run.

    find_module   returns None for a module that is not there
    find_version  returns the version of a package, or None if it is not known
    """
    if python < FIRST_PYTHON:
        current, first = (".".join(map(str, version_parts)) for version_parts in (python, FIRST_PYTHON))
        return (
            f"replaying needs Python {first} or later, and this is {current} ({sys.executable}), "
            "which can only capture. "
            f"Try: python{first} -m venv replaying && replaying/bin/pip install 'micro-replay[replay]'"
        )
    is_doctor = arguments[:1] == ["doctor"]
    needed = NEEDED_BY_THE_DOCTOR if is_doctor else NEEDED
    if lacking := [name for name in needed if find_module(name) is None]:
        return (
            f"replaying needs {', '.join(lacking)}, which the bare install leaves out. "
            "Try: pip install 'micro-replay[replay]'"
        )
    for name, first_release in FIRST_VERSIONS.items():
        if (
            not is_doctor
            and (installed := find_version(name)) is not None
            and _parse_release(installed) < first_release
        ):
            first = ".".join(map(str, first_release))
            return (
                f"replaying needs {name} {first} or later, and {installed} is installed, with which `capture` works. "
                f"Try: pip install '{name}>={first}', or another environment for the replay"
            )
    return None


def _parse_release(installed: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", installed)[:2])


def run_and_leave() -> NoReturn:
    """Run what was typed and end the process with its exit code; 2, with one line on stderr, if it cannot run here."""
    if refusal := complaint(sys.argv[1:], sys.version_info[:2]):
        # Every rank of a launch lacks the same, so one of them says it.
        if os.environ.get("RANK", "0") == "0":
            print(f"replay: {refusal}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    from replay.command_line import cli

    cli.run_and_leave()
