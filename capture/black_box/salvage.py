"""Write the passes that killed processes of this host left in shared memory: `capture salvage FOLDER`."""

import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from capture.black_box.collectives import find_last_collective_in_dump
from capture.black_box.flight_recorder import STACKS_FILE, DeadSpool, find_dead_spools
from capture.black_box.incidents import Incident, make_incident, scrub, write_incidents
from capture.black_box.position_page import LastPosition, read_position
from capture.black_box.stacks import correct_phase, find_main_stack, mark_main_thread
from capture.file_format.capture_file import utc_now
from capture.file_format.folder_layout import list_capture_folders, parse_rank
from capture.file_format.manifest import format_stamp
from capture.file_format.segment import list_segments
from capture.file_format.segment_writer import repair_segments
from capture.record.rank_writer import RankWriter, open_rank_writer
from capture.record.retention import RetentionSettings

STACKS_ELSEWHERE = "its stacks, if it left some, are where the job's own faulthandler writes"


def salvage(folder: Path, retention: RetentionSettings) -> int:
    """Write the passes that killed processes had in their flight recorders, and return how many.

    Those of every rank: a launcher that starts ranks again may give another rank to this host. Raises OSError.
    """
    num_saved = 0
    for spool in find_dead_spools(folder):
        position = read_position(spool.directory)
        rank = spool.rank if position is None else position.rank
        stamp = utc_now()
        world_size = max((encoded.world_size or 1 for encoded in spool.calls), default=None)
        writer = open_rank_writer(folder, retention, rank=rank, world_size=world_size, stamp=stamp)
        try:
            num_saved += _write_spool(spool, position, writer, rank=rank, stamp=stamp)
        finally:
            writer.close()
        shutil.rmtree(spool.directory)
    return num_saved


def repair_folder(folder: Path) -> int:
    """Cut torn tails of segments that nobody writes, and complete indexes; return how many. Raises OSError."""
    return sum(
        repair_segments(home, rank)
        for home in list_capture_folders(folder)
        for rank in sorted({parse_rank(path) for path in list_segments(home)})
    )


def _write_spool(spool: DeadSpool, position: LastPosition | None, writer: RankWriter, *, rank: int, stamp: str) -> int:
    """Write what a dead process had, and return how many passes there was room for."""
    names = [path.name for encoded in spool.calls if (path := writer.write(encoded)) is not None]
    if spool.calls or spool.num_cut_short or (position is not None and not position.was_reported):
        last_forward = max((encoded.step for encoded in spool.calls), default=None)
        incident = make_incident("died", "without a word", last_forward)
        if position is not None:
            incident = _add_last_position(incident, spool.directory, position)
        incident = replace(incident, files=names, num_not_copied=spool.num_cut_short)
        write_incidents(writer.rank_folder, [incident], num_others=0, rank=rank, stamp=format_stamp(stamp))
        writer.commit()
    return len(names)


def _add_last_position(incident: Incident, directory: Path, position: LastPosition) -> Incident:
    """Add where the process was, and what faulthandler wrote if it crashed."""
    try:
        text = (directory / STACKS_FILE).read_text(errors="replace")
    except OSError:
        text = ""
    text = text.partition("\nExtension modules:")[0]
    stacks = scrub(mark_main_thread(text, position.main_thread))
    began = datetime.fromisoformat(position.opened).timestamp()
    return replace(
        incident,
        forward=incident.forward if position.forward is None else position.forward,
        message=scrub(text.partition("\n")[0]) if position.has_stacks else STACKS_ELSEWHERE,
        place=correct_phase(position.phase, find_main_stack(stacks)),
        last_backward=position.last_backward,
        stacks=stacks,
        last_collective=find_last_collective_in_dump(position.rank, position.trace_file, after=began),
        world_size=position.world_size,
        opened=position.opened,
        last_moved=position.time,
    )


def salvage_for_reading(folder: Path) -> str | None:
    """Write what killed processes left into `folder`; if that fails, return what to type as which user."""
    try:
        ranks = sorted({spool.rank for spool in find_dead_spools(folder)})
    except OSError:
        return None
    if not ranks:
        return None
    try:
        salvage(folder, RetentionSettings())
    except OSError as error:
        names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        return (
            f"{names} died without an incident file, and the last passes are in this host's memory: {error.strerror}. "
            f"Try, as a user who may write there: capture salvage {folder}"
        )
    return None
