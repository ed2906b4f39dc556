"""Write and read manifests: `manifest_rank<rank>_<time>.json` lists what a rank's recording committed, written last.

A manifest lists at most 1,024 files, then the recording begins another one, with a number after the time.

A folder whose recording was cut short has files and no manifest for them; they are as readable as the others.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from capture.file_format.atomic_write import write_atomically
from capture.file_format.capture_file import FORMAT, CapturedCall, read_call
from capture.file_format.folder_layout import SEGMENT_SUFFIX, list_capture_folders
from capture.file_format.listing import list_segment_files, list_single_pass_files
from capture.file_format.micro_batch import EMBEDDINGS_REASON, CaptureError, has_only_embeddings
from capture.file_format.segment import INDEX_SUFFIX, Segment, matches_checksum

MAX_MANIFEST_BYTES = 64 * 2**20
# A recording keeps the entries of the manifest that it fills in memory.
MAX_ENTRIES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestEntry:
    """One committed file in a manifest. The names of the fields are keys in the file.

    crc32   of the whole file
    step    number of the forward
    shapes  the shapes of the tensors by argument
    """

    name: str
    num_bytes: int
    crc32: int
    rank: int | None
    step: int | None
    trains: bool
    shapes: Mapping[str, Sequence[int]]

    def to_json(self) -> str:
        """Return the entry as a manifest has it: a line of JSON."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderCheck:
    """The captures of a folder as `check_folder` found them, by name.

    good             captures in files of their own that read
    num_good_in      number of good passes in each segment
    num_torn_bytes   bytes at a segment's end that are no pass, by the segment's name
    without_index    names of segments whose index lacks passes
    uncommitted      names of good files that no manifest has
    damaged          what is wrong, by the name of a file or a pass
    missing          names of files that a manifest or an index has and that are gone
    unreplayable     name and reason of each good capture of a call that no replay can make
    ranks            ranks that the good captures name
    world_sizes      world sizes that the good captures name
    """

    good: list[Path] = field(default_factory=list)
    num_good_in: dict[Path, int] = field(default_factory=dict)
    num_torn_bytes: dict[str, int] = field(default_factory=dict)
    without_index: list[str] = field(default_factory=list)
    uncommitted: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    num_manifests: int = 0
    unreplayable: list[str] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    world_sizes: set[int] = field(default_factory=set)

    @property
    def world_size(self) -> int:
        """Return the largest world size that a capture names; 0 if none does."""
        return max(self.world_sizes, default=0)

    @property
    def missing_ranks(self) -> list[int]:
        """List the ranks of the job's world that left nothing here."""
        return [rank for rank in range(self.world_size) if self.ranks and rank not in self.ranks]

    @property
    def num_good(self) -> int:
        return len(self.good) + sum(self.num_good_in.values())

    def add_rank(self, rank: int | None, world_size: int | None) -> None:
        self.ranks.update(() if rank is None else (rank,))
        self.world_sizes.update(() if world_size is None else (world_size,))

    @property
    def is_whole(self) -> bool:
        return not self.damaged and not self.missing


def describe_file(path: Path, call: CapturedCall) -> ManifestEntry:
    """Describe the file at `path`, which holds `call`. Raises OSError."""
    data = path.read_bytes()
    return ManifestEntry(
        name=path.name,
        num_bytes=len(data),
        crc32=zlib.crc32(data),
        rank=call.origin.rank,
        step=call.origin.step,
        trains=call.trains,
        shapes={name: list(tensor.shape) for name, tensor in call.tensors.items()},
    )


def format_stamp(time: str) -> str:
    """Turn an ISO 8601 time into a part of a file name."""
    return "".join(c if c.isdigit() else "_" for c in time.partition("+")[0])


def write_manifest(
    folder: Path, entries: Sequence[ManifestEntry | str], *, rank: int, time: str, number: int = 0
) -> Path:
    """Write a rank's manifest and return its path. `time` tells recordings into one folder apart. Raises OSError.

    entries  entries, or their texts as `to_json` gives them
    number   number of manifests that the recording has filled before
    """
    path = folder / f"manifest_rank{rank}_{format_stamp(time)}{f'_{number:06d}' if number else ''}.json"
    rewrite_manifest(path, entries)
    return path


def rewrite_manifest(path: Path, entries: Sequence[ManifestEntry | str]) -> None:
    """Replace the manifest at `path` by one with these entries, or entries of these texts. Raises OSError."""
    texts = ",\n  ".join(entry if isinstance(entry, str) else entry.to_json() for entry in entries)
    write_atomically(path, f'{{\n "format": {FORMAT},\n "files": [\n  {texts}\n ]\n}}'.encode())


