"""Clocks that a test moves, in the place of a machine's, which may be busy."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from replay.runner.meter import HostInstrument, Meter

HOUR = 3600.0


@dataclass
class Clock:
    """Stands still until it is moved."""

    now: float = 0.0

    def read(self) -> float:
        return self.now


def at_the_meter(
    monkeypatch: pytest.MonkeyPatch, make_instrument: Callable[[Clock], HostInstrument] | None = None
) -> Clock:
    """What is measured on a CPU is measured by this clock; with an instrument, so it is on every device."""
    clock = Clock()
    if make_instrument is not None:
        monkeypatch.setattr(Meter, "for_device", lambda _: Meter(make_instrument(clock)))
    monkeypatch.setattr("replay.runner.meter.time", SimpleNamespace(perf_counter=clock.read))
    return clock


def an_hour_a_line(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for child processes sleeps an hour for each line that has come into `output`, and else no time."""
    clock = Clock()

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        clock.now = HOUR * output.read_bytes().count(b"\n")

    monkeypatch.setattr("replay.processes.supervisor.time", SimpleNamespace(monotonic=clock.read, sleep=sleep))
