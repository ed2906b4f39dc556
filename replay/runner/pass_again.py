"""Find passes that were slow only the first time, by running them again.

Counters do not show every first use: heuristics that cuBLAS or cuDNN work out for a shape, caches of the job's own
code. They hold up the host, and the device waits for it. So a pass is run again, outside the clock, if on CUDA the
device waited for the host and the pass took far longer than passes like it. If it is as slow again, it counts: it is
slow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from replay.runlog.records import FirstUse, PassRecord

FACTOR = 1.5  # slower than expected, or than the second run
WAITED = 0.8  # of a phase's seconds on the device, in which the host was still launching it


@dataclass(kw_only=True, slots=True)
class Expectations:
    """What passes took that count, by which phases they had. The same on every rank, given the records of all ranks."""

    _known: dict[bool, list[tuple[int, float]]] = field(default_factory=dict)  # fed tokens, seconds

    def is_far_off(self, ranks: Sequence[PassRecord]) -> bool:
        """Did the host hold up the device in a pass that would count, and that took far longer than expected?"""
        if not _would_count(ranks) or not any(map(_host_held_up, ranks)):
            return False
        expected = self._expected("backward" in ranks[0].cost.phases, ranks[0].input.fed_tokens)
        return expected is None or _seconds(ranks) > FACTOR * expected

    def learn(self, ranks: Sequence[PassRecord], seconds_again: float = math.inf) -> None:
        """Expect of later passes what this one took, or its second run, if it is one that counts."""
        if _would_count(ranks):
            known = self._known.setdefault("backward" in ranks[0].cost.phases, [])
            known.append((ranks[0].input.fed_tokens, min(seconds_again, _seconds(ranks))))

    def _expected(self, has_backward: bool, fed_tokens: int) -> float | None:
        """Return the most that a pass of so many tokens should take: more tokens, as much longer."""
        known = self._known.get(has_backward, [])
        return max((seconds * max(1.0, fed_tokens / tokens) for tokens, seconds in known if tokens), default=None)


def _would_count(ranks: Sequence[PassRecord]) -> bool:
    return not any(
        r.error is not None or r.warmup or r.traced or r.compilation.new_graphs or r.first_uses for r in ranks
    )


def _seconds(ranks: Sequence[PassRecord]) -> float:
    """Return the seconds of a pass without those of its step, which is not run again."""
    return max(sum(cost.seconds for name, cost in record.cost.phases.items() if name != "step") for record in ranks)


def _host_held_up(record: PassRecord) -> bool:
    phases = [cost for name, cost in record.cost.phases.items() if name != "step"]
    return any(cost.host_seconds is not None and cost.host_seconds >= WAITED * cost.seconds for cost in phases)


def with_second_run(record: PassRecord, seconds: Sequence[float], ranks: Sequence[PassRecord]) -> PassRecord:
    """Return a rank's `record` with its second run, marked if the pass was slow only once.

    seconds  of the second run, on each rank
    """
    record = replace(record, cost=replace(record.cost, seconds_again=seconds[record.rank]))
    if _seconds(ranks) > FACTOR * max(seconds):
        return replace(record, first_uses=[*record.first_uses, FirstUse.ONCE.value])
    return record
