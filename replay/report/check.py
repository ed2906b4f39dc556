"""A check is plain data: what was looked at, how it is, what it costs and what to type."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from replay.doctor.probe_process import Answer

COMMAND_SECONDS = 5
MAX_LENGTH = 300  # of what was found, on the console; --json has it whole


class Status(StrEnum):
    OK = "ok"
    NOTE = "note"  # works, and is worth knowing
    NOT_NEEDED = "not needed"
    MISSING = "missing"
    BROKEN = "broken"
    NO_ANSWER = "no answer"  # in its time: a hang, or a slow machine
    FAILED = "failed"  # works, and gave another answer than it should
    NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    name: str
    status: Status
    found: str
    advice: str = ""  # what it costs, and what to type
    needed: bool = False  # by `replay` without options, on this machine

    @property
    def fails(self) -> bool:
        return self.needed and self.status in (Status.MISSING, Status.BROKEN, Status.NO_ANSWER, Status.FAILED)


def line(check: Check) -> str:
    """As it is printed: how it is, its name, what was found, what it costs and what to type."""
    found = check.found if len(check.found) <= MAX_LENGTH else f"{check.found[:MAX_LENGTH]} [...]"
    text = f"{check.status:<12} {check.name:<20} {found}{check.advice and f'; {check.advice}'}"
    return "".join(c if c.isprintable() else " " for c in " ".join(text.splitlines()))


def tried(name: str, answer: Answer, *, works: str, cost: str, needed: bool = False, has_error: bool = False) -> Check:
    """A probe's answer as a check: `works` where it ended well, what it costs where not.

    With `has_error` the probe measured one, which has to be within its bound.
    """
    if answer.trouble:
        status = Status.NO_ANSWER if answer.is_silent else Status.BROKEN
        return Check(name=name, status=status, found=answer.trouble, advice=cost, needed=needed)
    if has_error:
        error, bound = answer.facts["error"], answer.facts["bound"]
        measured = f"relative error {error:.2g}, bound {bound:g}"
        if not error <= bound:  # nor where it is nan
            return Check(
                name=name, status=Status.BROKEN, found=f"wrong numbers, {measured}", advice=cost, needed=needed
            )
        works = f"{works}, {measured}"
    return Check(name=name, status=Status.OK, found=works, needed=needed)


def first_line(command: Sequence[str]) -> str:
    """Of what the command prints; empty if it fails or takes long."""
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
