"""Decide which rank of a job that hung or died the others waited for. Plain data in, plain data out."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from capture.black_box.incidents import Incident, read_incidents
from capture.black_box.stacks import StackFrame, find_main_stack, parse_traceback
from capture.file_format.end_record import EndRecord, read_end_records
from capture.file_format.manifest import format_stamp
from capture.record.observer import TRAINING_PHASES
from replay.watch.blame import Blame, blame_fewest, blame_some
from replay.watch.stacks import COLLECTIVE_CODE, NUM_INNERMOST

# Read where each rank of a folder's last job was when it ended, from incidents and from the ends of recordings.

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
    frames: Sequence[StackFrame] = ()
    incident: Incident | None = None
    closed: EndRecord | None = None
    collectives: dict[str, int] = field(default_factory=dict)

    @property
    def progress(self) -> tuple[int, int] | None:
        """Return a key that is smaller than that of a rank that is further on; None where it is not known."""
        if self.place not in TRAINING_PHASES:
            return None
        return (-1 if self.forward is None else self.forward), list(TRAINING_PHASES).index(self.place)

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
            opened = format_stamp(one.opened) if one.opened else record.name.partition(f"rank{record.rank}_")[2]
            incidents.setdefault((opened, record.rank), []).append(one)
    ends = {(format_stamp(end.opened), end.rank): end for end in read_end_records(folder)}
    job: dict[int, tuple[str, int]] = {}
    for key in sorted({*incidents, *ends}):
        if key[1] in job:
            job = {}
        job[key[1]] = key
    seen = [_seen(rank, incidents.get(key, []), ends.get(key)) for rank, key in sorted(job.items())]
    found = [one for one in seen if one is not None]
    return found if any(one.end is not End.CLOSED for one in found) else []


def _in_collective(frames: Sequence[StackFrame]) -> bool:
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
    frames = [*find_main_stack(cause.stacks)]
    if cause.traceback:
        frames = parse_traceback(cause.traceback)
    if not frames:  # killed, after it had said where it stood
        frames = next((known for one in reversed(same_pass) if (known := find_main_stack(one.stacks))), [])
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


def _end(cause: Incident, frames: Sequence[StackFrame]) -> End:
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


_Rule = Callable[[Sequence[LastSeen]], Blame | None]


def who_was_behind(seen: Sequence[LastSeen], world_size: int) -> Blame:
    """Find the ranks that the others waited for, by the first of these rules that sets some apart from the others.

    1. The rank that failed first, with an error that is its own.
    2. Ranks that crashed in native code, then ranks that were killed without a word.
    3. The rank that was ended from outside before the others lost it.
    4. Ranks that went past a pass without a backward, while another one is in that pass's backward.
    5. Ranks at an earlier pass; one whose loop was over is behind its last.
    6. In the same pass, ranks at an earlier place. If all of these stand in a collective, and a rank further on stands
       in code of its own, then it is that one.
    7. Ranks that entered fewer collectives of a group.
    8. Ranks that stand in code of their own while the others do not.
    9. Ranks that native code aborted.

    docs/hang.md says which fault needs each.
    """
    if len(seen) == 1 and world_size <= 1:
        return Blame(ranks=(seen[0].rank,), reason="it is the only rank")
    rules: tuple[_Rule, ...] = (
        *(_failed, _crashed, _killed, _ended_from_outside, _without_backward),
        *(_at_earlier_pass, _at_earlier_place, _fewest, _in_own_code, _aborted),
    )
    for rule in rules:
        if (blame := rule(seen)) is not None:
            return blame
    if absent := sorted(set(range(world_size)) - {one.rank for one in seen}):
        names = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        return Blame(
            ranks=(), reason=f"{names} of the job's {world_size} left nothing here; copy what their hosts have"
        )
    return Blame(ranks=(), reason="the ranks were at the same place of the same pass")


def _failed(seen: Sequence[LastSeen]) -> Blame | None:
    failed = sorted((one for one in seen if one.end is End.FAILED), key=lambda one: one.time)
    if not failed:
        return None
    return Blame(ranks=(failed[0].rank,), reason=_message(failed[0]))


def _crashed(seen: Sequence[LastSeen]) -> Blame | None:
    crashed = [one for one in seen if one.end is End.CRASHED]
    return blame_some(seen, crashed, _message(crashed[0]) if crashed else "")


def _killed(seen: Sequence[LastSeen]) -> Blame | None:
    return blame_some(
        seen,
        [one for one in seen if one.end is End.KILLED],
        "it was killed (by hand, for memory, by a launcher that it did not answer), or it left by os._exit",
    )


def _ended_from_outside(seen: Sequence[LastSeen]) -> Blame | None:
    ended = [one for one in seen if one.end is End.SIGNALLED]
    others = [one for one in seen if one.end is not End.SIGNALLED]
    lost = [one for one in others if one.end is End.GAVE_UP and one.incident and one.incident.follows_another]
    if not lost or len(lost) < len(others) or len(ended) != 1 or ended[0].time > min(one.time for one in lost):
        return None
    assert ended[0].incident is not None
    return blame_some(seen, ended, f"it was ended from outside ({ended[0].incident.where})")


def _without_backward(seen: Sequence[LastSeen]) -> Blame | None:
    waiting = [one.forward for one in seen if one.place == "in backward" and one.forward is not None]
    number = min(waiting, default=None)
    if number is None:
        return None
    past = [one for one in seen if one.forward is not None and one.forward > number]
    skipped = [one for one in past if one.last_backward is not None and one.last_backward < number]
    return blame_some(seen, skipped, f"it made no backward of pass {number}, in which others are")


def _at_earlier_pass(seen: Sequence[LastSeen]) -> Blame | None:
    if any(one.progress is None for one in seen):
        return None
    numbers = [one.forward if one.forward is not None else -1 for one in seen]
    behind = [one for one, number in zip(seen, numbers, strict=True) if number == min(numbers)]
    if len(behind) == len(seen):
        return None
    others = f"others are in pass {max(numbers)}"
    if over := [one for one in behind if one.end is End.CLOSED]:
        return blame_some(seen, over, f"its loop was over after {min(numbers) + 1} passes, and {others}")
    if outside := [one for one in behind if not one.waits]:
        return blame_some(seen, outside, others)
    return blame_some(seen, behind, f"it waits in a collective of its own, and {others}")


def _at_earlier_place(seen: Sequence[LastSeen]) -> Blame | None:
    places = [one.progress for one in seen if one.progress is not None]
    if len(places) < len(seen):
        return None
    behind = [one for one in seen if one.progress == min(places)]
    ahead = [one for one in seen if one.progress != min(places)]
    if not ahead:
        return None
    in_own_code = [one for one in ahead if one.waits is False]
    if in_own_code and all(one.waits for one in behind):
        return blame_some(seen, in_own_code, "it stands in code of its own, and others wait in a collective")
    if over := [one for one in behind if one.end is End.CLOSED]:
        return blame_some(seen, over, f"its loop was over there, and others are {ahead[0].where}")
    return blame_some(seen, [one for one in behind if not one.waits] or behind, f"others are {ahead[0].where}")


def _fewest(seen: Sequence[LastSeen]) -> Blame | None:
    return blame_fewest(seen, "it entered fewer collectives than the others")


def _in_own_code(seen: Sequence[LastSeen]) -> Blame | None:
    own = [one for one in seen if one.waits is False]
    return blame_some(seen, own, "the others wait in a collective or a backward, and it stands in code of its own")


def _aborted(seen: Sequence[LastSeen]) -> Blame | None:
    return blame_some(seen, [one for one in seen if one.end is End.ABORTED], "native code aborted it")


def _message(one: LastSeen) -> str:
    assert one.incident is not None
    return one.incident.message or str(one.end)
