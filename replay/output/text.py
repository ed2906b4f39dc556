"""Format records, statistics and checks as text; the only module that knows milliseconds and GiB.

A table is a dict of columns, name to cells; a pair is a name and its text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from unicodedata import combining, east_asian_width

from actor_init.declarations.backends import find_backend_declaration

Columns = dict[str, list[str]]
Pairs = list[tuple[str, str]]

PHASES = ("forward", "backward", "step")
# Runs beside each other are called by letters.
MAX_RUNS = 26
# By a line's name or first words.
LINE_JUDGEMENTS = {
    **dict.fromkeys(("REPRODUCED", "EQUAL", "WITHIN", "PASSED"), "good"),
    **dict.fromkeys(("DIFFERS", "FAILED", "WRONG", "failed", "damaged", "not finite", "incident"), "bad"),
    **dict.fromkeys(("UNSETTLED", "CANNOT TELL", "NOT JUDGED", "not judged"), "open"),
}
_LETTER = re.compile(r"\b(?!(?:inf|nan)\b)[^\W\d_]")
_CAPTURE_NAME = re.compile(r"actor_inputs_rank(\d+)_\d{8}_(\d{6}_\d{6})(?:_(\d{8}))?\.pkl")


def list_run_letters(number: int) -> list[str]:
    """Return `A`, `B`, ...: what runs beside each other are called, MOST_RUNS at most."""
    return [chr(ord("A") + index) for index in range(number)]


def describe_engine(backend: str, zero_stage: object) -> str:
    """Describe an engine as `deepspeed, ZeRO stage 1`, or just by the name of a backend that does not shard."""
    return f"{backend}, ZeRO stage {zero_stage}" if find_backend_declaration(backend).shards else backend


def format_milliseconds(seconds: float | None) -> str:
    """Format seconds as milliseconds: one decimal; two below 10 ms."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:,.{2 if seconds < 0.01 else 1}f}"


def format_gibibytes(num_bytes: float | None) -> str:
    """Format bytes as GiB (1024^3 bytes): two decimals, three below 10 GiB."""
    if num_bytes is None:
        return "-"
    size = num_bytes / 2**30
    return f"{size:.{3 if size < 10 else 2}f}"


def shorten_names(text: str) -> str:
    """Shorten each capture's name to its rank and number, `rank0 #4`, or to its rank and time of day."""
    return _CAPTURE_NAME.sub(lambda match: f"rank{match[1]} {f'#{int(match[3])}' if match[3] else match[2]}", text)


def have_distinct_short_names(names: Sequence[str]) -> bool:
    """Do captures of different names have different short ones?"""
    return len({shorten_names(name) for name in names}) == len(set(names))


def join_lines(text: str) -> str:
    return " ".join(text.split())


def pluralise(number: int, noun: str) -> str:
    """Return `1 file`, `2 files`, `2 passes`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def name_some(names: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Name the first of these and count the others: `a, b and 3 more`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + more


def describe_damaged_files(damaged: Sequence[tuple[Path, str]]) -> Pairs:
    return [("damaged", reason if path.name in reason else f"{path.name}: {reason}") for path, reason in damaged]


def describe_unreplayable(captures: Sequence[tuple[Path, str]]) -> str:
    """Say how many captures no replay can make, and why the first."""
    return f"{pluralise(len(captures), 'capture')} cannot be replayed: {captures[0][1]}"


def describe_unrecorded(passes: Mapping[str, int]) -> Pairs:
    """Say how many of the job's training passes the recording could not keep, and why."""
    return [("missing", explain_unrecorded(passes))] if passes else []


def explain_unrecorded(passes: Mapping[str, int]) -> str:
    """Explain `2 training passes given a cache of earlier tokens; [...]`, for numbers of passes by the reason."""
    texts = [f"{pluralise(number, 'training pass')} {why}" for why, number in passes.items()]
    return f"{', '.join(texts)}; no replay could make them from their arguments"


def judge_line(pair: tuple[str, str]) -> str:
    """Judge a line as `good`, `bad` or `open`, which it is coloured by, or as nothing."""
    name, text = pair
    return LINE_JUDGEMENTS.get(name) or next(
        (judgement for word, judgement in LINE_JUDGEMENTS.items() if text.startswith(word)), ""
    )


def is_text_column(cells: Sequence[str]) -> bool:
    """Is it a column of words, aligned left? Numbers, with or without a unit such as `%`, are aligned right."""
    return any(_LETTER.search(cell) for cell in cells)


def format_table(columns: Columns) -> list[str]:
    """Format the line of the columns' names, and one for each row. A row is one line and no cell is cut."""
    padded = [_pad_cells([name, *cells], is_text_column(cells)) for name, cells in columns.items()]
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def escape_control_characters(text: str) -> str:
    """Show control characters, as in error messages or file names, as their numbers."""
    return (
        text if text.isprintable() else "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
    )


def _pad_cells(cells: Sequence[str], fill_right: bool) -> list[str]:
    """Pad the cells to one width."""
    printable = [escape_control_characters(cell) for cell in cells]
    widths = [_measure_width(cell) for cell in printable]
    fill = [" " * (max(widths) - width) for width in widths]
    return [cell + space if fill_right else space + cell for cell, space in zip(printable, fill, strict=True)]


def _measure_width(text: str) -> int:
    """Count the columns of a terminal that the text takes: wide characters, as Chinese ones, take two."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(char) else 1 + (east_asian_width(char) in "WF") for char in text)


# Of a finding on the console; --json has it whole.
MAX_FINDING_LENGTH = 300


class CheckStatus(StrEnum):
    """How a check ended.

    NOTE       works, but worth knowing
    NO_ANSWER  not finished in time: a hang, or a slow machine
    FAILED     ran, and gave a wrong answer
    """

    OK = "ok"
    NOTE = "note"
    NOT_NEEDED = "not needed"
    MISSING = "missing"
    BROKEN = "broken"
    NO_ANSWER = "no answer"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """What was checked, and how it ended.

    advice  the consequence, and what to type
    needed  by `replay` without options, on this machine
    """

    name: str
    status: CheckStatus
    found: str
    advice: str = ""
    needed: bool = False

    @property
    def fails(self) -> bool:
        return self.needed and self.status in (
            CheckStatus.MISSING,
            CheckStatus.BROKEN,
            CheckStatus.NO_ANSWER,
            CheckStatus.FAILED,
        )


def format_check(check: CheckResult) -> str:
    """Format the printed line: status, name, finding, consequence and what to type."""
    finding = check.found if len(check.found) <= MAX_FINDING_LENGTH else f"{check.found[:MAX_FINDING_LENGTH]} [...]"
    text = f"{check.status:<12} {check.name:<20} {finding}{check.advice and f'; {check.advice}'}"
    return escape_control_characters(" ".join(text.splitlines()))
