"""Decide which rank ended a run, or which rank the others wait for, and say so. Plain data in, text out.

replay: no progress for 120 s: rank 1 did not arrive: the other ranks stand in a collective, and it does not
  rank 0: pass 2 on a.pkl (2 rows, 24 tokens, 24 of them real), phase forward, in a collective, at [...] in wait
  rank 1: pass 2 on b.pkl (2 rows, 28 tokens, 28 of them real), phase forward, at mine.py:12 in pull
replay: the run ends; finished passes and rank<k>.stack.txt are in logs/20260301-091244-replay.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from replay.watch.progress import RankPhase, RankPosition


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """What is known of one rank at one moment. The fields stand in run.json, as the `ranks` of a failure.

    position           None: it does not answer, and its position file is on another node's own disk
    answers            False: it is connected, but its Python does not run
    idle_seconds       since it last began a phase, reported progress or entered a collective
    collectives        that it has entered so far, by process group
    num_unforeseen     of them, those of this pass that no pass before had entered by the end of the same phase
    collective_failed  the collective that it is in, or died in, has failed
    is_compiling       its main thread is in torch.compile
    standing_at        the innermost line of its main thread
    """

    rank: int
    position: RankPosition | None
    answers: bool = True
    idle_seconds: float = 0.0
    collectives: Mapping[str, int] = field(default_factory=dict)
    num_unforeseen: int = 0
    in_collective: bool = False
    collective_failed: bool = False
    waits_for_device: bool = False
    is_compiling: bool = False
    standing_at: str = ""

    @property
    def known_position(self) -> RankPosition:
        """The position of a rank that answers."""
        assert self.position is not None
        return self.position

    def describe(self) -> str:
        parts = [f"rank {self.rank}: {_describe_position(self.rank, self.position)}"]
        parts += ["in a collective"] if self.in_collective else []
        parts += ["waiting for its device"] if self.waits_for_device and not self.in_collective else []
        parts += [f"at {self.standing_at}"] if self.standing_at else []
        parts += [] if self.answers else ["does not answer"]
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """The ranks that did not arrive where the others wait; none where that cannot be told."""

    ranks: tuple[int, ...]
    reason: str


class ObservedRank(Protocol):
    """What rules read of a rank, be it of a run that is watched or of a job that left incidents."""

    @property
    def rank(self) -> int: ...
    @property
    def collectives(self) -> Mapping[str, int]: ...


def find_missing_ranks(sightings: Sequence[Sighting]) -> Blame:
    """Find the ranks that the others wait for, by the first of these rules that sets some ranks apart from the others.

    1. Ranks that do not answer: their process is stopped, or native code holds Python's lock.
    2. Ranks that have run out of inputs, while others are in a later pass.
    3. Ranks that entered collectives which no pass before had, while the others entered no such collective. Where
       another rank's collective failed, they may have left theirs: gloo matches two collectives of different sizes, and
       lets the larger one return.
    4. Ranks in an earlier pass or phase, since all ranks begin each phase together. If some of these ranks are outside
       a collective, the others wait for those. If all of them are in a collective, and they are more than the ranks in
       a later phase, then the later ranks went past that collective.
    5. Ranks that entered fewer collectives of a process group than its other members, where all groups agree on which
       ranks these are: a collective waits for the last rank to enter it.
    6. Ranks outside a collective while others are in one.

    tests/replay/watch/test_blame.py has a fault for each. A rank's own error is no evidence: the first rank that
    reports an error is one that arrived and waited.
    """
    if len(sightings) == 1:
        return Blame(ranks=(sightings[0].rank,), reason="it is the only rank")
    rules: list[Callable[[Sequence[Sighting]], Blame | None]] = [
        _find_silent,
        _find_out_of_inputs,
        _find_new_collectives,
        _find_earliest,
        _find_fewest_collectives,
        _find_outside_collectives,
    ]
    for rule in rules:
        if blame := rule(sightings):
            return blame
    return Blame(
        ranks=(), reason="all ranks are in the same phase, after equal or contradicting numbers of collectives"
    )


def blame_unless_all(ranks: Sequence[ObservedRank], suspects: Sequence[ObservedRank], reason: str) -> Blame | None:
    """Blame the suspects if they are some of the ranks and not all."""
    if not suspects or len(suspects) == len(ranks):
        return None
    return Blame(ranks=tuple(suspect.rank for suspect in suspects), reason=reason)


def _find_silent(sightings: Sequence[Sighting]) -> Blame | None:
    """Find the ranks that do not answer."""
    silent = [sighting for sighting in sightings if not sighting.answers]
    return blame_unless_all(sightings, silent, "it does not answer: it is stopped, or native code holds Python's lock")


def _find_out_of_inputs(sightings: Sequence[Sighting]) -> Blame | None:
    """Find the ranks that have no inputs left, while others are in a later pass."""
    positions = [sighting.known_position for sighting in sightings]
    latest = max((position.index for position in positions if position.source is not None), default=-1)
    without = [
        sighting
        for sighting, position in zip(sightings, positions, strict=True)
        if position.phase is RankPhase.OUT_OF_INPUTS and position.index <= latest
    ]
    has = "it has" if len(without) == 1 else "they have"
    numbers = ", ".join(str(sighting.known_position.index) for sighting in without)
    reason = f"{has} run out of inputs after {numbers} passes, and others are in a later one"
    return blame_unless_all(sightings, without, reason)


def _find_earliest(sightings: Sequence[Sighting]) -> Blame | None:
    """Find the ranks in an earlier phase than others; or those ahead, if most ranks wait behind them."""
    earliest = min(sighting.known_position.sort_key for sighting in sightings)
    early = [sighting for sighting in sightings if sighting.known_position.sort_key == earliest]
    ahead = [sighting for sighting in sightings if sighting.known_position.sort_key != earliest]
    if not ahead:
        return None
    where = ahead[0].known_position.phase
    if outside := [sighting for sighting in early if not sighting.in_collective]:
        return blame_unless_all(sightings, outside, f"it has not reached the phase of the others ({where})")
    if len(early) > len(ahead):
        return blame_unless_all(
            sightings, ahead, "it is in a later phase and went past the collective in which the others wait"
        )
    reason = f"it waits in a collective of its own, before the phase of the others ({where})"
    return blame_unless_all(sightings, early, f"{reason}: the ranks reach different collectives")


def _find_new_collectives(sightings: Sequence[Sighting]) -> Blame | None:
    """Find the ranks that wait in, or left, a collective that no earlier pass had and the others did not enter."""
    any_failed = any(sighting.collective_failed for sighting in sightings)
    with_new = [
        sighting
        for sighting in sightings
        if sighting.num_unforeseen and (sighting.in_collective or sighting.waits_for_device or any_failed)
    ]
    return blame_unless_all(
        sightings, with_new, "it entered a collective of its own: more of them than any pass before this one"
    )


def _find_fewest_collectives(sightings: Sequence[Sighting]) -> Blame | None:
    return blame_fewest_collectives(sightings, "it entered fewer collectives than the others, who wait in one")


def blame_fewest_collectives(ranks: Sequence[ObservedRank], reason: str) -> Blame | None:
    """Blame the ranks that entered fewer collectives of a group than its others, if all groups agree on who it is."""
    laggards: set[tuple[int, ...]] = set()
    for group in {group for rank in ranks for group in rank.collectives}:
        members = [rank for rank in ranks if group in rank.collectives]
        fewest = min(member.collectives[group] for member in members)
        last = tuple(member.rank for member in members if member.collectives[group] == fewest)
        if len(last) < len(members):
            laggards.add(last)
    if len(laggards) != 1:
        return None
    numbers = laggards.pop()
    return blame_unless_all(ranks, [rank for rank in ranks if rank.rank in numbers], reason)


def _find_outside_collectives(sightings: Sequence[Sighting]) -> Blame | None:
    """Find the ranks that stand in no collective, in the same phase as others that wait in one."""
    outside = [sighting for sighting in sightings if not sighting.in_collective]
    return blame_unless_all(sightings, outside, "the other ranks stand in a collective, and it does not")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """What ended the run.

    kind      failed, died, terminated, interrupted or hung
    rank      None if no rank can be named
    headline  says what happened to the rank
    """

    kind: str
    rank: int | None
    headline: str
    position: RankPosition | None = None
    error: str | None = None
    sightings: Sequence[Sighting] = ()

    def text(self, folder: Any) -> str:
        """Return all that is printed: the headline and a line for each rank."""
        lines = [f"replay: {self.headline}", *(f"  {sighting.describe()}" for sighting in self.sightings)]
        return "\n".join([*lines, f"replay: the run ends; finished passes and rank<k>.stack.txt are in {folder}"])


def report_failed_rank(rank: int, position: RankPosition, error: str) -> RankFailure:
    text = f"rank {rank} failed in {position.describe()}: {error}"
    return RankFailure(kind="failed", rank=rank, headline=text, position=position, error=error)


def _describe_position(rank: int, position: RankPosition | None) -> str:
    return position.describe() if position else f"a pass that rank{rank}.position.json on its own node says"


def report_dead_rank(rank: int, position: RankPosition | None) -> RankFailure:
    error = "its process ended without a word: killed (by hand, or by the system for memory), or crashed in native code"
    text = f"rank {rank} died in {_describe_position(rank, position)}: {error}"
    return RankFailure(kind="died", rank=rank, headline=text, position=position, error=error)


def report_termination(ranks: Sequence[int], positions: Mapping[int, RankPosition | None]) -> RankFailure:
    """Describe an end by SIGTERM that `ranks` received while no rank had failed; `positions` are those of all ranks."""
    if len(ranks) == len(positions) > 1:
        text = "every rank was ended from outside (SIGTERM), by the launcher or by who started it; none had failed"
        return RankFailure(kind="terminated", rank=None, headline=text, error="SIGTERM to every rank")
    rank, position = ranks[0], positions[ranks[0]]
    text = f"rank {rank} was ended from outside (SIGTERM) in {_describe_position(rank, position)}"
    return RankFailure(kind="terminated", rank=rank, headline=text, position=position, error="SIGTERM")


def report_departed_rank(rank: int, *, interrupted: bool) -> RankFailure:
    """Describe the end of a rank that said goodbye, and without which the others cannot go on."""
    text = "was interrupted (Ctrl-C)" if interrupted else "refused the run"
    kind = "interrupted" if interrupted else "failed"
    return RankFailure(kind=kind, rank=rank, headline=f"rank {rank} {text}", error=text)


def report_hang(sightings: Sequence[Sighting], trouble: str, advice: str = "") -> RankFailure:
    """Describe a hang. `trouble` is what was noticed: `no progress for 120 s`, or the error of a collective."""
    blame = find_missing_ranks(sightings)
    if len(sightings) == 1:
        text = f"{trouble} in {sightings[0].known_position.describe()}, at {sightings[0].standing_at}{advice}"
    elif blame.ranks:
        names = f"rank{'s' * (len(blame.ranks) > 1)} {', '.join(map(str, blame.ranks))}"
        text = f"{trouble}: {names} did not arrive: {blame.reason}{advice}"
    else:
        text = f"{trouble}; which rank did not arrive cannot be told: {blame.reason}{advice}"
    rank = blame.ranks[0] if blame.ranks else None
    position = next((sighting.position for sighting in sightings if sighting.rank == rank), None)
    return RankFailure(kind="hung", rank=rank, headline=text, position=position, error=trouble, sightings=sightings)
