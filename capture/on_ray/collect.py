"""Bring home what the nodes of a Ray cluster recorded, each on a disk of its own: `capture collect FOLDER --to HERE`.

A file at home is whole, and is never replaced by another one: only by a later state of the same recording's file.
"""

import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from capture.facts import Setting
from capture.file_format.folder_layout import ACTOR_CONFIG_NAME
from capture.file_format.micro_batch import CaptureError
from capture.on_ray.cluster import RayNode, connect, list_nodes, start_readers
from capture.on_ray.node_files import FileChange, FileState, compute_checksum
from capture.record.job_facts import select_architecture

ANSWER_SECONDS = 120.0  # a node that is busy starts the actor late; one that is gone is known to Ray much sooner
MOST_FILES_AT_ONCE = 500
MOST_ATTEMPTS = 3  # at a file that is rewritten while it is read
_RECORDS = re.compile(r"(manifest|incidents)_rank\d+_.*\.json")  # rewritten by the recording that they name
_HOST = re.sub(r"\W", "_", platform.node())
_TEMPORARY = re.compile(rf"\..+\.{_HOST}-(\d+)-\w+\.tmp")


@dataclass(kw_only=True, slots=True)
class NodeCollection:
    """What came from one node.

    num_files, num_bytes  that came now
    num_later     of these files: those that took the place of an earlier state of them
    num_equal     files that were here already
    num_salvaged  passes that dead processes had left in the node's memory
    growing       files that grew while they were read: what is here is their beginning
    num_unfinished  temporaries on the node
    others        files of whose name there is another one here: they are still on the node alone
    unread        why other files are still on the node alone
    problem       what ended the work with this node, or what it could not do
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
    """What came home, by node; `lost` are nodes that had left the cluster before."""

    nodes: list[NodeCollection]
    lost: list[RayNode]

    @property
    def is_whole(self) -> bool:
        return all(one.is_whole for one in self.nodes)

    def lines(self, folder: str | Path, target: str | Path) -> list[str]:
        """Say what came, a line a node, what did not, and what to type next."""
        return list(_lines(self, folder, target))


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
    on_progress  called with bytes that came, bytes of the node, and the node

    What is there and equal is not sent again, so the same call goes on after an interruption. A node that dies
    meanwhile ends nothing but the work with it. Raises CaptureError if the target cannot be written to, without a
    cluster, or if no node has the folder.
    """
    folder, target = str(folder), Path(target).absolute()
    if not folder.startswith(("/", "~", "$")):
        why = "is no absolute path, and workers of a Ray job have working folders of their own"
        advice = f"Try: capture collect {Path(folder).absolute()} {Setting('to', target)}"
        raise CaptureError(folder, why, advice)
    if Path(folder) in target.parents:
        why = f"lies in {folder}, whose files would be brought there"
        raise CaptureError(target, why, f"Give {Setting('to')} another folder")
    with _writable(target), connect(address) as ray:
        known = list_nodes(ray)
        asked = [one for one in known if one.is_alive and (node is None or one.id.startswith(node) or one.host == node)]
        if not asked:
            listed = ", ".join(str(one) for one in known if one.is_alive)
            raise CaptureError(Setting("node", node), ": no such node", f"Give an id or a host of {listed}")
        home = _Home(target)
        with start_readers(ray, asked, folder) as actors:
            saved = [actor.salvage.remote() for actor in actors]
            found = [
                _NodeCollector(ray, one, actor, home, on_progress).run(salvaged)
                for one, actor, salvaged in zip(asked, actors, saved, strict=True)
            ]
        lost = [one for one in known if not one.is_alive]
        if not any(one.has_folder for one in found):
            raise CaptureError(
                f"{folder}: no node of the cluster has this folder: asked {_names(asked)}"
                f"{f'; lost before: {_names(lost)}' if lost else ''}. Give the path that the training function has"
            )
    return Collection(nodes=found, lost=lost)


def _lines(done: Collection, folder: str | Path, target: str | Path) -> Iterator[str]:
    for one in done.nodes:
        if one.has_folder:
            yield from _lines_of_node(one, folder, target)
        else:
            yield f"node       {one.node}: {one.problem or f'no folder {folder}'}"
    if done.lost:
        yield f"lost       {_names(done.lost)}: left the cluster before; what they alone had is not here"
    yield f"           capture check {target}"
    yield f"           replay inspect {target}"


