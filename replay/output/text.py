"""Format records and statistics as text; the only module that knows milliseconds and GiB.

A table is a dict of columns, name to cells; a pair is a name and its text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from unicodedata import combining, east_asian_width

from actor_init.declarations.backends import find_declaration

Columns = dict[str, list[str]]
Pairs = list[tuple[str, str]]

PHASES = ("forward", "backward", "step")
MOST_RUNS = 26  # beside each other, as they are called by letters
JUDGEMENTS = {  # by a line's name or first words
    **dict.fromkeys(("REPRODUCED", "EQUAL", "WITHIN", "PASSED"), "good"),
    **dict.fromkeys(("DIFFERS", "FAILED", "WRONG", "failed", "damaged", "not finite", "incident"), "bad"),
    **dict.fromkeys(("UNSETTLED", "CANNOT TELL", "NOT JUDGED", "not judged"), "open"),
}
_WORD = re.compile(r"\b(?!(?:inf|nan)\b)[^\W\d_]")
_CAPTURE = re.compile(r"actor_inputs_rank(\d+)_\d{8}_(\d{6}_\d{6})(?:_(\d{8}))?\.pkl")


def run_letters(number: int) -> list[str]:
    """Return `A`, `B`, ...: what runs beside each other are called, MOST_RUNS at most."""
    return [chr(ord("A") + place) for place in range(number)]


def engine_text(backend: str, zero_stage: object) -> str:
    """Return `deepspeed, ZeRO stage 1`, or just the name of a backend that does not shard."""
    return f"{backend}, ZeRO stage {zero_stage}" if find_declaration(backend).shards else backend


def milliseconds(seconds: float | None) -> str:
    """Format seconds as milliseconds: one decimal; two below 10 ms."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:,.{2 if seconds < 0.01 else 1}f}"


def gibibytes(num_bytes: float | None) -> str:
    """Format bytes as GiB (1024^3 bytes): two decimals, three below 10 GiB."""
    if num_bytes is None:
        return "-"
    size = num_bytes / 2**30
    return f"{size:.{3 if size < 10 else 2}f}"


def short_names(text: str) -> str:
    """Shorten each capture's name to its rank and number, `rank0 #4`, or to its rank and time of day."""
    return _CAPTURE.sub(lambda match: f"rank{match[1]} {f'#{int(match[3])}' if match[3] else match[2]}", text)


def short_names_differ(names: Sequence[str]) -> bool:
    """Do captures of different names have different short ones?"""
    return len({short_names(name) for name in names}) == len(set(names))


def one_line(text: str) -> str:
    return " ".join(text.split())


def counted(number: int, noun: str) -> str:
    """Return `1 file`, `2 files`, `2 passes`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def damaged_files(damaged: Sequence[tuple[Path, str]]) -> Pairs:
    return [("damaged", reason if path.name in reason else f"{path.name}: {reason}") for path, reason in damaged]


def unreplayable(captures: Sequence[tuple[Path, str]]) -> str:
    """Say how many captures no replay can make, and why the first."""
    return f"{counted(len(captures), 'capture')} cannot be replayed: {captures[0][1]}"


def not_recorded(passes: Mapping[str, int]) -> Pairs:
    """Say how many of the job's training passes the recording could not keep, and why."""
    return [("missing", not_recorded_text(passes))] if passes else []


def not_recorded_text(passes: Mapping[str, int]) -> str:
    """Return `2 training passes given a cache of earlier tokens; [...]`, for numbers of passes by the reason."""
    each = [f"{counted(number, 'training pass')} {why}" for why, number in passes.items()]
    return f"{', '.join(each)}; no replay could make them from their arguments"


def judgement(pair: tuple[str, str]) -> str:
    """Return `good`, `bad` or `open`, which a line is coloured by, or nothing."""
    name, text = pair
    return JUDGEMENTS.get(name) or next((said for word, said in JUDGEMENTS.items() if text.startswith(word)), "")


def is_text(cells: Sequence[str]) -> bool:
    """Is it a column of words, aligned left? Numbers, with or without a unit such as `%`, are aligned right."""
    return any(_WORD.search(cell) for cell in cells)


def table_lines(columns: Columns) -> list[str]:
    """Return the line of the columns' names, and one for each row. A row is one line and no cell is cut."""
    padded = [_padded([name, *cells], is_text(cells)) for name, cells in columns.items()]
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def printable(text: str) -> str:
    """Show control characters, as in error messages or file names, as their numbers."""
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _padded(cells: Sequence[str], fill_right: bool) -> list[str]:
    """Return the cells, equally wide."""
    shown = [printable(cell) for cell in cells]
    widths = [_width(cell) for cell in shown]
    fill = [" " * (max(widths) - width) for width in widths]
    return [cell + space if fill_right else space + cell for cell, space in zip(shown, fill, strict=True)]


def _width(text: str) -> int:
    """Return how many columns of a terminal the text takes: wide characters, as Chinese ones, take two."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 1 + (east_asian_width(c) in "WF") for c in text)


# Represent a check as plain data: what was checked, its status, the consequence and what to type.

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
