"""A check is plain data: what was looked at, how it is, what it costs and what to type."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from replay.probing import Answer

COMMAND_SECONDS = 5


class Status(StrEnum):
    OK = "ok"
    NOTE = "note"  # works, and is worth knowing
    NOT_NEEDED = "not needed"
    MISSING = "missing"
    BROKEN = "broken"
    NO_ANSWER = "no answer"  # in its time: a hang, or a slow machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    name: str
    status: Status
    found: str
    advice: str = ""  # what it costs, and what to type
    needed: bool = False  # by `replay` without options, on this machine

    @property
    def fails(self) -> bool:
        return self.needed and self.status in (Status.MISSING, Status.BROKEN, Status.NO_ANSWER)


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
