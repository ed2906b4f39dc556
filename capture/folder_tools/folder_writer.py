"""Write captures into a new folder as a recording would: files with manifests, or segments."""

from pathlib import Path
from types import TracebackType

from capture.file_format.capture_file import Call, utc_time
from capture.file_format.folder_layout import home_of
from capture.file_format.micro_batch import CaptureError
from capture.record.disk_limits import RankWriter, rank_writer
from capture.record.retention import Keep


class FolderWriter:
    """Writes calls of any ranks, and their manifests where the `with` block ends. Every method raises OSError.

    segment    bytes of a segment; None: each pass is a file
    num_bytes  of what it wrote, known at the end, without manifests and indexes
    """

    def __init__(self, folder: Path, *, segment: int | None) -> None:
        self.num_bytes = 0
        self._folder = folder
        self._keep = Keep(segment=segment)
        self._stamp = utc_time()
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

    def write(self, call: Call) -> Path:
        """Write a call and return its path. Raises what `Call.encoded` does."""
        encoded = call.encoded()
        in_segments = self._keep.segment is not None
        place = (
            encoded.rank,
            home_of(self._folder, rank=encoded.rank, world_size=encoded.world_size, in_segments=in_segments),
        )
        if place not in self._writers:
            self._writers[place] = rank_writer(
                self._folder, self._keep, rank=encoded.rank, world_size=encoded.world_size, stamp=self._stamp
            )
        writer = self._writers[place]
        if self._latest is not None and self._latest is not writer:
            self._latest.commit()
            self._latest.close()  # of hundreds of ranks not all can have open files
        self._latest = writer
        path = writer.write(encoded)
        assert path is not None, "there is no limit"
        return path


def make_empty_folder(folder: Path) -> None:
    """Make a folder with mode 0700. Raises CaptureError if there is something in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CaptureError(f"{folder} is not an empty folder. Give the name of a new one")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
