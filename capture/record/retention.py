"""Decide which passes a recording keeps, and how much of the disk it may take.

The settings are plain values, checked once. Every rank decides for itself, by its own numbers: ranks never talk.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NoReturn

Passes = Literal["all", "train", "rollout"]
WhichEnd = Literal["first", "last"]

SETTINGS = (
    *("every", "forwards", "ranks", "passes", "max_files", "max_bytes"),
    *("keep", "flight_recorder", "slow_step", "reproduce", "segment"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionSettings:
    """The settings of a recording, made by `check_retention`. A pass is kept if all of the first four say so.

    ranks            ranks that record; None: all
    passes           `train` (autograd on), `rollout` (autograd off) or `all`
    first_forward, end_forward   numbers of forwards, as in `Origin.step`; the end is not included; None: no end
    every            every Nth forward of those that are left
    max_files, max_bytes   limits of one rank's files in the folder, whoever wrote them; None: no limit
    keep             what a full folder does: take no further passes, or delete its oldest
    flight_recorder  this many passes stay in memory, and an incident writes them; None: every pass is written at once
    slow_step        a step that takes this many times the median is an incident; None: no step is
    slow_seconds     a step that takes this many seconds is an incident; None: no step is
    reproduce        keep random states, outputs and environment with each pass
    segment          bytes of a segment, a file of many passes; None: each pass is a file
    """

    every: int = 1
    first_forward: int = 0
    end_forward: int | None = None
    ranks: frozenset[int] | None = None
    passes: Passes = "all"
    max_files: int | None = None
    max_bytes: int | None = None
    keep: WhichEnd = "first"
    flight_recorder: int | None = None
    slow_step: float | None = None
    slow_seconds: float | None = None
    reproduce: bool = False
    segment: int | None = None

    def is_of_interest(self, *, forward: int, rank: int, trains: bool) -> bool:
        """Tell whether the rules other than `every` want the pass."""
        return (
            (self.ranks is None or rank in self.ranks)
            and (self.passes == "all" or trains == (self.passes == "train"))
            and self.first_forward <= forward
            and (self.end_forward is None or forward < self.end_forward)
        )


class PassSelector:
    """Chooses the passes that `keep` wants, one after the other, for one recorder."""

    def __init__(self, keep: RetentionSettings) -> None:
        self.keep = keep
        self._num_of_interest = 0

    def takes(self, *, forward: int, rank: int, trains: bool) -> bool:
        if not self.keep.is_of_interest(forward=forward, rank=rank, trains=trains):
            return False
        self._num_of_interest += 1
        return (self._num_of_interest - 1) % self.keep.every == 0


def check_retention(
    *,
    every: int = 1,
    forwards: str | range | tuple[int, int] | None = None,
    ranks: str | int | Iterable[int] | None = None,
    passes: Passes = "all",
    max_files: int | None = None,
    max_bytes: int | None = None,
    keep: WhichEnd = "first",
    flight_recorder: int | None = None,
    slow_step: float | str | None = None,
    reproduce: bool | None = None,
    segment: str | int | None = None,
    **unknown: NoReturn,
) -> RetentionSettings:
    """Check the settings as people type them: forwards as `100:200`, ranks as `0,3`, `64MB` a segment, `60s` a step.

    Raises ValueError for a value that is not allowed, and TypeError for a name that is none, with its new name if it
    had another one.
    """
    _refuse_unknown(unknown)
    counts = {"every": every, "max_files": max_files, "max_bytes": max_bytes, "flight_recorder": flight_recorder}
    for name, value in counts.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} must be an integer of 1 or more, not {value!r}")
    for name, chosen, allowed in (("passes", passes, ("all", "train", "rollout")), ("keep", keep, ("first", "last"))):
        if chosen not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {chosen!r}")
    slow_factor, slow_seconds = _slow_step(slow_step)
    if keep == "last" and max_files is None and max_bytes is None:
        raise ValueError("keep='last' needs a limit: max_files or max_bytes. Without one every pass is kept")
    first_forward, end_forward = _first_and_end(forwards)
    segment_bytes = None if segment is None else parse_segment_bytes(segment)
    if segment_bytes is not None:
        _check_segment(segment_bytes, keep, max_files, max_bytes)
    return RetentionSettings(
        every=every,
        first_forward=first_forward,
        end_forward=end_forward,
        ranks=_ranks(ranks),
        passes=passes,
        max_files=max_files,
        max_bytes=max_bytes,
        keep=keep,
        flight_recorder=flight_recorder,
        slow_step=slow_factor,
        slow_seconds=slow_seconds,
        reproduce=flight_recorder is not None if reproduce is None else reproduce,
        segment=segment_bytes,
    )


def _refuse_unknown(names: Iterable[str]) -> None:
    for name in names:
        raise TypeError(f"there is no setting `{name}`. There are: {', '.join(SETTINGS)}")


def _check_segment(num_bytes: int, keep: WhichEnd, max_files: int | None, max_bytes: int | None) -> None:
    """Raise ValueError for a segment that the limits exclude."""
    if max_files is not None:
        raise ValueError("max_files counts files of one pass each, and segment puts many into one. Give max_bytes")
    if keep == "last" and max_bytes is not None and 2 * num_bytes > max_bytes:
        raise ValueError(
            "segment must be at most half of max_bytes with keep='last', which deletes whole segments: "
            f"{num_bytes} bytes are more than half of {max_bytes}"
        )


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_segment_bytes(segment: str | int) -> int:
    """Read the size of a segment, a number of bytes or such as `64MB`, `1GiB`. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,15}) ?([A-Z]*)", str(segment).upper())
    num_bytes = int(match[1]) * _UNITS.get(match[2], 0) if match and not isinstance(segment, bool) else 0
    if num_bytes < 1:
        raise ValueError(f"segment must be a size, such as 64MB, 1GiB or a number of bytes, not {segment!r}")
    return num_bytes


