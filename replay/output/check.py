"""Represent a check as plain data: what was checked, its status, the consequence and what to type."""

from dataclasses import dataclass
from enum import StrEnum

from replay.output.text import printable

MAX_LENGTH = 300  # of a finding on the console; --json has it whole


class Status(StrEnum):
    OK = "ok"
    NOTE = "note"  # works, but worth knowing
    NOT_NEEDED = "not needed"
    MISSING = "missing"
    BROKEN = "broken"
    NO_ANSWER = "no answer"  # not finished in time: a hang, or a slow machine
    FAILED = "failed"  # ran, and gave a wrong answer
    NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    name: str
    status: Status
    found: str
    advice: str = ""  # the consequence, and what to type
    needed: bool = False  # by `replay` without options, on this machine

    @property
    def fails(self) -> bool:
        return self.needed and self.status in (Status.MISSING, Status.BROKEN, Status.NO_ANSWER, Status.FAILED)


def line(check: Check) -> str:
    """Return the printed line: status, name, finding, consequence and what to type."""
    shown = check.found if len(check.found) <= MAX_LENGTH else f"{check.found[:MAX_LENGTH]} [...]"
    text = f"{check.status:<12} {check.name:<20} {shown}{check.advice and f'; {check.advice}'}"
    return printable(" ".join(text.splitlines()))
