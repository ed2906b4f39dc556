"""A folder of older dumps as a folder of format 1."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from capture.capture_file import capture_files, read_actor_config, read_call, utc_time, write_actor_config
from capture.manifest import Entry, entry_of, write_manifest
from capture.micro_batch import CaptureError

DUMP_TIME = "%Y%m%d_%H%M%S_%f"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    written: list[Path] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # file name: why
    num_bytes_before: int = 0
    num_bytes_after: int = 0


def convert_folder(source: Path, target: Path) -> Conversion:
    """Every capture of `source` as format 1 in `target`, with a manifest, each read back and compared before it counts.

    What a dump does not say stays unsaid, its step apart, which is its place among its rank's files; its time, which
    names no zone, is taken for UTC. Raises CaptureError without a source, or for a target that holds something already;
    OSError.
    """
    paths = capture_files(source)
    make_empty_folder(target)
    if (config := read_actor_config(source)) is not None:
        write_actor_config(target, config, None)
    written: list[Path] = []
    refused: dict[str, str] = {}
    entries: dict[int, list[Entry]] = {}
    before = after = 0
    for path in paths:
        try:
            call = read_call(path)
            rank = call.origin.rank or 0
            step = len(entries.get(rank, [])) if call.origin.step is None else call.origin.step
            call = replace(call, origin=replace(call.origin, step=step, time=_iso_time(call.origin.time, path.name)))
            copy = call.write(target)
        except CaptureError as error:
            refused[path.name] = str(error)
            continue
        again = read_call(copy)
        for name, tensor in call.tensors.items():
            if not torch.equal(again.tensors[name], tensor):
                raise AssertionError(f"{copy}: {name} is not what was written")
        entry = entry_of(copy, again)
        entries.setdefault(rank, []).append(entry)
        written.append(copy)
        before += path.stat().st_size
        after += entry.num_bytes
    for rank, committed in entries.items():
        write_manifest(target, committed, rank=rank, time=utc_time())
    return Conversion(written=written, refused=refused, num_bytes_before=before, num_bytes_after=after)


def _iso_time(written: str | None, source: str) -> str | None:
    for read in (datetime.fromisoformat, lambda text: datetime.strptime(text, DUMP_TIME)):
        try:
            moment = read(written or "")
        except ValueError:
            continue
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat(timespec="microseconds")
    raise CaptureError(f"{source}: its time is {str(written)[:40]!r}; allowed is ISO 8601 or {DUMP_TIME}")


def make_empty_folder(folder: Path) -> None:
    """Mode 0700. Raises CaptureError if there is something in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CaptureError(f"{folder} is not an empty folder. Give the name of a new one")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
