"""Tell whether replayed passes are of one recording: those of two are not one job's, though they lie in one folder."""

from collections.abc import Sequence

from replay.runlog.records import PassRecord
from replay.verdict.job_values import Recorded


def why_not_one_job(passes: Sequence[tuple[PassRecord, Recorded]]) -> str | None:
    """Say which recordings these passes are of, in the order in which they were replayed; None if it is one.

    Each rank of a job has a recording of its own. Converted passes have none, and passes without a number of the
    job's are not judged: neither counts.
    """
    named = [(record.index, own.rank, own.recording) for record, own in passes if own.claims and own.recording]
    first = {rank: began for _, rank, began in reversed(named)}
    other = next(((index, rank) for index, rank, began in named if began != first[rank]), None)
    if other is None:
        return None
    index, rank = other
    began = sorted({one for _, of_rank, one in named if of_rank == rank})
    times = f"{', '.join(began[:-1])} and {began[-1]}"
    fewer = f"--max-inputs {index}, for those of one alone, or " if index else ""
    return (
        f"these passes are of {len(began)} recordings in one folder, which began {times}. "
        f"Try: {fewer}a folder for each (the times are in the files' names)"
    )
