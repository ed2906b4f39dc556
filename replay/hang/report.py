"""Run `replay hang FOLDER`: salvage, read, judge, print."""

from pathlib import Path

from actor_init.spec import UsageError
from capture.file_format.micro_batch import CaptureError
from capture.record.salvage import salvage_for_reading
from replay.hang.last_seen import last_seen
from replay.hang.text import post_mortem
from replay.report.printing import open_console, print_pairs
from replay.report.text import Pairs


def report(folder: Path, *, equal_shapes: bool) -> int:
    """Print what happened to the folder's last job, and whether its ranks' passes fit together; return the exit code.

    Raises UsageError for a folder that is none, or that holds nothing of a recording.
    """
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}. Try: replay hang inputs/sample")
    in_memory = salvage_for_reading(folder)
    pairs: Pairs = [("folder", str(folder))]
    pairs += [] if in_memory is None else [("incident", in_memory)]
    try:
        happened = post_mortem(last_seen(folder))
    except CaptureError as error:
        happened = [("damaged", str(error))]
    print_pairs(open_console(None), [*pairs, *happened])
    return 1 if happened or in_memory is not None else 0
