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

GRACE_SECONDS = 2.0
ANSWER_MARK = "replay-doctor-answer: "
COMMAND_SECONDS = 5
# The share of the total time that a probe gets unless told otherwise: one that hangs leaves time for the others.
DEFAULT_SHARE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeAnswer:
    """The facts that a probe found, or its error in one line."""

    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    # It did not finish in its time: a hang, or a slow machine.
    is_silent: bool = False
    seconds: float = 0.0


# Takes a process's output, exit code and seconds.
AnswerReader = Callable[[str, int | None, float], ProbeAnswer]


class Prober:
    """Start probes, from any thread, and end them all by a common deadline.

    grace  seconds that a process may take to end after SIGTERM, until it gets SIGKILL
    """

    def __init__(self, timeout: float, *, grace: float = GRACE_SECONDS) -> None:
        self._timeout = timeout
        self._grace = grace
        self._deadline = time.monotonic() + timeout
        self._running: set[ChildGroup] = set()

    def ask(
        self,
        probe: str,
        *arguments: str,
        share: float = DEFAULT_SHARE,
        read: AnswerReader | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> ProbeAnswer:
        """Run the function `probe` of `probes.py`; `read` parses the output of one that prints no answer."""
        started_at = time.monotonic()
        limit = min(self._timeout * share, self._deadline - started_at - 2 * self._grace)
        if limit <= 0:
            return ProbeAnswer(error="not tried, no time was left", is_silent=True)
        # A surviving grandchild would hold a pipe open, and reading it would never end.
        with tempfile.TemporaryFile() as out:
            command = [sys.executable, *build_probe_arguments(probe, limit, *arguments)]
            variables = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(environment or {})
            start = partial(start_process, command, variables, stdin=subprocess.DEVNULL, output=out)
            process = ChildGroup.start([start], limit=limit + self._grace)
            self._running.add(process)
            try:
                code = process.wait()
            finally:
                # SIGTERM comes first: only the probe can end the ranks that it has started.
                process.end(grace=self._grace)
                self._running.discard(process)
            return (read or _parse_answer)(_read_output(out), code, time.monotonic() - started_at)

    def stop(self) -> None:
        """End the probes that are still running."""
        self._deadline = 0.0
        end_processes([process for group in list(self._running) for process in group.processes], grace=self._grace)


def build_probe_arguments(probe: str, limit: float, *arguments: str) -> list[str]:
    """Return Python's arguments that run a probe with this process's module path."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from replay.commands.doctor.probes import main; main()"
    return ["-c", code, probe, str(limit), *arguments]


def _read_output(out: IO[bytes]) -> str:
    out.seek(0)
    return out.read().decode(errors="replace")


def _parse_answer(text: str, code: int | None, seconds: float) -> ProbeAnswer:
    lines = [line for line in text.splitlines() if line.startswith(ANSWER_MARK)]
    messages = [json.loads(line.removeprefix(ANSWER_MARK)) for line in lines]
    # Of several ranks, the first to report an error is the cause.
    if errors := [message["error"] for message in messages if "error" in message]:
        return ProbeAnswer(error=errors[0], seconds=seconds)
    if code == 0 and messages:
        return ProbeAnswer(facts=messages[-1]["facts"], seconds=seconds)
    if code is None or _has_timed_out(text):
        return ProbeAnswer(
            error=f"not finished in {seconds:.0f} s{_find_position(text)}", is_silent=True, seconds=seconds
        )
    if code < 0:
        return ProbeAnswer(error=f"crashed, {signal.Signals(-code).name}{_find_position(text)}", seconds=seconds)
    return ProbeAnswer(
        error=f"its process ended without an answer, exit code {code}{_find_last_error(text)}", seconds=seconds
    )


def _has_timed_out(text: str) -> bool:
    """Tell whether the probe ended itself at its time limit."""
    return re.search(r"^Timeout \(", text, re.MULTILINE) is not None


def _find_position(text: str) -> str:
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


def _find_last_error(text: str) -> str:
    """Return the error that a library printed before the process ended."""
    errors = re.findall(r"^\w[\w.]*(?:Error|Exception): .+", text, re.MULTILINE)
    return f": {errors[-1]}" if errors else ""


def make_replay_reader(logs: Path) -> AnswerReader:
    """Return a reader that tells how `replay` over one input ended: from its log in `logs`, and from its output."""

    def read(text: str, code: int | None, seconds: float) -> ProbeAnswer:
        records = [json.loads(line) for path in logs.glob("*/rank0.jsonl") for line in path.read_text().splitlines()]
        if code == 0 and len(records) == 1:
            loss = float(records[0]["loss"])
            error = "" if math.isfinite(loss) else f"the loss is {loss}"
            return ProbeAnswer(facts={"loss": loss} if not error else {}, error=error, seconds=seconds)
        messages = re.findall(r"^replay: (.+?)(?:\. --traceback shows where)?$", text, re.MULTILINE)
        reasons = [f"{record['error_type']}: {record['error']}" for record in records if record["error"]] + messages
        if code and code > 0 and reasons and not _has_timed_out(text):
            return ProbeAnswer(error=reasons[0], seconds=seconds)
        return _parse_answer(text, code, seconds)

    return read


def judge_answer(
    name: str, answer: ProbeAnswer, *, works: str, cost: str, needed: bool = False, has_error: bool = False
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
        # Written so that nan fails too.
        if not error <= bound:
            return CheckResult(
                name=name, status=CheckStatus.BROKEN, found=f"wrong numbers, {measured}", advice=cost, needed=needed
            )
        works = f"{works}, {measured}"
    return CheckResult(name=name, status=CheckStatus.OK, found=works, needed=needed)


def read_first_line(command: Sequence[str]) -> str:
    """Return the first line that the command prints; empty if it fails or takes long."""
    try:
        completed = subprocess.run(
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
    lines = completed.stdout.strip().splitlines()
    return lines[0].strip() if lines else ""