def read_manifest(path: Path) -> list[ManifestEntry]:
    """Read the entries of a manifest. Raises CaptureError for a file that is no manifest."""
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CaptureError(f"{path.name}: larger than {MAX_MANIFEST_BYTES} bytes, which no manifest is")
        content: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(f"{path.name}: cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("files"), list):
        raise CaptureError(f"{path.name}: no manifest of format {FORMAT}")
    names = {field.name for field in fields(ManifestEntry)}
    for values in content["files"]:
        if not isinstance(values, dict) or values.keys() != names or not isinstance(values["name"], str):
            raise CaptureError(f"{path.name}: an entry that is none: {str(values)[:80]}")
        if Path(values["name"]).name != values["name"]:
            raise CaptureError(f"{path.name}: names a file outside its folder: {values['name'][:80]}")
    return [ManifestEntry(**values) for values in content["files"]]


def check_folder(folder: Path) -> FolderCheck:
    """Read every capture and compare it with the manifests and indexes. Raises CaptureError without a folder.

    A file of one pass is decoded; of a pass in a segment the bytes are compared with its checksum. First come the
    manifests, then the files against the manifests, then the segments, each with its index.
    """
    present = list_single_pass_files(folder)
    manifests = sorted(path for home in list_capture_folders(folder) for path in home.glob("manifest_rank*.json"))
    result = FolderCheck(num_manifests=len(manifests))
    entries: dict[Path, ManifestEntry] = {}
    for path in manifests:
        try:
            entries |= {path.with_name(entry.name): entry for entry in read_manifest(path)}
        except CaptureError as error:
            result.damaged[path.name] = str(error)
    for path in present:
        try:
            call = read_call(path)
            actual = describe_file(path, call)
        except (CaptureError, OSError) as error:
            result.damaged[path.name] = str(error)
            continue
        committed = entries.get(path)
        if committed is None:
            result.uncommitted.append(path.name)
        elif (committed.num_bytes, committed.crc32) != (actual.num_bytes, actual.crc32):
            result.damaged[path.name] = f"{path.name}: reads, but is not the file that the manifest has"
            continue
        result.good.append(path)
        result.add_rank(call.origin.rank, call.origin.world_size)
        if has_only_embeddings(call.tensors):
            result.unreplayable.append(f"{path.name}: {EMBEDDINGS_REASON}")
    result.missing.extend(sorted(path.name for path in entries.keys() - set(present)))
    for path in list_segment_files(folder):
        _check_segment(path, result)
    indexes = (path for home in list_capture_folders(folder) for path in home.glob(f"segment_rank*{INDEX_SUFFIX}"))
    segments = (path.with_suffix(SEGMENT_SUFFIX) for path in indexes)
    result.missing.extend(sorted(path.name for path in segments if not path.exists()))
    return result


def _check_segment(path: Path, result: FolderCheck) -> None:
    try:
        segment = Segment.open(path)
    except CaptureError as error:
        result.damaged[path.name] = str(error)
        return
    if segment.num_torn_bytes:
        result.num_torn_bytes[path.name] = segment.num_torn_bytes
    if not segment.has_whole_index:
        result.without_index.append(path.name)
    if reason := describe_damage(segment):
        result.damaged[path.name] = reason
    result.num_good_in[path] = segment.num_passes
    result.add_rank(segment.head.rank, segment.head.world_size)
    for index, (record, data) in enumerate(segment.read_passes()):
        if matches_checksum(record, data):
            if record.counts is None:
                result.unreplayable.append(f"{segment.name_at(index)}: {EMBEDDINGS_REASON}")
        else:
            result.num_good_in[path] -= 1
            name = segment.name_at(index)
            result.damaged[name] = f"{name}: the checksum is wrong: this pass of {path.name} is damaged"


def describe_damage(segment: Segment) -> str | None:
    """Say what a segment has lost, as far as its index tells; None if it has lost nothing."""
    if segment.num_cut_off:
        return (
            f"{segment.path.name}: truncated: its index has {segment.num_cut_off} passes more than are here. "
            "Copy the segment again"
        )
    if segment.gaps:
        num_bytes = sum(length for _, length in segment.gaps)
        return f"{segment.path.name}: {num_bytes} bytes of it are no pass: damaged. Copy it and its index again"
    return None
