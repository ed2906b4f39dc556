"""Hold what a policy took, and choose among policies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from replay.recompiles.policies import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a policy took to replay the inputs once, compiling, and once more."""

    policy: Policy
    options: str = ""  # of a replay
    num_passes: int = 0  # that were replayed, of both rounds
    num_graphs: int = 0
    recompilations: Mapping[str, int] = field(default_factory=dict)  # guards that failed, numbers as N; how often
    compile_seconds: float = 0.0
    extra_seconds: float = 0.0  # that the first round took more than the second
    pass_seconds: float | None = None  # mean of the second round; None: it was not finished
    fed_tokens: int = 0  # of the first round
    error: str = ""
    log: str = ""

    def net_seconds(self, num_passes: int) -> float | None:
        """Return the seconds of so many passes with this mix of lengths; None if it is not known."""
        return None if self.pass_seconds is None else self.extra_seconds + num_passes * self.pass_seconds


def best(results: Sequence[Result], num_passes: int) -> Result | None:
    """Return the policy with the fewest net seconds; None if none is known."""
    known = [(net, number) for number, one in enumerate(results) if (net := one.net_seconds(num_passes)) is not None]
    return results[min(known)[1]] if known else None


def pays_from(one: Result, other: Result) -> int | None:
    """Return from how many passes on `one` takes less time than `other`; None: never."""
    if one.pass_seconds is None or other.pass_seconds is None or one.pass_seconds >= other.pass_seconds:
        return None
    return max(1, round((one.extra_seconds - other.extra_seconds) / (other.pass_seconds - one.pass_seconds)))
