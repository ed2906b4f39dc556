"""Convert older dumps and those of other projects into a folder of format 1."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from torch import Tensor

from capture.facts import Setting
from capture.file_format.actor_config import (
    read_actor_config,
    read_adapter_configs,
    read_frozen_names,
    read_parameter_names,
    write_actor_config,
)
from capture.file_format.capture_file import CapturedCall, read_call, read_capture_bytes, utc_now
from capture.file_format.folder_layout import choose_rank_folder, is_in_segment
from capture.file_format.micro_batch import CaptureError
from capture.file_format.model_facts import copy_model_facts
from capture.file_format.tensor_codec import view_bytes
from capture.importers import find_importer, list_dumps, read_dump
from capture.path_checks import check_new_folder
from capture.record.rank_writer import RankWriter, open_rank_writer
from capture.record.retention import RetentionSettings

DUMP_TIME = "%Y%m%d_%H%M%S_%f"


class FolderWriter:
    """Writes captures of any ranks into a new folder as a recording would: files with manifests, or segments.

    The manifests are written where the `with` block ends. Every method raises OSError.

    segment    bytes of a segment; None: each pass is a file
    num_bytes  size of what it wrote without manifests and indexes; known after the `with` block
    """

    def __init__(self, folder: Path, *, segment: int | None) -> None:
        self.num_bytes = 0
        self._folder = folder
        self._keep = RetentionSettings(segment=segment)
        self._stamp = utc_now()
        self._writers: dict[tuple[int, Path], RankWriter] = {}
        self._latest: RankWriter | None = None

    def __enter__(self) -> "FolderWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            for writer in self._writers.values():
                writer.commit()
        finally:
            for writer in self._writers.values():
                writer.close()
        self.num_bytes = sum(path.stat().st_size for path in self._folder.rglob("actor_inputs*.pkl"))
        self.num_bytes += sum(path.stat().st_size for path in self._folder.rglob("*.seg"))

    def write(self, call: CapturedCall) -> Path:
        """Write a call and return its path. Raises what `CapturedCall.encode` does."""
        encoded = call.encode()
        in_segments = self._keep.segment is not None
        rank_folder = choose_rank_folder(
            self._folder, rank=encoded.rank, world_size=encoded.world_size, in_segments=in_segments
        )
        key = (encoded.rank, rank_folder)
        if key not in self._writers:
            self._writers[key] = open_rank_writer(
                self._folder, self._keep, rank=encoded.rank, world_size=encoded.world_size, stamp=self._stamp
            )
        writer = self._writers[key]
        # Only the latest writer keeps its files open: a process may not open as many files as hundreds of ranks have.
        if self._latest is not None and self._latest is not writer:
            self._latest.commit()
            self._latest.close()
        self._latest = writer
        path = writer.write(encoded)
        assert path is not None, "there is no limit"
        return path


def make_empty_folder(folder: Path) -> None:
    """Make a folder with mode 0700. Raises CaptureError if there is something in it."""
    check_new_folder(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What `convert_folder` wrote, and what it refused.

    refused  reason by name of each file that was refused
    """

    num_written: int
    refused: Mapping[str, CaptureError] = field(default_factory=dict)
    num_bytes_before: int
    num_bytes_after: int


def convert_folder(
    source: Path,
    target: Path,
    *,
    project: str | None = None,
    num_rows: int | None = None,
    segment: int | None = None,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> Conversion:
    """Write every dump of `source`, a file or a folder, as format 1 into `target`, with a manifest; or into segments.

    Each file is read back and compared before it counts.

    project      project that wrote the dumps; None: the start of each file tells
    num_rows     rows of a micro-batch; None: as the dump has them
    segment      bytes of a segment, a file of many passes; None: each pass becomes a file
    on_progress  called before each dump with the number of dumps that are done, and of all

    What a dump does not say stays unknown, except its step, which is its number among its rank's files, and its time,
    which is that of the conversion. A time without a zone is taken for UTC. Raises CaptureError without a source, for
    a project that is not known, or for a target that holds something already; OSError.
    """
    if num_rows is not None and num_rows < 1:
        raise CaptureError(Setting("rows"), f"must be 1 or more, not {num_rows}")
    importer = None if project is None else find_importer(project)
    paths = list_dumps(source)
    make_empty_folder(target)
    folder = source if source.is_dir() else source.parent
    if (config := read_actor_config(folder)) is not None:
        write_actor_config(
            target,
            config,
            None,
            read_adapter_configs(folder),
            read_frozen_names(folder),
            read_parameter_names(folder),
        )
    copy_model_facts(folder, target)
    now = utc_now()
    refused: dict[str, CaptureError] = {}
    num_by_rank: Counter[int] = Counter()
    num_bytes_before = 0
    with FolderWriter(target, segment=segment) as writer:
        for number, path in enumerate(paths):
            on_progress(number, len(paths))
            name = path.relative_to(folder).as_posix()
            try:
                for call in read_dump(path, name, importer, num_rows):
                    rank = call.origin.rank or 0
                    converted = _with_step_and_time(call, num_by_rank[rank], now, path.name)
                    copy = writer.write(converted)
                    _check_equal(converted, read_call(copy), copy)
                    num_by_rank[rank] += 1
            except CaptureError as error:
                refused[name] = error
                continue
            num_bytes_before += len(read_capture_bytes(path)) if is_in_segment(path) else path.stat().st_size
    return Conversion(
        num_written=num_by_rank.total(),
        refused=refused,
        num_bytes_before=num_bytes_before,
        num_bytes_after=writer.num_bytes,
    )


def _with_step_and_time(call: CapturedCall, number: int, now: str, source: str) -> CapturedCall:
    """Return the call with `number` as its step and the time `now`, where the dump does not say them."""
    step = number if call.origin.step is None else call.origin.step
    time = now if call.format and call.origin.time is None else _to_iso_time(call.origin.time, source)
    return replace(call, origin=replace(call.origin, step=step, time=time))


def _check_equal(call: CapturedCall, read_back: CapturedCall, copy: Path) -> None:
    # Bytes are compared and not values: NaN is not equal to itself.
    for name, tensor in call.tensors.items():
        if _read_bytes(read_back.tensors[name]) != _read_bytes(tensor):
            raise AssertionError(f"{copy}: {name} is not what was written")


def _read_bytes(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().view(-1)
    return bytes(view_bytes(flat))


def _to_iso_time(time: str | None, source: str) -> str | None:
    for parse in (datetime.fromisoformat, lambda text: datetime.strptime(text, DUMP_TIME)):
        try:
            moment = parse(time or "")
        except ValueError:
            continue
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).isoformat(timespec="microseconds")
    raise CaptureError(f"{source}: its time is {str(time)[:40]!r}; allowed is ISO 8601 or {DUMP_TIME}")
