"""Bring home what the nodes of a Ray cluster recorded, each on a disk of its own: `capture collect FOLDER --to HERE`.

A file at home is whole, and is never replaced by another one: only by a later state of the same recording's file.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from capture.facts import Setting
from capture.file_format.atomic_write import choose_temporary_path, remove_temporaries_of_host
from capture.file_format.folder_layout import ACTOR_CONFIG_NAME
from capture.file_format.micro_batch import CaptureError
from capture.on_ray.cluster import RayNode, connect, list_nodes, start_readers
from capture.on_ray.node_files import FileChange, FileState, compute_checksum
from capture.path_checks import check_node_folder
from capture.record.job_facts import select_architecture

# A busy node starts the actor late. That a node is gone, Ray knows much sooner than this.
ANSWER_SECONDS = 120.0
MAX_FILES_PER_REQUEST = 500
# How often a file is tried that is rewritten while it is read.
MAX_ATTEMPTS = 3
# Files that their own recording rewrites.
_RECORD_NAME = re.compile(r"(manifest|incidents|model)_rank\d+_.*\.json")


@dataclass(kw_only=True, slots=True)
class NodeCollection:
    """What came from one node.

    num_files, num_bytes  what was copied now
    num_later       of these files: those that replaced an earlier state of the same file
    num_equal       files that were here already
    num_salvaged    passes that dead processes had left in the node's memory
    growing         files that grew while they were read: their beginning was copied
    num_unfinished  temporaries on the node
    others          files that were not copied, because another file has their name here
    unread          files that were not copied for another reason, with the reason
    problem         what ended the work with this node, or what it could not do
    """

    node: RayNode
    has_folder: bool = True
    num_files: int = 0
    num_bytes: int = 0
    num_later: int = 0
    num_equal: int = 0
    num_salvaged: int = 0
    growing: list[str] = field(default_factory=list)
    num_unfinished: int = 0
    others: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    problem: str | None = None

    @property
    def is_whole(self) -> bool:
        return not (self.growing or self.others or self.unread or self.problem)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collection:
    """What was copied from each node; `lost` are nodes that had left the cluster before."""

    nodes: list[NodeCollection]
    lost: list[RayNode]

    @property
    def is_whole(self) -> bool:
        return all(node.is_whole for node in self.nodes)

    def lines(self, folder: str | Path, target: str | Path) -> list[str]:
        """Describe what was copied, a line for each node, what was not, and what to type next."""
        return list(_describe_collection(self, folder, target))


def collect_folder(
    folder: str | Path,
    target: str | Path,
    *,
    address: str | None = None,
    node: str | None = None,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Collection:
    """Copy the folder of each node into `target`, with the passes that dead processes left in the nodes' memory.

    folder       absolute; variables are those of the node's environment
    address      of the cluster: HOST:PORT or `auto`; None: the one that this process is connected to, else `auto`
    node         id, or the beginning of one, or host of the nodes to ask; None: all
    on_progress  called with the bytes that were copied, the bytes to copy from the node, and the node

    Files that are here and equal are not sent again, so the same call goes on after an interruption. If a node dies
    meanwhile, only the work with that node ends. Raises CaptureError if the target cannot be written to, without a
    cluster, or if no node has the folder.
    """
    folder, target = str(folder), Path(target).absolute()
    check_node_folder(folder, target)
    with _prepare_target(target), connect(address) as ray:
        all_nodes = list_nodes(ray)
        alive_nodes = [candidate for candidate in all_nodes if candidate.is_alive]
        nodes = [candidate for candidate in alive_nodes if node is None or _is_named(candidate, node)]
        if not nodes:
            names = ", ".join(map(str, alive_nodes))
            raise CaptureError(Setting("node", node), ": no such node", f"Give an id or a host of {names}")
        home = _TargetFolder(target)
        with start_readers(ray, nodes, folder) as readers:
            # All nodes salvage at the same time; their files are copied one node after the other.
            salvage_answers = [reader.salvage.remote() for reader in readers]
            collections = [
                _NodeCollector(ray, ray_node, reader, home, on_progress).collect(salvage_answer)
                for ray_node, reader, salvage_answer in zip(nodes, readers, salvage_answers, strict=True)
            ]
        lost = [candidate for candidate in all_nodes if not candidate.is_alive]
        if not any(collection.has_folder for collection in collections):
            raise CaptureError(
                f"{folder}: no node of the cluster has this folder: asked {_join_names(nodes)}"
                f"{f'; lost before: {_join_names(lost)}' if lost else ''}. Give the path that the training function has"
            )
    return Collection(nodes=collections, lost=lost)


def _is_named(node: RayNode, name: str) -> bool:
    """Tell whether `name` is the beginning of the node's id, or its host."""
    return node.id.startswith(name) or node.host == name


