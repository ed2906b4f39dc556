"""Read where each rank of a folder's last job was when it ended, from incidents and from the ends of recordings."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from capture.black_box.incidents import Incident, read_incidents
from capture.black_box.stacks import Frame, main_stack, traceback_frames
from capture.file_format.end_record import EndRecord, read_ends
from capture.file_format.manifest import stamp_of
from capture.record.observer import PLACES
from replay.watch.stacks import COLLECTIVE_CODE, NUM_INNERMOST

COLLECTIVE_FUNCTIONS = ("_distributed_broadcast_coalesced",)  # torch's own that wait in C++
BACKWARD = "_engine_run_backward"  # a wait of DDP's is in C++ below it
_GLOO_GAVE_UP = re.compile(r"Timed out waiting \d+ ?ms for")
_GAVE_UP = re.compile(r"time[sd]?[ -]?out|DistBackendError|NCCL error|monitoredBarrier", re.IGNORECASE)
_OF_A_PASS = {
    "in forward": "in the forward of pass {}",
    "after forward": "after the forward of pass {}",
    "in backward": "in the backward of pass {}",
    "after backward": "after the backward of pass {}",
    "in the optimizer's step": "in the optimizer's step after pass {}",
    "after the optimizer's step": "after the optimizer's step that followed pass {}",
}


class End(StrEnum):
    """How a rank ended, or what made it write."""

    FAILED = "failed"
    CRASHED = "crashed in native code"
    KILLED = "died without a word"
    ABORTED = "was aborted"
    DIED = "died"  # killed or aborted: its stacks went elsewhere
    GAVE_UP = "gave up waiting"  # its error says no more than that another rank did not answer
    SIGNALLED = "was sent a signal"
    SLOW = "was slow"
    CLOSED = "ended its loop"


@dataclass(frozen=True, kw_only=True, slots=True)
class LastSeen:
    """The last that is known of one rank of a job.

    forward  number of the pass that began last; None: none had
    place    where in that pass, or behind it; empty: not known
    frames   the main thread's stack, the innermost first
    """

    rank: int
    end: End
    time: str
    forward: int | None
    place: str = ""
    frames: Sequence[Frame] = ()
    incident: Incident | None = None
    closed: EndRecord | None = None
    collectives: dict[str, int] = field(default_factory=dict)

    @property
    def progress(self) -> tuple[int, int] | None:
        """Return a key that is smaller than that of a rank that is further on; None where it is not known."""
        if self.place not in PLACES:
            return None
        return (-1 if self.forward is None else self.forward), list(PLACES).index(self.place)

    @property
    def last_backward(self) -> int | None:
        return None if self.incident is None else self.incident.last_backward

    @property
    def waits(self) -> bool | None:
        """Tell whether it stands in a collective; None where its stack cannot show it, as in a backward in C++."""
        if not self.frames or self.frames[0].function == BACKWARD:
            return None
        return _in_collective(self.frames)

    @property
    def where(self) -> str:
        """Return `after the forward of pass 3`."""
        if self.forward is None:
            return "before any pass"
        return _OF_A_PASS.get(self.place, "in or after pass {}").format(self.forward)

    @property
    def line(self) -> str:
        """Return `at train.py:27 in compute_loss`, the innermost line of the job's own, and below it a library's."""
        if not self.frames:
            return ""
        own = next((frame for frame in self.frames if not frame.is_of_library), None)
        innermost = self.frames[0]
        if own is None or own is innermost:
            return f"at {innermost}"
        return f"at {own}, in {innermost}"


def last_seen(folder: Path) -> list[LastSeen]:
    """Return what is known of each rank of the folder's last job, by rank. Raises CaptureError for a damaged file.

    A job is what its ranks recorded between one start and the next: a rank that opens another recording begins another
    job. Ranks that closed their recordings count only beside one that did not.
    """
    incidents: dict[tuple[str, int], list[Incident]] = {}
    for record in read_incidents(folder):
        for one in record.incidents:
            opened = stamp_of(one.opened) if one.opened else record.name.partition(f"rank{record.rank}_")[2]
            incidents.setdefault((opened, record.rank), []).append(one)
    ends = {(stamp_of(end.opened), end.rank): end for end in read_ends(folder)}
    job: dict[int, tuple[str, int]] = {}
    for key in sorted({*incidents, *ends}):
        if key[1] in job:
            job = {}
        job[key[1]] = key
    seen = [_seen(rank, incidents.get(key, []), ends.get(key)) for rank, key in sorted(job.items())]
    found = [one for one in seen if one is not None]
    return found if any(one.end is not End.CLOSED for one in found) else []


def _in_collective(frames: Sequence[Frame]) -> bool:
    is_inside = bool(frames) and frames[0].function in COLLECTIVE_FUNCTIONS
    return is_inside or any(Path(frame.file).name in COLLECTIVE_CODE for frame in frames[:NUM_INNERMOST])


def world_size_of(seen: Iterable[LastSeen]) -> int:
    sizes = [one.incident.world_size for one in seen if one.incident is not None]
    sizes += [one.closed.world_size for one in seen if one.closed is not None]
    return max((size for size in sizes if size is not None), default=0)


def _seen(rank: int, incidents: Sequence[Incident], closed: EndRecord | None) -> LastSeen | None:
    ends = [one for one in incidents if one.what != "not finite"]
    if not ends and closed is not None:
        return _closed(closed)
    if not ends:
        return None
    last = ends[-1]
    same_pass = [one for one in ends if one.forward == last.forward]
    errors = [one for one in same_pass if one.what in ("exception", "out of memory")]
    goes_on = last.what == "slow step" or last.where == "SIGUSR1"
    if closed is not None and goes_on and closed.num_passes - 1 > (last.forward or 0):
        return _closed(closed)
    cause = errors[0] if errors else last
    frames = [*main_stack(cause.stacks)]
    if cause.traceback:
        frames = traceback_frames(cause.traceback)
    if not frames:  # killed, after it had said where it stood
        frames = next((known for one in reversed(same_pass) if (known := main_stack(one.stacks))), [])
    return LastSeen(
        rank=rank,
        end=_end(cause, frames),
        time=cause.time,
        forward=cause.forward,
        place=cause.place,
        frames=frames,
        incident=cause,
        collectives=dict(cause.collectives),
    )


def _closed(closed: EndRecord) -> LastSeen:
    return LastSeen(
        rank=closed.rank,
        end=End.CLOSED,
        time=closed.time,
        forward=closed.num_passes - 1,
        place=closed.place,
        closed=closed,
    )


def _end(cause: Incident, frames: Sequence[Frame]) -> End:
    match cause.what:
        case "signal":
            return End.SIGNALLED
        case "slow step":
            return End.SLOW
        case "died" if cause.stacks:
            return End.ABORTED if "Aborted" in cause.message else End.CRASHED
        case "died":
            return End.DIED if cause.message else End.KILLED
    waited = _in_collective(frames) or (bool(frames) and frames[0].function == BACKWARD)
    gave_up = _GLOO_GAVE_UP.search(cause.message) or (waited and _GAVE_UP.search(cause.message))
    if cause.follows_another or gave_up:
        return End.GAVE_UP
    return End.FAILED
