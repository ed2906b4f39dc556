"""A replay in processes of its own, so that out of memory, a crash or a hang there ends nothing else."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from replay.launch import without_launcher

GRACE = 2.0  # seconds between SIGTERM and SIGKILL
PROGRAM: tuple[str, ...] = ("-u", str(Path(__file__).parent))
REFUSED = 2  # the exit code of a replay that cannot be had


@dataclass(frozen=True, kw_only=True, slots=True)
class Child:
    """A replay that has ended, well or not."""

    exit_code: int | None  # None: it did not end within its limit
    seconds: float
    output: Path  # what it printed
    logs: Path  # holds the folder of its run, if it came that far

    @property
    def is_refusal(self) -> bool:
        """Did it say beforehand that it cannot be had?"""
        return self.exit_code == REFUSED

    @property
    def trouble(self) -> str:
        """Why it failed, in one line; empty if all was well."""
        if self.exit_code == 0:
            return ""
        if self.exit_code is None:
            return f"no end within {self.seconds:.0f} s, see {self.output}"
        said = re.findall(r"^replay: (?:rank \d+: )?(.+)", self.output.read_text(errors="replace"), re.MULTILINE)
        errors = [line for line in said if not line.endswith("starting them")]
        if errors:
            return str(errors[-1])
        if self.exit_code < 0:
            return f"ended by {signal.Signals(-self.exit_code).name}, see {self.output}"
        return f"exit code {self.exit_code}, see {self.output}"


def run_child(
    arguments: Sequence[str],
    *,
    num_processes: int,
    logs: Path,
    output: Path,
    limit: float,
) -> Child:
    """`replay` with `arguments` in that many processes on this machine, for at most `limit` seconds.

    Its run is logged in a new folder below `logs`, and what it prints goes into the file `output`. On Ctrl-C, or any
    other exception here, it is ended first.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    program = [sys.executable]
    if num_processes > 1:  # not torchrun, which has one exit code for whatever its ranks left with
        start = f"from replay.launch import start_processes; sys.exit(start_processes({num_processes}, sys.argv[1:]))"
        program += ["-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"]
    began = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*program, *PROGRAM, *arguments, "--log-folder", str(logs)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=without_launcher(os.environ),
            start_new_session=True,
        )
        exit_code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(limit)
        finally:
            end(process)
    return Child(exit_code=exit_code, seconds=time.monotonic() - began, output=output, logs=logs)


def end(process: subprocess.Popen[bytes]) -> None:
    """End it if it still runs; SIGTERM first, on which torch's elastic launcher ends its ranks: no group holds them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