def _describe_collection(collection: Collection, folder: str | Path, target: str | Path) -> Iterator[str]:
    for node in collection.nodes:
        if node.has_folder:
            yield from _describe_node(node, folder, target)
        else:
            yield f"node       {node.node}: {node.problem or f'no folder {folder}'}"
    if collection.lost:
        yield f"lost       {_join_names(collection.lost)}: left the cluster before; what they alone had is not here"
    yield f"           capture check {target}"
    yield f"           replay inspect {target}"


def _describe_node(node: NodeCollection, folder: str | Path, target: str | Path) -> Iterator[str]:
    later = f", {node.num_later} in the place of an earlier state" if node.num_later else ""
    equal = f"; here already: {node.num_equal}" if node.num_equal else ""
    yield f"node       {node.node}: {_count(node.num_files, 'file')}, {node.num_bytes:,} bytes{later}{equal}"
    if node.num_salvaged:
        yield f"salvaged   {_count(node.num_salvaged, 'pass', 'passes')} of processes that died on {node.node}"
    if node.problem:
        yield f"failed     {node.node}: {node.problem}. Type the same again, or do without what is not here"
    if node.others:
        yield f"failed     {node.node}: {_shorten(node.others)} not brought: here is another file of that name"
    if node.growing:
        yield f"failed     {node.node}: {_shorten(node.growing)} still being written: the beginning is here"
    for reason in sorted(set(node.unread.values())):
        names = [name for name, other_reason in node.unread.items() if other_reason == reason]
        yield f"failed     {node.node}: {_shorten(names)} not brought: {reason}"
    if node.others:
        yield f"           Try: capture collect '{folder}' --to {target}-2 --node {node.node.id[:8]}"
    if node.num_unfinished:
        yield (
            f"           {_count(node.num_unfinished, 'temporary', 'temporaries')} left there: being written, or "
            "cut short with its process"
        )


