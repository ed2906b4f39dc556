"""Asks one question in a process of its own, so that a crash or a hang there is an answer and not the end."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

GRACE = 2.0  # seconds between SIGTERM and SIGKILL
MARK = "replay-doctor-answer: "
SHARE = 0.5  # of all the time there is that one probe may take, unless it is told otherwise: a hang leaves some


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The facts that a probe found, or how it failed in one line."""

    facts: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""
    is_silent: bool = False  # it did not end in its time: a hang, or a slow machine
    seconds: float = 0.0


class Prober:
    """Starts probes, from any thread, and ends them all by a common deadline."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._running: set[subprocess.Popen[bytes]] = set()

    def ask(self, probe: str, *arguments: str, share: float = SHARE, **environment: str) -> Answer:
        """What `replay.doctor.probes` finds with the function of that name."""
        began = time.monotonic()
        limit = min(self._timeout * share, self._deadline - began - 2 * GRACE)
        if limit <= 0:
            return Answer(trouble="not tried, no time was left", is_silent=True)
        with tempfile.TemporaryFile() as out:  # no pipe: a grandchild that lives on would hold it open
            process = subprocess.Popen(
                [sys.executable, *probe_arguments(probe, limit, *arguments)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
                start_new_session=True,
            )
            self._running.add(process)
            try:
                code = process.wait(limit + GRACE)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
                self._running.discard(process)
            return _answer(_text_of(out), code, time.monotonic() - began)

    def stop(self) -> None:
        """End what is still running."""
        self._deadline = 0.0
        for process in list(self._running):
            _end(process)


def probe_arguments(probe: str, limit: float, *arguments: str) -> list[str]:
    """Python's arguments that run a probe with the very module path that this process has."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from replay.doctor.probes import main; main()"
    return ["-c", code, probe, str(limit), *arguments]


def _text_of(out: IO[bytes]) -> str:
    out.seek(0)
    return out.read().decode(errors="replace")


def _answer(text: str, code: int | None, seconds: float) -> Answer:
    said = [json.loads(line.removeprefix(MARK)) for line in text.splitlines() if line.startswith(MARK)]
    if troubles := [one["trouble"] for one in said if "trouble" in one]:  # the first of several ranks is the cause
        return Answer(trouble=troubles[0], seconds=seconds)
    if code == 0 and said:
        return Answer(facts=said[-1]["facts"], seconds=seconds)
    if code is None or re.search(r"^Timeout \(", text, re.MULTILINE):
        return Answer(trouble=f"no end in {seconds:.0f} s{_place(text)}", is_silent=True, seconds=seconds)
    if code < 0:
        return Answer(trouble=f"crashed, {signal.Signals(-code).name}{_place(text)}", seconds=seconds)
    return Answer(trouble=f"its process ended without a word, exit code {code}{_last_error(text)}", seconds=seconds)


def _place(text: str) -> str:
    """Where it stood, by faulthandler's stacks: that of the thread that crashed, else of the main thread, the last."""
    [*_, thread] = re.split(
        r"^Current thread " if "\nCurrent thread " in text else r"^Thread 0x", text, flags=re.MULTILINE
    )
    frames = re.findall(r'^  File "([^"<]+)", line (\d+) in (\S+)', thread, re.MULTILINE)
    if not frames:
        return ""
    path, line, function = frames[0]
    return f", in {function} at {'/'.join(path.split(os.sep)[-2:])}:{line}"


def _last_error(text: str) -> str:
    """An error that some library printed before it left."""
    errors = re.findall(r"^\w[\w.]*(?:Error|Exception): .+", text, re.MULTILINE)
    return f": {errors[-1]}" if errors else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it if it still runs; SIGTERM first, on which torch's elastic launcher ends its ranks: no group holds them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
