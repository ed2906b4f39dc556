"""Decide which rank a run died of or waits for, and say so. Plain data in, text out.

replay: no progress for 120 s: rank 1 did not arrive: the other ranks stand in a collective, and it does not
  rank 0: pass 2 on a.pkl (2 rows, 24 tokens, 24 of them real), phase forward, in a collective, at [...] in wait
  rank 1: pass 2 on b.pkl (2 rows, 28 tokens, 28 of them real), phase forward, at mine.py:12 in pull
replay: the run ends; finished passes and rank<k>.stack.txt are in logs/20260301-091244-replay.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from replay.watch.progress import Phase, Position


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """What is known of one rank at one moment."""

    rank: int
    position: Position | None  # None: it does not answer, and its file is on another node's own disk
    answers: bool = True  # False: connected, but its Python does not run
    idle_seconds: float = 0.0  # since it last crossed a border or entered a collective
    collectives: Mapping[str, int] = field(default_factory=dict)  # entered so far, by process group
    num_unforeseen: int = 0  # of them, those that no pass before had entered by the end of the same phase
    in_collective: bool = False
    collective_failed: bool = False  # the one in which it stands, or died
    waits_for_device: bool = False
    standing_at: str = ""  # the innermost line of its main thread

    @property
    def at(self) -> Position:
        """The position of a rank that answers."""
        assert self.position is not None
        return self.position

    def described(self) -> str:
        parts = [f"rank {self.rank}: {_where(self.rank, self.position)}"]
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


class SeenRank(Protocol):
    """What rules read of a rank, be it of a run that is watched or of a job that left incidents."""

    @property
    def rank(self) -> int: ...
    @property
    def collectives(self) -> Mapping[str, int]: ...


def who_did_not_arrive(sightings: Sequence[Sighting]) -> Blame:
    """Find the ranks that the others wait for, by the first of these rules that sets some ranks apart from the others.

    1. Ranks that do not answer: their process is stopped, or its Python is held by native code.
    2. Ranks that have run out of inputs, while others are in a pass for which these have none.
    3. Ranks that wait after collectives which no pass before had, while the others entered none such. They need not
       wait any more where another rank's collective failed: gloo lets the longer of two that met return.
    4. Ranks at an earlier pass or phase: every border between phases is crossed together. Of these, those outside a
       collective, if there are any: the rest wait for them. If all of them stand in one and are more than those
       further on, then it is the ranks further on that went past it.
    5. Ranks that entered fewer collectives of a group than its other members, where all groups agree on who it is: a
       collective waits for the last rank to enter it.
    6. Ranks outside a collective while others stand in one.

    docs/ranks.md names the fault that needs each. A rank's own complaint is no evidence: the first to complain is one
    that arrived and waited.
    """
    if len(sightings) == 1:
        return Blame(ranks=(sightings[0].rank,), reason="it is the only rank")
    rules: list[Callable[[Sequence[Sighting]], Blame | None]] = [_silent, _ran_out, _more, _behind, _fewest, _outside]
    for rule in rules:
        if verdict := rule(sightings):
            return verdict
    return Blame(
        ranks=(), reason="all ranks are in the same phase, after equal or contradicting numbers of collectives"
    )


def blame_some(seen: Sequence[SeenRank], named: Sequence[SeenRank], reason: str) -> Blame | None:
    """Return a blame if `named` are some of the ranks and not all."""
    if not named or len(named) == len(seen):
        return None
    return Blame(ranks=tuple(one.rank for one in named), reason=reason)


def _silent(sightings: Sequence[Sighting]) -> Blame | None:
    silent = [s for s in sightings if not s.answers]
    return blame_some(sightings, silent, "it does not answer: it is stopped, or native code holds Python's lock")


def _ran_out(sightings: Sequence[Sighting]) -> Blame | None:
    furthest = max((s.at.index for s in sightings if s.at.source is not None), default=-1)
    out = [s for s in sightings if s.at.phase is Phase.OUT_OF_INPUTS and s.at.index <= furthest]
    has = "it has" if len(out) == 1 else "they have"
    numbers = ", ".join(str(s.at.index) for s in out)
    return blame_some(sightings, out, f"{has} run out of inputs after {numbers} passes, and others are in a later one")


def _behind(sightings: Sequence[Sighting]) -> Blame | None:
    earliest = min(s.at.place for s in sightings)
    behind = [s for s in sightings if s.at.place == earliest]
    ahead = [s for s in sightings if s.at.place != earliest]
    if not ahead:
        return None
    where = ahead[0].at.phase
    if outside := [s for s in behind if not s.in_collective]:
        return blame_some(sightings, outside, f"it has not reached the phase of the others ({where})")
    if len(behind) > len(ahead):
        return blame_some(
            sightings, ahead, "it is in a later phase and went past the collective in which the others wait"
        )
    reason = f"it waits in a collective of its own, before the phase of the others ({where})"
    return blame_some(sightings, behind, f"{reason}: the ranks reach different collectives")


def _more(sightings: Sequence[Sighting]) -> Blame | None:
    failed = any(s.collective_failed for s in sightings)
    more = [s for s in sightings if s.num_unforeseen and (s.in_collective or s.waits_for_device or failed)]
    return blame_some(sightings, more, "it entered a collective of its own: more of them than any pass before this one")


def _fewest(sightings: Sequence[Sighting]) -> Blame | None:
    return blame_fewest(sightings, "it entered fewer collectives than the others, who wait in one")


def blame_fewest(seen: Sequence[SeenRank], reason: str) -> Blame | None:
    """Blame the ranks that entered fewer collectives of a group than its others, if all groups agree on who it is."""
    laggards: set[tuple[int, ...]] = set()
    for group in {group for one in seen for group in one.collectives}:
        members = [one for one in seen if group in one.collectives]
        fewest = min(one.collectives[group] for one in members)
        fewer = tuple(one.rank for one in members if one.collectives[group] == fewest)
        if len(fewer) < len(members):
            laggards.add(fewer)
    if len(laggards) != 1:
        return None
    named = laggards.pop()
    return blame_some(seen, [one for one in seen if one.rank in named], reason)


def _outside(sightings: Sequence[Sighting]) -> Blame | None:
    outside = [s for s in sightings if not s.in_collective]
    return blame_some(sightings, outside, "the other ranks stand in a collective, and it does not")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What ended the run: `headline` says it of `rank`, which is None if no rank can be named."""

    kind: str  # failed, died, terminated, interrupted, hung
    rank: int | None
    headline: str
    position: Position | None = None
    error: str | None = None
    sightings: Sequence[Sighting] = ()

    def text(self, folder: Any) -> str:
        """Return all that is printed: the headline and a line for each rank."""
        lines = [f"replay: {self.headline}", *(f"  {s.described()}" for s in self.sightings)]
        return "\n".join([*lines, f"replay: the run ends; finished passes and rank<k>.stack.txt are in {folder}"])


