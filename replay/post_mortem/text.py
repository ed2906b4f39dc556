"""Say which rank was behind, and where each of them was, in lines of a report."""

from collections.abc import Sequence
from pathlib import Path

from actor_init.spec import UsageError
from capture.black_box.salvage import salvage_for_reading
from capture.file_format.listing import format_ranges
from capture.file_format.micro_batch import CaptureError
from replay.output.printing import open_console, print_pairs
from replay.output.text import Pairs, pluralise
from replay.post_mortem.behind import End, LastSeen, last_seen, who_was_behind, world_size_of
from replay.post_mortem.schedule import Schedule, read_schedules
from replay.post_mortem.schedule_differences import ScheduleDifference, schedule_differences

MOST_RANKS = 16  # that have a line


def post_mortem(seen: Sequence[LastSeen]) -> Pairs:
    """Return the line that names the rank, and a line for each rank; none where nothing happened to several ranks.

    hang       rank 1 was behind: after the forward of pass 3, at train.py:27 in compute_loss; others are in the
               backward of pass 3
    rank 0     in the backward of pass 3, at train.py:41 in main, in torch/autograd/graph.py:869 in
               _engine_run_backward; was aborted
    rank 1     after the forward of pass 3, at train.py:27 in compute_loss; SIGTERM
    """
    world_size = world_size_of(seen)
    if not seen or (len(seen) == 1 and world_size <= 1):
        return []
    blame = who_was_behind(seen, world_size)
    named = [one for one in seen if one.rank in blame.ranks]
    if not named:
        pairs = [("hang", f"which rank was behind cannot be told: {blame.reason}")]
    else:
        names = f"rank{'s' * (len(named) > 1)} {', '.join(str(one.rank) for one in named)}"
        places = "; ".join(dict.fromkeys(", ".join(filter(None, (one.where, one.line))) for one in named[:4]))
        pairs = [("hang", f"{names} {_verb(named)}: {places}: {blame.reason}")]
    shown = sorted(seen, key=lambda one: one.rank not in blame.ranks)[:MOST_RANKS]
    pairs += [(f"rank {one.rank}", described(one)) for one in sorted(shown, key=lambda one: one.rank)]
    if len(seen) > len(shown):
        pairs.append(("ranks", f"{len(seen) - len(shown)} more"))
    return pairs


def _verb(named: Sequence[LastSeen]) -> str:
    if all(one.end in (End.FAILED, End.CRASHED, End.KILLED) for one in named):
        return str(named[0].end)
    return "was behind" if len(named) == 1 else "were behind"


def described(one: LastSeen) -> str:
    parts = [", ".join(filter(None, (one.where, one.line))), _end_text(one)]
    if one.incident is not None and one.incident.last_collective:
        parts.append(f"last collective {one.incident.last_collective}")
    return "; ".join(parts)


def _end_text(one: LastSeen) -> str:
    if one.incident is None:
        return str(one.end)
    if one.end in (End.SIGNALLED, End.SLOW):
        return one.incident.where if one.end is End.SIGNALLED else f"slow step: {one.incident.message}"
    return f"{one.end}: {one.incident.message}" if one.incident.message else str(one.end)


def schedule_pairs(schedule: Schedule, found: Sequence[ScheduleDifference]) -> Pairs:
    """Return a line for the schedule, and one for each difference.

    schedule   2 ranks, 20 passes, 16 of them training passes: nothing in them parts the ranks
    """
    there = [rank.rank for rank in schedule.ranks]
    trains = {number for rank in schedule.ranks for number, one in rank.passes.items() if one.trains}
    counts = f"{pluralise(len(there), 'rank')}, {pluralise(schedule.num_passes, 'pass')}"
    text = f"{counts}, {len(trains)} of them training"
    if len(there) < min(2, schedule.world_size):
        return [("schedule", f"{text}: the other ranks have left no passes here, so nothing is compared")]
    if len(there) < 2:
        return [("schedule", f"{text}: one rank meets nobody")]
    pairs: Pairs = []
    if not found:
        pairs.append(("schedule", f"{text}: nothing in them parts the ranks"))
    else:
        first = found[0]
        pairs.append(("schedule", f"{text}: the ranks part at pass {first.number}: {first.text}"))
    for one in found:
        meets = f". {one.meets[0].upper()}{one.meets[1:]}" if one.meets else ""
        pairs.append(("parts", f"pass {one.number}: {one.text}{meets}. To mend it: {one.mend}"))
    missing = sorted(set(range(schedule.world_size)) - set(there))
    if missing:
        pairs.append(("no pass", f"of rank {format_ranges(missing)} of the job's {schedule.world_size}; not compared"))
    pairs += [("left out", text) for text in schedule.left_out]
    return pairs


# Run `replay hang FOLDER`: salvage, read, judge, print.


def report(folder: Path, *, equal_shapes: bool) -> int:
    """Print what happened to the folder's last job, and whether its ranks' passes fit together; return the exit code.

    A damaged file keeps the passes from being judged, and what happened is said all the same.

    Raises UsageError for a folder that is none, that holds nothing of a recording, or a damaged file and no incident.
    """
    in_memory = salvage_for_reading(folder)
    seen: Sequence[LastSeen] = []
    schedules: Sequence[Schedule] = []
    damaged: Pairs = []
    try:
        seen = last_seen(folder)
        schedules = read_schedules(folder)
    except CaptureError as error:
        text = f"{error.text}. What is damaged, all of it: capture check {folder}"
        if not seen and in_memory is None:
            raise UsageError(text) from None
        damaged = [("not judged", f"the passes: {text}")]
    if not seen and not schedules and in_memory is None:
        raise UsageError(f"{folder} holds no captures and no incidents. Try: replay hang inputs/sample")
    happened = post_mortem(seen)
    pairs: Pairs = [("folder", str(folder))]
    pairs += [] if in_memory is None else [("incident", in_memory)]
    pairs += happened
    parts = False
    for number, schedule in enumerate(schedules):
        is_last = number == len(schedules) - 1
        found = schedule_differences(schedule, equal_shapes=equal_shapes, was_cut_short=is_last and bool(seen))
        pairs += schedule_pairs(schedule, found)
        parts |= bool(found)
    print_pairs(open_console(None), [*pairs, *damaged])
    return 1 if happened or parts or damaged or in_memory is not None else 0
