"""Decide which rank of a job that hung or died the others waited for. Plain data in, plain data out.

Where each rank of the folder's last job was is read from its incidents, and from the end of its recording.
"""

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
from replay.watch.blame import Blame, blame_fewest_collectives, blame_unless_all
from replay.watch.stacks import COLLECTIVE_CODE, NUM_INNERMOST

# Functions of torch that wait in a collective in C++, so that no Python frame of the collective is below them.
COLLECTIVE_FUNCTIONS = ("_distributed_broadcast_coalesced",)
# DDP waits for its all-reduce in C++ below this function.
BACKWARD = "_engine_run_backward"
_GLOO_GAVE_UP = re.compile(r"Timed out waiting \d+ ?ms for")
_GAVE_UP = re.compile(r"time[sd]?[ -]?out|DistBackendError|NCCL error|monitoredBarrier", re.IGNORECASE)
_PLACE_TEXTS = {
    "in forward": "in the forward of pass {}",
    "after forward": "after the forward of pass {}",
    "in backward": "in the backward of pass {}",
    "after backward": "after the backward of pass {}",
    "in the optimizer's step": "in the optimizer's step after pass {}",
    "after the optimizer's step": "after the optimizer's step that followed pass {}",
}


class End(StrEnum):
    """How a rank ended, or what made it write an incident.

    DIED     it was killed or aborted, and its stacks were written elsewhere
    GAVE_UP  its error tells no more than that another rank did not answer
    """

    FAILED = "failed"
    CRASHED = "crashed in native code"
    KILLED = "died without a word"
    ABORTED = "was aborted"
    DIED = "died"
    GAVE_UP = "gave up waiting"
    SIGNALLED = "was sent a signal"
    SLOW = "was slow"
    CLOSED = "ended its loop"