def failed(rank: int, position: Position, error: str) -> Failure:
    text = f"rank {rank} failed in {position.described()}: {error}"
    return Failure(kind="failed", rank=rank, headline=text, position=position, error=error)


def _where(rank: int, position: Position | None) -> str:
    return position.described() if position else f"a pass that rank{rank}.position.json on its own node says"


def died(rank: int, position: Position | None) -> Failure:
    error = "its process ended without a word: killed (by hand, or by the system for memory), or crashed in native code"
    text = f"rank {rank} died in {_where(rank, position)}: {error}"
    return Failure(kind="died", rank=rank, headline=text, position=position, error=error)


def terminated(ranks: Sequence[int], positions: Mapping[int, Position | None]) -> Failure:
    """Describe an end by SIGTERM that `ranks` received while no rank had failed; `positions` are those of all ranks."""
    if len(ranks) == len(positions) > 1:
        text = "every rank was ended from outside (SIGTERM), by the launcher or by who started it; none had failed"
        return Failure(kind="terminated", rank=None, headline=text, error="SIGTERM to every rank")
    rank, position = ranks[0], positions[ranks[0]]
    text = f"rank {rank} was ended from outside (SIGTERM) in {_where(rank, position)}"
    return Failure(kind="terminated", rank=rank, headline=text, position=position, error="SIGTERM")


def left_alone(rank: int, *, interrupted: bool) -> Failure:
    """Describe the end of a rank that said goodbye, and without which the others cannot go on."""
    text = "was interrupted (Ctrl-C)" if interrupted else "refused the run"
    kind = "interrupted" if interrupted else "failed"
    return Failure(kind=kind, rank=rank, headline=f"rank {rank} {text}", error=text)


def hung(sightings: Sequence[Sighting], trouble: str, advice: str = "") -> Failure:
    """Describe a hang. `trouble` is what was noticed: `no progress for 120 s`, or the error of a collective."""
    verdict = who_did_not_arrive(sightings)
    if len(sightings) == 1:
        text = f"{trouble} in {sightings[0].at.described()}, at {sightings[0].standing_at}{advice}"
    elif verdict.ranks:
        names = f"rank{'s' * (len(verdict.ranks) > 1)} {', '.join(map(str, verdict.ranks))}"
        text = f"{trouble}: {names} did not arrive: {verdict.reason}{advice}"
    else:
        text = f"{trouble}; which rank did not arrive cannot be told: {verdict.reason}{advice}"
    rank = verdict.ranks[0] if verdict.ranks else None
    position = next((s.position for s in sightings if s.rank == rank), None)
    return Failure(kind="hung", rank=rank, headline=text, position=position, error=trouble, sightings=sightings)
