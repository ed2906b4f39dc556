"""Run one probe in its own process, so that a crash or a hang there becomes an answer."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from replay.output.text import CheckResult, CheckStatus
from replay.processes.supervisor import ChildGroup, end_processes, start_process

GRACE = 2.0  # seconds between SIGTERM and SIGKILL
MARK = "replay-doctor-answer: "
COMMAND_SECONDS = 5
SHARE = 0.5  # of the total time, for one probe unless told otherwise: a hang leaves time for the rest


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The facts that a probe found, or its error in one line."""

    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    is_silent: bool = False  # it did not finish in its time: a hang, or a slow machine
    seconds: float = 0.0


Read = Callable[[str, int | None, float], Answer]  # takes a process's output, exit code and seconds


class Prober:
    """Start probes, from any thread, and end them all by a common deadline."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._running: set[ChildGroup] = set()

    def ask(
        self,
        probe: str,
        *arguments: str,
        share: float = SHARE,
        read: Read | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Answer:
        """Run the function `probe` of `probes.py`; `read` parses the output of one that prints no answer."""
        began = time.monotonic()
        limit = min(self._timeout * share, self._deadline - began - 2 * GRACE)
        if limit <= 0:
            return Answer(error="not tried, no time was left", is_silent=True)
        with tempfile.TemporaryFile() as out:  # not a pipe, which a surviving grandchild would hold open
            command = [sys.executable, *probe_arguments(probe, limit, *arguments)]
            variables = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(environment or {})
            begin = partial(start_process, command, variables, stdin=subprocess.DEVNULL, output=out)
            process = ChildGroup.start([begin], limit=limit + GRACE)
            self._running.add(process)
            try:
                code = process.wait()
            finally:
                process.end(grace=GRACE)  # SIGTERM first: only the probe can end the ranks that it has started
                self._running.discard(process)
            return (read or _answer)(_text_of(out), code, time.monotonic() - began)

    def stop(self) -> None:
        """End the probes that are still running."""
        self._deadline = 0.0
        end_processes([process for group in list(self._running) for process in group.processes], grace=GRACE)


def probe_arguments(probe: str, limit: float, *arguments: str) -> list[str]:
    """Return Python's arguments that run a probe with this process's module path."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from replay.commands.doctor.probes import main; main()"
    return ["-c", code, probe, str(limit), *arguments]


def _text_of(out: IO[bytes]) -> str:
    out.seek(0)
    return out.read().decode(errors="replace")


def _answer(text: str, code: int | None, seconds: float) -> Answer:
    said = [json.loads(line.removeprefix(MARK)) for line in text.splitlines() if line.startswith(MARK)]
    if errors := [one["error"] for one in said if "error" in one]:  # the first of several ranks is the cause
        return Answer(error=errors[0], seconds=seconds)
    if code == 0 and said:
        return Answer(facts=said[-1]["facts"], seconds=seconds)
    if code is None or _timed_out(text):
        return Answer(error=f"not finished in {seconds:.0f} s{_position(text)}", is_silent=True, seconds=seconds)
    if code < 0:
        return Answer(error=f"crashed, {signal.Signals(-code).name}{_position(text)}", seconds=seconds)
    return Answer(error=f"its process ended without an answer, exit code {code}{_last_error(text)}", seconds=seconds)


def _timed_out(text: str) -> bool:
    """Did the probe end itself at its time limit?"""
    return re.search(r"^Timeout \(", text, re.MULTILINE) is not None


def _position(text: str) -> str:
    """Return where it stopped, from faulthandler's stacks: the crashed thread's, else the main thread's, which is
    last.
    """
    [*_, thread] = re.split(
        r"^Current thread " if "\nCurrent thread " in text else r"^Thread 0x", text, flags=re.MULTILINE
    )
    frames = re.findall(r'^  File "([^"<]+)", line (\d+) in (\S+)', thread, re.MULTILINE)
    if not frames:
        return ""
    path, line, function = frames[0]
    return f", in {function} at {'/'.join(path.split(os.sep)[-2:])}:{line}"


def _last_error(text: str) -> str:
    """Return the error that a library printed before the process ended."""
    errors = re.findall(r"^\w[\w.]*(?:Error|Exception): .+", text, re.MULTILINE)
    return f": {errors[-1]}" if errors else ""


def answer_of_a_replay(logs: Path) -> Read:
    """Return a reader that tells how `replay` over one input ended: from its log in `logs`, and from its output."""

    def read(text: str, code: int | None, seconds: float) -> Answer:
        records = [json.loads(line) for path in logs.glob("*/rank0.jsonl") for line in path.read_text().splitlines()]
        if code == 0 and len(records) == 1:
            loss = float(records[0]["loss"])
            error = "" if math.isfinite(loss) else f"the loss is {loss}"
            return Answer(facts={"loss": loss} if not error else {}, error=error, seconds=seconds)
        said = re.findall(r"^replay: (.+?)(?:\. --traceback shows where)?$", text, re.MULTILINE)
        reasons = [f"{one['error_type']}: {one['error']}" for one in records if one["error"]] + said
        if code and code > 0 and reasons and not _timed_out(text):
            return Answer(error=reasons[0], seconds=seconds)
        return _answer(text, code, seconds)

    return read


def tried(
    name: str, answer: Answer, *, works: str, cost: str, needed: bool = False, has_error: bool = False
) -> CheckResult:
    """Turn a probe's answer into a check: `works` if it succeeded, else the error and its `cost`.

    With `has_error` the probe measured a numerical error, which must be within its bound.
    """
    if answer.error:
        status = CheckStatus.NO_ANSWER if answer.is_silent else CheckStatus.BROKEN
        return CheckResult(name=name, status=status, found=answer.error, advice=cost, needed=needed)
    if has_error:
        error, bound = answer.facts["error"], answer.facts["bound"]
        measured = f"relative error {error:.2g}, bound {bound:g}"
        if not error <= bound:  # also fails for nan
            return CheckResult(
                name=name, status=CheckStatus.BROKEN, found=f"wrong numbers, {measured}", advice=cost, needed=needed
            )
        works = f"{works}, {measured}"
    return CheckResult(name=name, status=CheckStatus.OK, found=works, needed=needed)


def first_line(command: Sequence[str]) -> str:
    """Return the first line that the command prints; empty if it fails or takes long."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if lines else ""
