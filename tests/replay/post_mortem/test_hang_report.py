"""What a report of `replay hang` concludes from its parts, and which end belongs to which recording of a rank."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.file_format.capture_file import write_call
from capture.file_format.end_record import EndRecord, write_end_record
from capture.file_format.micro_batch import Origin
from replay.post_mortem.hang import ComparedSchedule, HangReport
from replay.post_mortem.schedule import Schedule, read_schedules
from replay.post_mortem.schedule_differences import ScheduleDifference
from tests.helpers.made_captures import write_pass
from tests.replay.post_mortem.test_blame_of_many_ranks import SLEEPS, WAITS

DIFFERENCE = ScheduleDifference(kind="passes", number=1, ranks=(1,), text="", remedy="")
CLEAN, PARTED = (
    ComparedSchedule(schedule=Schedule(ranks=(), world_size=2), differences=differences)
    for differences in ((), (DIFFERENCE,))
)


def make_report(**values: Any) -> HangReport:
    known: dict[str, Any] = {"folder": Path("captures"), "sightings": (), "schedules": (CLEAN,)}
    return HangReport(**(known | values))


@pytest.mark.parametrize(
    ("values", "exit_code"),
    [
        ({}, 0),
        ({"sightings": [WAITS]}, 1),
        # Any recording of several may have ranks that part.
        ({"schedules": (PARTED, CLEAN)}, 1),
        ({"schedules": ()}, 0),
        ({"damage": "a.pkl is damaged"}, 1),
        # What a killed process left could not be written where it belongs.
        ({"salvaged": "rank 1 died"}, 1),
    ],
)
def test_a_report_fails_where_a_part_of_it_tells_of_a_fault(values: dict[str, Any], exit_code: int) -> None:
    assert make_report(**values).exit_code == exit_code


def test_a_report_names_the_ranks_that_the_others_waited_for() -> None:
    ranks = [replace(sighting, rank=rank) for rank, sighting in enumerate((WAITS, SLEEPS, SLEEPS))]
    report = make_report(sightings=ranks, salvaged="a", damage="b")
    assert (report.ranks, report.rank, report.reason) == ((1, 2), 1, "others are in the backward of pass 5")
    assert (make_report().ranks, make_report().rank, make_report().reason) == ((), None, None)
    values = report.to_dict()
    assert {name: values[name] for name in ("folder", "ranks", "reason", "salvaged", "damage")} == {
        "folder": "captures",
        "ranks": [1, 2],
        "reason": report.reason,
        "salvaged": "a",
        "damage": "b",
    }
    assert [sighting["rank"] for sighting in values["sightings"]] == [0, 1, 2]
    assert values["schedules"] == [{"world_size": 2, "num_passes": 0, "differences": []}]


@pytest.mark.parametrize(
    ("num_passes", "expected"),
    [
        # Each end belongs to the recording that it closed, in their order.
        ((5, 7), [5, 7]),
        # One of two recordings was closed, and nothing tells which: the captures count.
        ((7,), [1, 2]),
        ((), [1, 2]),
    ],
)
def test_an_end_belongs_to_its_recording(num_passes: Sequence[int], expected: list[int], tmp_path: Path) -> None:
    """A rank whose first recording has one capture, and the second two; another rank's ends are none of its own."""
    for home, steps in (("a", (0,)), ("b", (0, 1))):
        for step in steps:
            path = write_pass(tmp_path / home, step=step)
            # The second recording came a day later.
            name = path.name if home == "a" else path.name.replace("20260301", "20260302")
            path.rename(tmp_path / name)
        (tmp_path / home).rmdir()
    for day, number in enumerate(num_passes, start=1):
        for rank in (0, 1):
            opened = f"2026-03-0{day}T08:00:00+00:00"
            end = EndRecord(
                rank=rank, world_size=2, num_passes=number + rank, num_steps=None, place="", opened=opened, time=opened
            )
            write_end_record(tmp_path, end, stamp=f"2026030{day}")
    assert [schedule.num_passes for schedule in read_schedules(tmp_path)] == expected


def test_the_world_is_the_largest_that_any_capture_knows(tmp_path: Path) -> None:
    """A pass of a converted dump knows none, and comes last."""
    for step in (0, 1):
        write_pass(tmp_path, step=step)
    origin = Origin(source="", rank=1, step=0, time="2026-03-01T09:13:00.000000")
    write_call(tmp_path, {"input_ids": torch.ones(1, 4, dtype=torch.int64)}, {}, trains=True, origin=origin)
    [schedule] = read_schedules(tmp_path)
    assert [rank.rank for rank in schedule.ranks] == [0, 1]
    assert schedule.world_size == 2