def _lines_of_node(one: NodeCollection, folder: str | Path, target: str | Path) -> Iterator[str]:
    later = f", {one.num_later} in the place of an earlier state" if one.num_later else ""
    here = f"; here already: {one.num_equal}" if one.num_equal else ""
    yield f"node       {one.node}: {_counted(one.num_files, 'file')}, {one.num_bytes:,} bytes{later}{here}"
    if one.num_salvaged:
        yield f"salvaged   {_counted(one.num_salvaged, 'pass', 'passes')} of processes that died on {one.node}"
    if one.problem:
        yield f"failed     {one.node}: {one.problem}. Type the same again, or do without what is not here"
    if one.others:
        yield f"failed     {one.node}: {_first(one.others)} not brought: here is another file of that name"
    if one.growing:
        yield f"failed     {one.node}: {_first(one.growing)} still being written: the beginning is here"
    for reason in sorted(set(one.unread.values())):
        names = [name for name, why in one.unread.items() if why == reason]
        yield f"failed     {one.node}: {_first(names)} not brought: {reason}"
    if one.others:
        yield f"           Try: capture collect '{folder}' --to {target}-2 --node {one.node.id[:8]}"
    if one.num_unfinished:
        yield (
            f"           {_counted(one.num_unfinished, 'temporary', 'temporaries')} left there: being written, or "
            "cut short with its process"
        )


def _counted(number: int, one: str, several: str | None = None) -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"