def _slow_step(given: float | str | None) -> tuple[float | None, float | None]:
    """Read `3`, times the median, or `60s`. Returns the factor and the seconds, one of them or none."""
    if given is None:
        return None, None
    text = str(given).strip()
    try:
        number = float(text.removesuffix("s"))
    except ValueError:
        number = math.nan
    if text.endswith("s") and 0 < number < math.inf:
        return None, number
    if not text.endswith("s") and number > 1:
        return number, None
    raise ValueError(
        f"slow_step must be more than 1, as in 3.0 for three times the median, or seconds, as in 60s, not {given!r}"
    )


def _first_and_end(given: str | range | tuple[int, int] | None) -> tuple[int, int | None]:
    if given is None:
        return 0, None
    try:
        if isinstance(given, str):
            first_text, colon, end_text = given.partition(":")
            first, end = int(first_text or 0), int(end_text) if end_text else None
            if not colon:
                raise ValueError
        elif isinstance(given, range):
            first, end = given.start, given.stop
            if given.step != 1:
                raise ValueError
        else:
            first, end = given
    except (ValueError, TypeError):
        raise ValueError(
            f"forwards must be FIRST:END, such as 100:200 (without 200), 100: or :200, not {given!r}"
        ) from None
    if first < 0 or (end is not None and end <= first):
        raise ValueError(f"forwards {given!r} holds none: FIRST must be 0 or more, and END more than FIRST")
    return first, end


def _ranks(given: str | int | Iterable[int] | None) -> frozenset[int] | None:
    if given is None:
        return None
    try:
        items = given.split(",") if isinstance(given, str) else [given] if isinstance(given, int) else list(given)
        ranks = frozenset(int(item) for item in items)
    except (ValueError, TypeError):
        raise ValueError(f"ranks must be numbers, such as 0,3, not {given!r}") from None
    if not ranks or min(ranks) < 0:
        raise ValueError(f"ranks must be numbers of 0 or more, such as 0,3, not {given!r}")
    return ranks
