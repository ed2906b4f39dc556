"""Write the passes that killed processes of this host left in shared memory: `capture salvage FOLDER`."""

import shutil
from dataclasses import replace
from pathlib import Path

from capture.file_format.capture_file import utc_time
from capture.file_format.folder_layout import homes_in, rank_in_name
from capture.file_format.manifest import stamp_of
from capture.file_format.segment import segments_in
from capture.file_format.segment_writer import repair_segments
from capture.record.disk_limits import RankWriter, rank_writer
from capture.record.flight_recorder import DeadSpool, dead_spools
from capture.record.incidents import incident, write_incidents
from capture.record.retention import Keep


def salvage(folder: Path, keep: Keep) -> int:
    """Write the passes that killed processes had in their flight recorders, and return how many.

    Every rank's: a launcher that starts ranks again may give this host's to another one. Raises OSError.
    """
    num_saved = 0
    for spool in dead_spools(folder):
        stamp = utc_time()
        world_size = max((encoded.world_size or 1 for encoded in spool.calls), default=None)
        files = rank_writer(folder, keep, rank=spool.rank, world_size=world_size, stamp=stamp)
        try:
            num_saved += _write(spool, files, stamp=stamp)
        finally:
            files.close()
        shutil.rmtree(spool.directory)
    return num_saved


def repair_folder(folder: Path) -> int:
    """Cut torn tails of segments that nobody writes, and complete indexes; return how many. Raises OSError."""
    return sum(
        repair_segments(home, rank)
        for home in homes_in(folder)
        for rank in sorted({rank_in_name(path) for path in segments_in(home)})
    )


def _write(spool: DeadSpool, files: RankWriter, *, stamp: str) -> int:
    """Write what a dead process had, and return how many passes there was room for."""
    names = [path.name for encoded in spool.calls if (path := files.write(encoded)) is not None]
    if spool.calls or spool.num_cut_short:
        last = max((encoded.step for encoded in spool.calls), default=None)
        died = replace(incident("died", "without a word", last), files=names, num_not_copied=spool.num_cut_short)
        write_incidents(files.home, [died], num_others=0, rank=spool.rank, stamp=stamp_of(stamp))
        files.commit()
    return len(names)
