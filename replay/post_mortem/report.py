"""Run `replay hang FOLDER`: salvage, read, judge, print."""

from collections.abc import Sequence
from pathlib import Path

from actor_init.spec import UsageError
from capture.black_box.salvage import salvage_for_reading
from capture.file_format.micro_batch import CaptureError
from replay.output.printing import open_console, print_pairs
from replay.output.text import Pairs
from replay.post_mortem.last_seen import LastSeen, last_seen
from replay.post_mortem.schedule import Schedule, read_schedules
from replay.post_mortem.schedule_differences import schedule_differences
from replay.post_mortem.text import post_mortem, schedule_pairs


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
