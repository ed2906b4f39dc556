"""Decide which rank of a job that hung or died the others waited for. Plain data in, plain data out."""

from collections.abc import Callable, Sequence

from replay.post_mortem.last_seen import End, LastSeen
from replay.watch.blame import Blame, blame_fewest, blame_some

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