def _first(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _names(known: Sequence[RayNode]) -> str:
    return ", ".join(map(str, known[:8])) + (f" and {len(known) - 8} more" if len(known) > 8 else "")


@contextmanager
def _writable(target: Path) -> Iterator[None]:
    """Make the target if it is not there, and take it away again if nothing came. Raises CaptureError."""
    is_new = not target.exists()
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _temporary(target / "probe"):
            pass
        _remove_stale(target)
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
    """The order in which files come: those that list others before these, as more is written meanwhile."""

    MODEL = 0
    RECORDS = 1
    PASSES = 2


def _stage(name: str) -> _Stage:
    last = PurePosixPath(name).name
    if last == ACTOR_CONFIG_NAME:
        return _Stage.MODEL
    return _Stage.RECORDS if _RECORDS.fullmatch(last) else _Stage.PASSES


class _FileRange(NamedTuple):
    """A file to bring: all of it, or what follows the bytes that are here already."""

    name: str
    begin: int
    end: int
    modified_ns: int


class _NodeCollector:
    """The work with one node."""

    def __init__(
        self, ray: Any, node: RayNode, actor: Any, home: "_Home", on_progress: Callable[[int, int, str], None] | None
    ) -> None:
        self._ray = ray
        self._actor = actor
        self._home = home
        self._on_progress = on_progress
        self._came = NodeCollection(node=node)
        self._other_models: list[PurePosixPath] = []  # folders that hold captures of another model than here

    def run(self, salvaged: Any) -> NodeCollection:
        """Bring the node's files home. `salvaged` is the answer that the actor owes."""
        errors = self._ray.exceptions
        try:
            saved = self._ray.get(salvaged, timeout=ANSWER_SECONDS)
            self._came.num_salvaged, self._came.problem = saved.num_passes, saved.problem
            for stage in _Stage:
                self._bring(stage)
            if self._came.has_folder:
                self._came.num_unfinished = self._ask("num_unfinished")
        except errors.GetTimeoutError:
            self._came.problem = f"did not answer within {ANSWER_SECONDS:.0f} s"
        except errors.RayTaskError as error:
            self._came.problem = f"cannot read the folder: {str(error.cause or error).splitlines()[-1]}"
        except errors.RayError as error:
            is_gone = all(one.id != self._came.node.id or not one.is_alive for one in list_nodes(self._ray))
            self._came.problem = (
                "left the cluster meanwhile" if is_gone else f"its actor died: {str(error).splitlines()[0]}"
            )
        return self._came

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._ray.get(getattr(self._actor, method).remote(*arguments), timeout=ANSWER_SECONDS)

    def _bring(self, stage: "_Stage") -> None:
        left: set[str] | None = None
        for _ in range(MOST_ATTEMPTS):
            listing: dict[str, FileState] | None = self._ask("listing")
            if listing is None:
                self._came.has_folder = False
                return
            names = [name for name in listing if _stage(name) == stage and (left is None or name in left)]
            left = self._fetch(self._plan({name: listing[name] for name in names}))
            if not left:
                return
        for name in left or ():
            self._came.unread[name] = "it is rewritten again and again"

    def _plan(self, listing: dict[str, FileState]) -> list[_FileRange]:
        """Return what has to come; what is here, and what may not come, is noted."""
        wanted: list[_FileRange] = []
        to_compare: list[tuple[str, FileState, os.stat_result]] = []
        for name, listed in listing.items():
            here = self._home.facts(name)
            if any(PurePosixPath(name).is_relative_to(folder) for folder in self._other_models):
                self._came.unread[name] = "the actor.json here is another model's"
            elif here is None:
                wanted.append(_FileRange(name, 0, *listed))
            elif (here.st_size, here.st_mtime_ns) == listed:
                self._came.num_equal += 1
            else:
                to_compare.append((name, listed, here))
        return [*wanted, *filter(None, (self._rest_of(*one) for one in to_compare))]

    def _rest_of(self, name: str, listed: FileState, here: os.stat_result) -> _FileRange | None:
        """Return what has to come of a file that is here in another state; None, noted, for nothing or another file."""
        num_bytes = min(listed.num_bytes, here.st_size)
        (crc,) = self._ask("checksums", [(name, num_bytes)])
        if crc is not None and crc == compute_checksum(self._home.folder / name, num_bytes):
            if listed.num_bytes > here.st_size:
                return _FileRange(name, here.st_size, *listed)
            self._came.num_equal += 1  # or here is a later state
        elif _stage(name) == _Stage.RECORDS:
            if listed.modified_ns > here.st_mtime_ns:
                return _FileRange(name, 0, *listed)
            self._came.num_equal += 1
        elif _stage(name) == _Stage.MODEL and self._is_same_model(name, listed):
            self._came.num_equal += 1
        else:
            self._came.others.append(name)
            if _stage(name) == _Stage.MODEL:
                self._other_models.append(PurePosixPath(name).parent)
        return None

    def _is_same_model(self, name: str, listed: FileState) -> bool:
        (part,) = self._ask("parts", [(name, 0, listed.num_bytes)])
        return not isinstance(part, str) and _model(part.data) == _model((self._home.folder / name).read_bytes())

    def _fetch(self, wanted: list[_FileRange]) -> set[str]:
        """Bring the files, and return the names of those that were rewritten meanwhile."""
        rewritten: set[str] = set()
        num_all, num_done = sum(one.end - one.begin for one in wanted), 0
        parts = self._parts(wanted)
        for one in wanted:
            with self._home.writing(one.name, one.begin) as file:
                for part in parts:
                    if isinstance(part, str):
                        self._came.unread[one.name] = part
                        break
                    file.write(part.data)
                    num_done += len(part.data)
                    if self._on_progress is not None:
                        self._on_progress(num_done, num_all, str(self._came.node))
                    if _is_last(part, one):
                        if self._keep(file, one, part):
                            self._came.num_files += 1
                            self._came.num_bytes += part.offset + len(part.data) - one.begin
                        else:
                            rewritten.add(one.name)
                        break
        return rewritten

    def _parts(self, wanted: Sequence[_FileRange]) -> Iterator[FileChange | str]:
        """Ask for the files, one after the other, and give each part as it comes."""
        begin, offset = 0, wanted[0].begin if wanted else 0
        while begin < len(wanted):
            asked = [(one.name, one.begin, one.end) for one in islice(wanted, begin, begin + MOST_FILES_AT_ONCE)]
            asked[0] = (asked[0][0], offset, asked[0][2])
            for part in self._ask("parts", asked):
                yield part
                if isinstance(part, str) or _is_last(part, wanted[begin]):
                    begin += 1
                    offset = wanted[begin].begin if begin < len(wanted) else 0
                else:
                    offset = part.offset + len(part.data)

    def _keep(self, file: IO[bytes], one: _FileRange, last: FileChange) -> bool:
        """Give the file its name if it is what the node has; a later state must begin with it."""
        file.flush()
        size = os.fstat(file.fileno()).st_size
        if last.modified_ns != one.modified_ns:
            (theirs,) = self._ask("checksums", [(one.name, size)])
            if theirs is None or theirs != compute_checksum(Path(file.name), size):
                return False
            if last.num_bytes > size:
                self._came.growing.append(one.name)
        self._came.num_later += self._home.keep(file, one.name, last.modified_ns)
        return True


def _is_last(part: FileChange, wanted: _FileRange) -> bool:
    return part.offset + len(part.data) >= wanted.end or not part.data  # the second: the file has become shorter


class _Home:
    """The folder that the files are brought into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def facts(self, name: str) -> os.stat_result | None:
        """Return what is known of a file that is here."""
        try:
            return (self.folder / name).stat()
        except FileNotFoundError:
            return None

    @contextmanager
    def writing(self, name: str, num_kept: int) -> Iterator[IO[bytes]]:
        """Open a temporary with the first bytes of the file that is here; it is removed unless `keep` was called."""
        path = self.folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _temporary(path) as file:
            if num_kept:
                with path.open("rb") as earlier:
                    shutil.copyfileobj(earlier, file)
            yield file

    def keep(self, file: IO[bytes], name: str, modified_ns: int) -> bool:
        """Give the temporary its name and time. Returns whether it takes an earlier state's place."""
        is_later = (self.folder / name).exists()
        os.fsync(file.fileno())
        os.utime(file.fileno(), ns=(modified_ns, modified_ns))
        os.replace(file.name, self.folder / name)
        return is_later


@contextmanager
def _temporary(path: Path) -> Iterator[IO[bytes]]:
    prefix = f".{path.name}.{_HOST}-{os.getpid()}-"
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=prefix, suffix=".tmp", delete=False) as file:
        try:
            yield file
        finally:
            Path(file.name).unlink(missing_ok=True)  # it is not there if it has got its name


def _remove_stale(folder: Path) -> None:
    """Remove the temporaries of killed collections of this host. Raises OSError."""
    for path in folder.rglob(".*.tmp"):
        match = _TEMPORARY.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            path.unlink(missing_ok=True)


def _model(data: bytes) -> Any:
    """Return what tells one model from another in an actor.json; the text if it is none."""
    try:
        return select_architecture(json.loads(data)["config"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return data
