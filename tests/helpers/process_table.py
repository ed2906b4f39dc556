"""Which processes of a run are still there."""

import os
import select
import time
from pathlib import Path


def processes_left(argument: str, limit: float) -> list[str]:
    """The command lines of those that have it and do not end within `limit` seconds; returns when all have ended."""
    deadline = time.monotonic() + limit
    while (commands := _commands_with(argument)) and time.monotonic() < deadline:
        try:
            descriptor = os.pidfd_open(next(iter(commands)))
        except ProcessLookupError:
            continue
        try:
            select.select([descriptor], [], [], deadline - time.monotonic())
        finally:
            os.close(descriptor)
    return list(commands.values())


def _commands_with(argument: str) -> dict[int, str]:
    """Return the command lines by process, zombies left out: those have none."""
    commands = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace").rstrip()
        except OSError:
            continue
        if argument in command:
            commands[int(path.parent.name)] = command
    return commands
