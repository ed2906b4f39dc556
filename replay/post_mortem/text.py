"""Write which rank the others waited for, and where each rank was; print the answer to `replay hang FOLDER`."""

from collections.abc import Sequence

from capture.file_format.listing import format_ranges
from replay.output.printing import open_console, print_pairs
from replay.output.text import Pairs, pluralise
from replay.post_mortem.blocking_ranks import (
    End,
    LastSighting,
    find_blocking_ranks,
    find_world_size,
)
from replay.post_mortem.hang import HangReport, is_of_several_ranks
from replay.post_mortem.schedule import Schedule
from replay.post_mortem.schedule_differences import ScheduleDifference

# More ranks than these have no line of their own.
MAX_RANKS = 16


def describe_hang(sightings: Sequence[LastSighting]) -> Pairs:
    """Return the line that names the rank, and a line for each rank; none where nothing happened to several ranks.

    hang       rank 1 was behind: after the forward of pass 3, at train.py:27 in compute_loss; others are in the
               backward of pass 3
    rank 0     in the backward of pass 3, at train.py:41 in main, in torch/autograd/graph.py:869 in
               _engine_run_backward; was aborted
    rank 1     after the forward of pass 3, at train.py:27 in compute_loss; SIGTERM
    """
    if not is_of_several_ranks(sightings):
        return []
    blame = find_blocking_ranks(sightings, find_world_size(sightings))
    blamed = [sighting for sighting in sightings if sighting.rank in blame.ranks]
    if not blamed:
        pairs = [("hang", f"which rank was behind cannot be told: {blame.reason}")]
    else:
        names = f"rank{'s' * (len(blamed) > 1)} {', '.join(str(sighting.rank) for sighting in blamed)}"
        places = "; ".join(
            dict.fromkeys(", ".join(filter(None, (sighting.where, sighting.line))) for sighting in blamed[:4])
        )
        pairs = [("hang", f"{names} {_choose_verb(blamed)}: {places}: {blame.reason}")]
    shown = sorted(sightings, key=lambda sighting: sighting.rank not in blame.ranks)[:MAX_RANKS]
    pairs += [
        (f"rank {sighting.rank}", describe_rank(sighting))
        for sighting in sorted(shown, key=lambda sighting: sighting.rank)
    ]
    if len(sightings) > len(shown):
        pairs.append(("ranks", f"{len(sightings) - len(shown)} more"))
    return pairs


def _choose_verb(blamed: Sequence[LastSighting]) -> str:
    if all(sighting.end in (End.FAILED, End.CRASHED, End.KILLED) for sighting in blamed):
        return str(blamed[0].end)
    return "was behind" if len(blamed) == 1 else "were behind"


def describe_rank(sighting: LastSighting) -> str:
    parts = [", ".join(filter(None, (sighting.where, sighting.line))), _describe_end(sighting)]
    if sighting.incident is not None and sighting.incident.last_collective:
        parts.append(f"last collective {sighting.incident.last_collective}")
    return "; ".join(parts)


def _describe_end(sighting: LastSighting) -> str:
    if sighting.incident is None:
        return str(sighting.end)
    if sighting.end in (End.SIGNALLED, End.SLOW):
        return sighting.incident.where if sighting.end is End.SIGNALLED else f"slow step: {sighting.incident.message}"
    return f"{sighting.end}: {sighting.incident.message}" if sighting.incident.message else str(sighting.end)


def describe_schedule(schedule: Schedule, differences: Sequence[ScheduleDifference]) -> Pairs:
    """Return a line for the schedule, and one for each difference.

    schedule   2 ranks, 20 passes, 16 of them training passes: nothing in them parts the ranks
    """
    ranks = [rank.rank for rank in schedule.ranks]
    trains = {number for rank in schedule.ranks for number, difference in rank.passes.items() if difference.trains}
    counts = f"{pluralise(len(ranks), 'rank')}, {pluralise(schedule.num_passes, 'pass')}"
    text = f"{counts}, {len(trains)} of them training"
    if len(ranks) < min(2, schedule.world_size):
        return [("schedule", f"{text}: the other ranks have left no passes here, so nothing is compared")]
    if len(ranks) < 2:
        return [("schedule", f"{text}: one rank meets nobody")]
    pairs: Pairs = []
    if not differences:
        pairs.append(("schedule", f"{text}: nothing in them parts the ranks"))
    else:
        first = differences[0]
        pairs.append(("schedule", f"{text}: the ranks part at pass {first.number + 1}: {first.text}"))
    for difference in differences:
        exception = f". {difference.exception[0].upper()}{difference.exception[1:]}" if difference.exception else ""
        pairs.append(
            ("parts", f"pass {difference.number + 1}: {difference.text}{exception}. To mend it: {difference.remedy}")
        )
    missing = sorted(set(range(schedule.world_size)) - set(ranks))
    if missing:
        pairs.append(("no pass", f"of rank {format_ranges(missing)} of the job's {schedule.world_size}; not compared"))
    pairs += [("excluded", text) for text in schedule.left_out]
    return pairs


def print_report(report: HangReport) -> None:
    """Print what happened to the folder's last job, and whether its ranks' passes fit together."""
    pairs: Pairs = [("folder", str(report.folder))]
    pairs += [] if report.salvaged is None else [("incident", report.salvaged)]
    # Nobody waits for the only rank of a job, but where it stopped is what its reader asks.
    alone = [(f"rank {sighting.rank}", describe_rank(sighting)) for sighting in report.sightings]
    pairs += describe_hang(report.sightings) or alone
    for compared in report.schedules:
        pairs += describe_schedule(compared.schedule, compared.differences)
    pairs += [] if report.damage is None else [("not judged", f"the passes: {report.damage}")]
    print_pairs(open_console(None), pairs)
