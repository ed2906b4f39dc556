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
    *("keep", "flight_recorder", "slow_step", "reproduce", "segment", "routes"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionSettings:
    """The settings of a recording, made by `check_retention`. A pass is kept if the first four all allow it.

    ranks            ranks that record; None: all
    passes           `train` (autograd on), `rollout` (autograd off) or `all`
    first_forward, end_forward   numbers of forwards, as in `Origin.step`; the end is not included; None: no end
    every            of the forwards that the others allow, every Nth
    max_files, max_bytes   limits of one rank's files in the folder, whoever wrote them; None: no limit
    keep             what a full folder does: take no further passes, or delete its oldest
    flight_recorder  this many passes stay in memory, and an incident writes them; None: every pass is written at once
    slow_step        a step that takes this many times the median is an incident; None: no step is
    slow_seconds     a step that takes this many seconds is an incident; None: no step is
    reproduce        keep random states, outputs and environment with each pass
    segment          bytes of a segment, a file of many passes; None: each pass is a file
    routes           with `reproduce`, keep which experts a mixture of experts chose for each token
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
    routes: bool = True

    def is_allowed(self, *, forward: int, rank: int, trains: bool) -> bool:
        """Tell whether the settings other than `every` allow the pass."""
        return (
            (self.ranks is None or rank in self.ranks)
            and (self.passes == "all" or trains == (self.passes == "train"))
            and self.first_forward <= forward
            and (self.end_forward is None or forward < self.end_forward)
        )


class PassSelector:
    """Selects the passes to keep, for one recorder, which asks about each pass in turn."""

    def __init__(self, retention: RetentionSettings) -> None:
        self.retention = retention
        self._num_allowed = 0
        is_limited = retention.ranks is not None or retention.first_forward > 0 or retention.end_forward is not None
        self._selects_all = retention.every == 1 and retention.passes == "all" and not is_limited

    def select(self, *, forward: int, rank: int, trains: bool) -> bool:
        if self._selects_all:
            return True
        if not self.retention.is_allowed(forward=forward, rank=rank, trains=trains):
            return False
        self._num_allowed += 1
        return (self._num_allowed - 1) % self.retention.every == 0


def check_retention(
    *,
    every: int = 1,
    forwards: str | range | tuple[int, int] | None = None,
    ranks: str | int | Iterable[int] | None = None,
    passes: Passes = "all",
    max_files: int | None = None,
    max_bytes: str | int | None = None,
    keep: WhichEnd = "first",
    flight_recorder: int | None = None,
    slow_step: float | str | None = None,
    reproduce: bool | None = None,
    segment: str | int | None = None,
    routes: bool = True,
    **unknown: NoReturn,
) -> RetentionSettings:
    """Check the settings as people type them: forwards as `100:200`, ranks as `0,3`, sizes as `64MB`, `60s` a step.

    Raises ValueError for a value that is not allowed, and TypeError for an unknown setting.
    """
    _refuse_unknown(unknown)
    counts = {"every": every, "max_files": max_files, "flight_recorder": flight_recorder}
    for name, value in counts.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} must be an integer of 1 or more, not {value!r}")
    for name, choice, allowed in (("passes", passes, ("all", "train", "rollout")), ("keep", keep, ("first", "last"))):
        if choice not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {choice!r}")
    slow_factor, slow_seconds = _parse_slow_step(slow_step)
    if keep == "last" and max_files is None and max_bytes is None:
        raise ValueError("keep='last' needs a limit: max_files or max_bytes. Without one every pass is kept")
    first_forward, end_forward = _parse_forwards(forwards)
    limit = None if max_bytes is None else parse_num_bytes("max_bytes", max_bytes)
    segment_bytes = None if segment is None else parse_num_bytes("segment", segment)
    if segment_bytes is not None:
        _check_segment(segment_bytes, keep, max_files, limit)
    return RetentionSettings(
        every=every,
        first_forward=first_forward,
        end_forward=end_forward,
        ranks=_parse_ranks(ranks),
        passes=passes,
        max_files=max_files,
        max_bytes=limit,
        keep=keep,
        flight_recorder=flight_recorder,
        slow_step=slow_factor,
        slow_seconds=slow_seconds,
        reproduce=flight_recorder is not None if reproduce is None else reproduce,
        segment=segment_bytes,
        routes=routes,
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


def parse_num_bytes(name: str, size: str | int) -> int:
    """Read the size that setting `name` was given: a number of bytes, or such as `64MB`, `1GiB`. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,15}) ?([A-Z]*)", str(size).upper())
    num_bytes = int(match[1]) * _UNITS.get(match[2], 0) if match and not isinstance(size, bool) else 0
    if num_bytes < 1:
        raise ValueError(f"{name} must be a size, such as 64MB, 1GiB or a number of bytes, not {size!r}")
    return num_bytes


def _parse_slow_step(slow_step: float | str | None) -> tuple[float | None, float | None]:
    """Read `3`, times the median, or `60s`. Returns the factor and the seconds; at least one of them is None."""
    if slow_step is None:
        return None, None
    text = str(slow_step).strip()
    try:
        number = float(text.removesuffix("s"))
    except ValueError:
        number = math.nan
    if text.endswith("s") and 0 < number < math.inf:
        return None, number
    if not text.endswith("s") and number > 1:
        return number, None
    raise ValueError(
        f"slow_step must be more than 1, as in 3.0 for three times the median, or seconds, as in 60s, not {slow_step!r}"
    )


def _parse_forwards(forwards: str | range | tuple[int, int] | None) -> tuple[int, int | None]:
    if forwards is None:
        return 0, None
    try:
        if isinstance(forwards, str):
            first_text, colon, end_text = forwards.partition(":")
            first, end = int(first_text or 0), int(end_text) if end_text else None
            if not colon:
                raise ValueError
        elif isinstance(forwards, range):
            first, end = forwards.start, forwards.stop
            if forwards.step != 1:
                raise ValueError
        else:
            first, end = forwards
    except (ValueError, TypeError):
        raise ValueError(
            f"forwards must be FIRST:END, such as 100:200 (without 200), 100: or :200, not {forwards!r}"
        ) from None
    if first < 0 or (end is not None and end <= first):
        raise ValueError(f"forwards {forwards!r} holds none: FIRST must be 0 or more, and END more than FIRST")
    return first, end


def _parse_ranks(ranks: str | int | Iterable[int] | None) -> frozenset[int] | None:
    if ranks is None:
        return None
    try:
        numbers = ranks.split(",") if isinstance(ranks, str) else [ranks] if isinstance(ranks, int) else list(ranks)
        parsed = frozenset(int(number) for number in numbers)
    except (ValueError, TypeError):
        raise ValueError(f"ranks must be numbers, such as 0,3, not {ranks!r}") from None
    if not parsed or min(parsed) < 0:
        raise ValueError(f"ranks must be numbers of 0 or more, such as 0,3, not {ranks!r}")
    return parsed
