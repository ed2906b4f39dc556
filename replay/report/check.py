"""A check is plain data: what was looked at, how it is, what it costs and what to type."""

from dataclasses import dataclass
from enum import StrEnum

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