@dataclass(frozen=True, kw_only=True, slots=True)
class LastSighting:
    """The last that is known of one rank of a job.

    forward   the number of the pass that began last; None: none had begun
    place     where in that pass, or after it, the rank was; empty: not known
    frames    the main thread's stack, the innermost first
    incident  what made it write; None where the rank closed its recording
    closed    the end of its recording, if the rank closed it
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
        """A key that is smaller than that of a rank which got farther; None where the place is not known."""
        if self.place not in TRAINING_PHASES:
            return None
        return (-1 if self.forward is None else self.forward), list(TRAINING_PHASES).index(self.place)

    @property
    def last_backward(self) -> int | None:
        return None if self.incident is None else self.incident.last_backward

    @property
    def waits(self) -> bool | None:
        """Whether it is in a collective; None where its stack cannot show it, as in a backward in C++."""
        if not self.frames or self.frames[0].function == BACKWARD:
            return None
        return _is_in_collective(self.frames)

    @property
    def where(self) -> str:
        """The place in words, as `after the forward of pass 4` of the forward with number 3."""
        if self.forward is None:
            return "before any pass"
        return _PLACE_TEXTS.get(self.place, "in or after pass {}").format(self.forward + 1)

    @property
    def line(self) -> str:
        """The innermost line of the job's code, and the library's below it: `at train.py:27 in compute_loss`."""
        if not self.frames:
            return ""
        job_frame = next((frame for frame in self.frames if not frame.is_of_library), None)
        innermost = self.frames[0]
        if job_frame is None or job_frame is innermost:
            return f"at {innermost}"
        return f"at {job_frame}, in {innermost}"


def read_last_sightings(folder: Path) -> list[LastSighting]:
    """Return what is known of each rank of the folder's last job, by rank. Raises CaptureError for a damaged file.

    A job is what its ranks recorded between one start and the next: a rank that opens another recording begins another
    job. Ranks that closed their recordings count only beside one that did not.
    """
    incidents: dict[tuple[str, int], list[Incident]] = {}
    for record in read_incidents(folder):
        for incident in record.incidents:
            opened = (
                format_stamp(incident.opened) if incident.opened else record.name.partition(f"rank{record.rank}_")[2]
            )
            incidents.setdefault((opened, record.rank), []).append(incident)
    ends = {(format_stamp(end.opened), end.rank): end for end in read_end_records(folder)}
    last_job: dict[int, tuple[str, int]] = {}
    for opened, rank in sorted({*incidents, *ends}):
        if rank in last_job:
            last_job = {}
        last_job[rank] = opened, rank
    sightings = [
        sighting
        for rank, key in sorted(last_job.items())
        if (sighting := _merge_incidents(rank, incidents.get(key, []), ends.get(key))) is not None
    ]
    return sightings if any(sighting.end is not End.CLOSED for sighting in sightings) else []


def _is_in_collective(frames: Sequence[StackFrame]) -> bool:
    is_inside = bool(frames) and frames[0].function in COLLECTIVE_FUNCTIONS
    return is_inside or any(Path(frame.file).name in COLLECTIVE_CODE for frame in frames[:NUM_INNERMOST])


def find_world_size(sightings: Iterable[LastSighting]) -> int:
    sizes = [sighting.incident.world_size for sighting in sightings if sighting.incident is not None]
    sizes += [sighting.closed.world_size for sighting in sightings if sighting.closed is not None]
    return max((size for size in sizes if size is not None), default=0)


def _merge_incidents(rank: int, incidents: Sequence[Incident], closed: EndRecord | None) -> LastSighting | None:
    """Choose what ended a rank, of all that it wrote: the first error of its last pass, else its last incident.

    A number that is not finite ends nothing. A rank that only reported a slow step, or wrote its stacks on request,
    and then closed its recording in a later pass, ended its loop.
    """
    ends = [incident for incident in incidents if incident.what != "not finite"]
    if not ends and closed is not None:
        return _describe_closed_recording(closed)
    if not ends:
        return None
    last = ends[-1]
    same_pass = [incident for incident in ends if incident.forward == last.forward]
    errors = [incident for incident in same_pass if incident.what in ("exception", "out of memory")]
    goes_on = last.what == "slow step" or last.where == "SIGUSR1"
    if closed is not None and goes_on and closed.num_passes - 1 > (last.forward or 0):
        return _describe_closed_recording(closed)
    cause = errors[0] if errors else last
    frames = [*find_main_stack(cause.stacks)]
    if cause.traceback:
        frames = parse_traceback(cause.traceback)
    if not frames:
        # A rank that was killed may have written its stacks in the same pass before, as on a signal.
        frames = next(
            (
                earlier_frames
                for incident in reversed(same_pass)
                if (earlier_frames := find_main_stack(incident.stacks))
            ),
            [],
        )
    return LastSighting(
        rank=rank,
        end=_classify_end(cause, frames),
        time=cause.time,
        forward=cause.forward,
        place=cause.place,
        frames=frames,
        incident=cause,
        collectives=dict(cause.collectives),
    )


def _describe_closed_recording(closed: EndRecord) -> LastSighting:
    return LastSighting(
        rank=closed.rank,
        end=End.CLOSED,
        time=closed.time,
        forward=closed.num_passes - 1,
        place=closed.place,
        closed=closed,
    )


def _classify_end(cause: Incident, frames: Sequence[StackFrame]) -> End:
    match cause.what:
        case "signal":
            return End.SIGNALLED
        case "slow step":
            return End.SLOW
        case "died" if cause.stacks:
            return End.ABORTED if "Aborted" in cause.message else End.CRASHED
        case "died":
            return End.DIED if cause.message else End.KILLED
    waited = _is_in_collective(frames) or (bool(frames) and frames[0].function == BACKWARD)
    gave_up = _GLOO_GAVE_UP.search(cause.message) or (waited and _GAVE_UP.search(cause.message))
    if cause.follows_another or gave_up:
        return End.GAVE_UP
    return End.FAILED


_Rule = Callable[[Sequence[LastSighting]], Blame | None]


def find_blocking_ranks(sightings: Sequence[LastSighting], world_size: int) -> Blame:
    """Find the ranks that the others waited for, by the first of these rules that sets some apart from the others.

    1. The rank that failed first, with an error that no other rank caused.
    2. Ranks that crashed in native code, then ranks that were killed and wrote nothing.
    3. The rank that was ended from outside, before the others lost their connection to it.
    4. Ranks that went on after a pass without its backward, while another rank is in the backward of that pass.
    5. Ranks in an earlier pass. A rank whose loop was over stays after its last pass.
    6. In the same pass, ranks at an earlier place. If all of these are in a collective, and a rank that got farther is
       in the job's code, then it is the latter.
    7. Ranks that entered fewer collectives of a process group.
    8. Ranks that are in the job's code while the others wait.
    9. Ranks that native code aborted.

    docs/hang.md says which fault needs each.
    """
    if len(sightings) == 1 and world_size <= 1:
        return Blame(ranks=(sightings[0].rank,), reason="it is the only rank")
    rules: tuple[_Rule, ...] = (
        *(_find_failed, _find_crashed, _find_killed, _find_ended_from_outside, _find_without_backward),
        *(_find_at_earlier_pass, _find_at_earlier_place, _find_fewest_collectives, _find_in_own_code, _find_aborted),
    )
    for rule in rules:
        if (blame := rule(sightings)) is not None:
            return blame
    if absent := sorted(set(range(world_size)) - {sighting.rank for sighting in sightings}):
        names = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        return Blame(
            ranks=(), reason=f"{names} of the job's {world_size} left nothing here; copy what their hosts have"
        )
    return Blame(ranks=(), reason="the ranks were at the same place of the same pass")


def _find_failed(sightings: Sequence[LastSighting]) -> Blame | None:
    failed = sorted(
        (sighting for sighting in sightings if sighting.end is End.FAILED), key=lambda sighting: sighting.time
    )
    if not failed:
        return None
    return Blame(ranks=(failed[0].rank,), reason=_message_of(failed[0]))


def _find_crashed(sightings: Sequence[LastSighting]) -> Blame | None:
    crashed = [sighting for sighting in sightings if sighting.end is End.CRASHED]
    return blame_unless_all(sightings, crashed, _message_of(crashed[0]) if crashed else "")


def _find_killed(sightings: Sequence[LastSighting]) -> Blame | None:
    return blame_unless_all(
        sightings,
        [sighting for sighting in sightings if sighting.end is End.KILLED],
        "it was killed (by hand, for memory, by a launcher that it did not answer), or it left by os._exit",
    )


def _find_ended_from_outside(sightings: Sequence[LastSighting]) -> Blame | None:
    ended = [sighting for sighting in sightings if sighting.end is End.SIGNALLED]
    others = [sighting for sighting in sightings if sighting.end is not End.SIGNALLED]
    lost = [
        sighting
        for sighting in others
        if sighting.end is End.GAVE_UP and sighting.incident and sighting.incident.follows_another
    ]
    if (
        not lost
        or len(lost) < len(others)
        or len(ended) != 1
        or ended[0].time > min(sighting.time for sighting in lost)
    ):
        return None
    assert ended[0].incident is not None
    return blame_unless_all(sightings, ended, f"it was ended from outside ({ended[0].incident.where})")


def _find_without_backward(sightings: Sequence[LastSighting]) -> Blame | None:
    waiting = [
        sighting.forward for sighting in sightings if sighting.place == "in backward" and sighting.forward is not None
    ]
    number = min(waiting, default=None)
    if number is None:
        return None
    past = [sighting for sighting in sightings if sighting.forward is not None and sighting.forward > number]
    skipped = [sighting for sighting in past if sighting.last_backward is not None and sighting.last_backward < number]
    return blame_unless_all(sightings, skipped, f"it made no backward of pass {number + 1}, in which others are")


def _find_at_earlier_pass(sightings: Sequence[LastSighting]) -> Blame | None:
    if any(sighting.progress is None for sighting in sightings):
        return None
    numbers = [sighting.forward if sighting.forward is not None else -1 for sighting in sightings]
    early = [sighting for sighting, number in zip(sightings, numbers, strict=True) if number == min(numbers)]
    if len(early) == len(sightings):
        return None
    others = f"others are in pass {max(numbers) + 1}"
    if over := [sighting for sighting in early if sighting.end is End.CLOSED]:
        return blame_unless_all(sightings, over, f"its loop was over after {min(numbers) + 1} passes, and {others}")
    if outside := [sighting for sighting in early if not sighting.waits]:
        return blame_unless_all(sightings, outside, others)
    return blame_unless_all(sightings, early, f"it waits in a collective of its own, and {others}")


def _find_at_earlier_place(sightings: Sequence[LastSighting]) -> Blame | None:
    places = [sighting.progress for sighting in sightings if sighting.progress is not None]
    if len(places) < len(sightings):
        return None
    early = [sighting for sighting in sightings if sighting.progress == min(places)]
    ahead = [sighting for sighting in sightings if sighting.progress != min(places)]
    if not ahead:
        return None
    in_own_code = [sighting for sighting in ahead if sighting.waits is False]
    if in_own_code and all(sighting.waits for sighting in early):
        return blame_unless_all(sightings, in_own_code, "it stands in code of its own, and others wait in a collective")
    if over := [sighting for sighting in early if sighting.end is End.CLOSED]:
        return blame_unless_all(sightings, over, f"its loop was over there, and others are {ahead[0].where}")
    return blame_unless_all(
        sightings, [sighting for sighting in early if not sighting.waits] or early, f"others are {ahead[0].where}"
    )


def _find_fewest_collectives(sightings: Sequence[LastSighting]) -> Blame | None:
    return blame_fewest_collectives(sightings, "it entered fewer collectives than the others")


def _find_in_own_code(sightings: Sequence[LastSighting]) -> Blame | None:
    in_job_code = [sighting for sighting in sightings if sighting.waits is False]
    return blame_unless_all(
        sightings, in_job_code, "the others wait in a collective or a backward, and it stands in code of its own"
    )


def _find_aborted(sightings: Sequence[LastSighting]) -> Blame | None:
    return blame_unless_all(
        sightings, [sighting for sighting in sightings if sighting.end is End.ABORTED], "native code aborted it"
    )


def _message_of(sighting: LastSighting) -> str:
    assert sighting.incident is not None
    return sighting.incident.message or str(sighting.end)