def _count(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def _shorten(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _join_names(nodes: Sequence[RayNode]) -> str:
    return ", ".join(map(str, nodes[:8])) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")


@contextmanager
def _prepare_target(target: Path) -> Iterator[None]:
    """Make the target if it is not there, and remove it at the end if nothing was copied. Raises CaptureError."""
    is_new = not target.exists()
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Whether files can be written here is tried before the cluster is asked.
        with _open_temporary(target / "probe"):
            pass
        remove_temporaries_of_host(target)
    except OSError as error:
        advice = f"Give {Setting('to')} a folder where you may write"
        raise CaptureError(target, f": cannot be written to: {error.strerror}", advice) from None
    try:
        yield
    except OSError as error:
        raise CaptureError(
            f"{target}: cannot be written to: {error.strerror}. What came is whole; make room, and type the same again"
        ) from None
    finally:
        if is_new and not any(target.iterdir()):
            target.rmdir()


class _Stage(IntEnum):
    """The order in which files are copied.

    Files that list others come before those that they list, since more is written meanwhile.
    """

    MODEL = 0
    RECORDS = 1
    PASSES = 2


def _find_stage(name: str) -> _Stage:
    file_name = PurePosixPath(name).name
    if file_name == ACTOR_CONFIG_NAME:
        return _Stage.MODEL
    return _Stage.RECORDS if _RECORD_NAME.fullmatch(file_name) else _Stage.PASSES


class _FileRange(NamedTuple):
    """The part of a file to copy: all of it, or what follows the bytes that are here already."""

    name: str
    begin: int
    end: int
    modified_ns: int


class _NodeCollector:
    """Copies the files of one node into the target, and notes in `result` what it could not copy."""

    def __init__(
        self,
        ray: Any,
        node: RayNode,
        reader: Any,
        home: "_TargetFolder",
        on_progress: Callable[[int, int, str], None] | None,
    ) -> None:
        self._ray = ray
        self._reader = reader
        self._home = home
        self._on_progress = on_progress
        self._result = NodeCollection(node=node)
        # Folders of the node that hold captures of another model than the same folders here.
        self._other_models: list[PurePosixPath] = []

    def collect(self, salvage_answer: Any) -> NodeCollection:
        """Copy the node's files. `salvage_answer` is what the reader's `salvage` will return."""
        result, errors = self._result, self._ray.exceptions
        try:
            salvaged = self._ray.get(salvage_answer, timeout=ANSWER_SECONDS)
            result.num_salvaged, result.problem = salvaged.num_passes, salvaged.problem
            for stage in _Stage:
                self._copy_stage(stage)
            if result.has_folder:
                result.num_unfinished = self._ask("count_temporaries")
        except errors.GetTimeoutError:
            result.problem = f"did not answer within {ANSWER_SECONDS:.0f} s"
        except errors.RayTaskError as error:
            result.problem = f"cannot read the folder: {str(error.cause or error).splitlines()[-1]}"
        except errors.RayError as error:
            is_gone = all(node.id != result.node.id or not node.is_alive for node in list_nodes(self._ray))
            result.problem = (
                "left the cluster meanwhile" if is_gone else f"its actor died: {str(error).splitlines()[0]}"
            )
        return result

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `NodeFiles` on the node."""
        return self._ray.get(getattr(self._reader, method).remote(*arguments), timeout=ANSWER_SECONDS)

    def _copy_stage(self, stage: _Stage) -> None:
        """Copy the files of a stage, and again those that were rewritten while they were read."""
        remaining: set[str] | None = None
        for _ in range(MAX_ATTEMPTS):
            files: dict[str, FileState] | None = self._ask("list_files")
            if files is None:
                self._result.has_folder = False
                return
            names = [name for name in files if _find_stage(name) == stage and (remaining is None or name in remaining)]
            remaining = self._copy_ranges(self._choose_ranges({name: files[name] for name in names}))
            if not remaining:
                return
        for name in remaining or ():
            self._result.unread[name] = "it is rewritten again and again"

    def _choose_ranges(self, files: dict[str, FileState]) -> list[_FileRange]:
        """Choose what to copy, and note the files that are here already or must not be copied."""
        ranges: list[_FileRange] = []
        to_compare: list[tuple[str, FileState, os.stat_result]] = []
        for name, state in files.items():
            local = self._home.stat(name)
            if any(PurePosixPath(name).is_relative_to(folder) for folder in self._other_models):
                self._result.unread[name] = "the actor.json here is another model's"
            elif local is None:
                ranges.append(_FileRange(name, 0, *state))
            elif (local.st_size, local.st_mtime_ns) == state:
                self._result.num_equal += 1
            else:
                to_compare.append((name, state, local))
        compared = (self._compare(name, state, local) for name, state, local in to_compare)
        return [*ranges, *(file_range for file_range in compared if file_range is not None)]

    def _compare(self, name: str, state: FileState, local: os.stat_result) -> _FileRange | None:
        """Choose what to copy of a file that is here in another state; None, noted, for nothing or another file.

        If the shorter of both files begins as the longer one does, they are states of one file, and the longer one is
        the later state. Otherwise a record was rewritten, or a model's config may differ only in what does not tell
        models apart; anything else is another file.
        """
        stage, num_bytes = _find_stage(name), min(state.num_bytes, local.st_size)
        (crc,) = self._ask("compute_checksums", [(name, num_bytes)])
        if crc is not None and crc == compute_checksum(self._home.folder / name, num_bytes):
            if state.num_bytes > local.st_size:
                return _FileRange(name, local.st_size, *state)
            self._result.num_equal += 1
        elif stage == _Stage.RECORDS:
            if state.modified_ns > local.st_mtime_ns:
                return _FileRange(name, 0, *state)
            self._result.num_equal += 1
        elif stage == _Stage.MODEL and self._is_same_model(name, state):
            self._result.num_equal += 1
        else:
            self._result.others.append(name)
            if stage == _Stage.MODEL:
                self._other_models.append(PurePosixPath(name).parent)
        return None

    def _is_same_model(self, name: str, state: FileState) -> bool:
        (part,) = self._ask("read_parts", [(name, 0, state.num_bytes)])
        if isinstance(part, str):
            return False
        return bool(_read_architecture(part.data) == _read_architecture((self._home.folder / name).read_bytes()))

    def _copy_ranges(self, ranges: list[_FileRange]) -> set[str]:
        """Copy the files, and return the names of those that were rewritten meanwhile."""
        rewritten: set[str] = set()
        num_all, num_copied = sum(file_range.end - file_range.begin for file_range in ranges), 0
        parts = self._request_parts(ranges)
        for file_range in ranges:
            with self._home.write_temporary(file_range.name, file_range.begin) as file:
                for part in parts:
                    if isinstance(part, str):
                        self._result.unread[file_range.name] = part
                        break
                    file.write(part.data)
                    num_copied += len(part.data)
                    if self._on_progress is not None:
                        self._on_progress(num_copied, num_all, str(self._result.node))
                    if _is_last_part(part, file_range):
                        if self._keep_file(file, file_range, part):
                            self._result.num_files += 1
                            self._result.num_bytes += part.offset + len(part.data) - file_range.begin
                        else:
                            rewritten.add(file_range.name)
                        break
        return rewritten

    def _request_parts(self, ranges: Sequence[_FileRange]) -> Iterator[FileChange | str]:
        """Ask for the files, one after the other, and yield each part as it comes.

        An answer holds parts of many small files, or a part of a large one. So each request begins where the answer
        before it has ended: at file `number`, and at `offset` in it.
        """
        number, offset = 0, ranges[0].begin if ranges else 0
        while number < len(ranges):
            requested = list(islice(ranges, number, number + MAX_FILES_PER_REQUEST))
            request = [(file_range.name, file_range.begin, file_range.end) for file_range in requested]
            request[0] = (requested[0].name, offset, requested[0].end)
            for part in self._ask("read_parts", request):
                yield part
                if isinstance(part, str) or _is_last_part(part, ranges[number]):
                    number += 1
                    offset = ranges[number].begin if number < len(ranges) else 0
                else:
                    offset = part.offset + len(part.data)

    def _keep_file(self, file: IO[bytes], file_range: _FileRange, last_part: FileChange) -> bool:
        """Give a copy its name. Returns False if the node's file was rewritten meanwhile, and has another beginning."""
        file.flush()
        num_bytes = os.fstat(file.fileno()).st_size
        if last_part.modified_ns != file_range.modified_ns:
            (crc,) = self._ask("compute_checksums", [(file_range.name, num_bytes)])
            if crc is None or crc != compute_checksum(Path(file.name), num_bytes):
                return False
            if last_part.num_bytes > num_bytes:
                self._result.growing.append(file_range.name)
        self._result.num_later += self._home.keep(file, file_range.name, last_part.modified_ns)
        return True


def _is_last_part(part: FileChange, file_range: _FileRange) -> bool:
    """Tell whether a part ends the file; it also does if it is empty, as the file has become shorter."""
    return part.offset + len(part.data) >= file_range.end or not part.data


class _TargetFolder:
    """The folder that the files are copied into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stat(self, name: str) -> os.stat_result | None:
        """Read the state of a file; None if it is not here."""
        try:
            return (self.folder / name).stat()
        except FileNotFoundError:
            return None

    @contextmanager
    def write_temporary(self, name: str, num_bytes: int) -> Iterator[IO[bytes]]:
        """Open a temporary for a file. It is removed at the end, unless `keep` has given it the file's name.

        num_bytes  size of the file that is here, which the temporary begins with; 0 for a new file
        """
        path = self.folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _open_temporary(path) as file:
            if num_bytes:
                with path.open("rb") as earlier:
                    shutil.copyfileobj(earlier, file)
            yield file

    def keep(self, file: IO[bytes], name: str, modified_ns: int) -> bool:
        """Give the temporary its name and time. Returns whether it replaces an earlier state."""
        is_later = (self.folder / name).exists()
        os.fsync(file.fileno())
        os.utime(file.fileno(), ns=(modified_ns, modified_ns))
        os.replace(file.name, self.folder / name)
        return is_later


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextmanager
def _open_temporary(path: Path) -> Iterator[IO[bytes]]:
    temporary = choose_temporary_path(path)
    with open(temporary, "xb", opener=_open_private) as file:
        try:
            yield file
        finally:
            # It is gone already if it has got the name of the file.
            temporary.unlink(missing_ok=True)


def _read_architecture(data: bytes) -> Any:
    """Read what tells one model from another in an actor.json; the bytes themselves if they are no such file."""
    try:
        return select_architecture(json.loads(data)["config"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return data
