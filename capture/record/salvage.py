"""Write the passes that killed processes of this host left in shared memory: `capture salvage FOLDER`."""

import shutil
from dataclasses import replace
from pathlib import Path

from capture.file_format.capture_file import utc_time
from capture.file_format.manifest import stamp_of
from capture.record.disk_limits import RankFiles
from capture.record.flight_recorder import dead_spools
from capture.record.incidents import incident, write_incidents
from capture.record.retention import Keep


def salvage(folder: Path, keep: Keep) -> int:
    """Write the passes that killed processes had in their flight recorders, and return how many.

    Every rank's: a launcher that starts ranks again may give this host's to another one. Raises OSError.
    """
    num_saved = 0
    for spool in dead_spools(folder):
        stamp = utc_time()
        files = RankFiles(folder, keep, rank=spool.rank, stamp=stamp)
        names = [path.name for encoded in spool.calls if (path := files.write(encoded)) is not None]
        if spool.calls or spool.num_cut_short:
            last = max((encoded.step for encoded in spool.calls), default=None)
            died = replace(incident("died", "without a word", last), files=names, num_not_copied=spool.num_cut_short)
            write_incidents(folder, [died], num_others=0, rank=spool.rank, stamp=stamp_of(stamp))
            files.write_manifest()
        shutil.rmtree(spool.directory)
        num_saved += len(names)
    return num_saved
