"""Which processes of a run are still there."""

from pathlib import Path


def processes_with(argument: str) -> list[str]:
    """The command lines of the processes that have it, zombies left out: those have none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if argument in command:
            found.append(command)
    return found
