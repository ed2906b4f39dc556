"""Examine what a job that hung or died has left: which rank was behind, and whether the ranks' passes fit."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actor_init.as_json import to_json
from actor_init.spec import UsageError
from capture.black_box.salvage import salvage_for_reading
from capture.file_format.micro_batch import CaptureError
from replay.options.option_parsing import format_error_with_flags
from replay.options.spec import check_folder
from replay.options.value_checks import check_value
from replay.post_mortem.blocking_ranks import (
    End,
    LastSighting,
    find_blocking_ranks,
    find_world_size,
    read_last_sightings,
)
from replay.post_mortem.schedule import Schedule, read_schedules
from replay.post_mortem.schedule_differences import ScheduleDifference, find_schedule_differences


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedSchedule:
    """The passes of all ranks of one recording, and where they part."""

    schedule: Schedule
    differences: Sequence[ScheduleDifference]


@dataclass(frozen=True, kw_only=True, slots=True)
class HangReport:
    """What happened to a folder's last job, and whether its ranks' passes fit together.

    sightings  the last that is known of each rank; empty where no incident was recorded
    schedules  of each recording
    salvaged   what a killed process had in memory, and where it is now
    damage     why the passes were not compared; None: they were
    """

    folder: Path
    sightings: Sequence[LastSighting]
    schedules: Sequence[ComparedSchedule]
    salvaged: str | None = None
    damage: str | None = None

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that the others waited for, or that failed; empty where that cannot be told."""
        if not self.sightings:
            return ()
        return find_blocking_ranks(self.sightings, find_world_size(self.sightings)).ranks

    @property
    def rank(self) -> int | None:
        """The first of `ranks`."""
        return self.ranks[0] if self.ranks else None

    @property
    def reason(self) -> str | None:
        """Why it is these ranks, or why that cannot be told; None where nothing happened."""
        if not self.sightings:
            return None
        return find_blocking_ranks(self.sightings, find_world_size(self.sightings)).reason

    @property
    def exit_code(self) -> int:
        """0: no hang was found, and all ranks did the same passes and steps."""
        has_differences = any(compared.differences for compared in self.schedules)
        is_bad = self.sightings or has_differences or self.damage or self.salvaged is not None
        return 1 if is_bad else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON has it: the ranks, why, the last of each rank, and where the schedules part."""
        return {
            "folder": str(self.folder),
            "ranks": list(self.ranks),
            "reason": self.reason,
            "sightings": to_json(self.sightings),
            "schedules": [
                {
                    "world_size": compared.schedule.world_size,
                    "num_passes": compared.schedule.num_passes,
                    "differences": to_json(compared.differences),
                }
                for compared in self.schedules
            ],
            "salvaged": self.salvaged,
            "damage": self.damage,
        }


def is_of_several_ranks(sightings: Sequence[LastSighting]) -> bool:
    """Did something happen to a job of several ranks?"""
    return bool(sightings) and (len(sightings) > 1 or find_world_size(sightings) > 1)


def _went_on(sighting: LastSighting, schedule: Schedule) -> bool:
    """Did the only rank of a job go on? It writes no end record, and a slow step or SIGUSR1 ends nothing."""
    was_asked = sighting.incident is not None and sighting.incident.where == "SIGUSR1"
    return (sighting.end is End.SLOW or was_asked) and schedule.num_passes > (sighting.forward or 0) + 1


def examine_hang(folder: str | os.PathLike[str], *, equal_shapes: bool = False) -> HangReport:
    """Say which rank of a job that hung or died was behind, and whether all ranks would have met in each pass.

    First salvage what a killed process left in memory, then read incidents and passes. If a file is damaged, the passes
    are not compared, and what happened is told all the same. No model is run.

    folder        of captures, of all ranks
    equal_shapes  the job gathers tensors of its rows' shape over the ranks, so each pass needs equal shapes

    Raises UsageError if `folder` is no folder or holds nothing of a recording, or for a damaged file without incidents.
    """
    folder = check_value("folder", folder, Path)
    check_folder(folder, "Try: replay hang inputs/sample")
    salvaged = salvage_for_reading(folder)
    sightings: Sequence[LastSighting] = []
    schedules: Sequence[Schedule] = []
    damage: str | None = None
    try:
        sightings = read_last_sightings(folder)
        schedules = read_schedules(folder)
    except CaptureError as error:
        text = f"{error.text}. What is damaged, all of it: capture check {folder}"
        if not sightings and salvaged is None:
            raise UsageError(text) from None
        damage = format_error_with_flags(text)
    if not sightings and not schedules and salvaged is None:
        raise UsageError(f"{folder} holds no captures and no incidents. Try: replay hang inputs/sample")
    if schedules and not is_of_several_ranks(sightings):
        sightings = [sighting for sighting in sightings if not _went_on(sighting, schedules[-1])]
    last = len(schedules) - 1
    ended_loops = [sighting.rank for sighting in sightings if sighting.end is End.CLOSED]
    compared = [
        ComparedSchedule(
            schedule=schedule,
            differences=find_schedule_differences(
                schedule,
                equal_shapes=equal_shapes,
                was_cut_short=number == last and bool(sightings),
                ended_loops=ended_loops,
            ),
        )
        for number, schedule in enumerate(schedules)
    ]
    return HangReport(folder=folder, sightings=sightings, schedules=compared, salvaged=salvaged, damage=damage)
