"""Where two traced runs part: the first layer and tensor that leaves its bound.

In the order of Kind, so that a wrong weight or input is named before what is computed from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Kind(StrEnum):
    """What a traced tensor is, in the order in which they are looked at; gradients as they come back."""

    PARAMETER = "parameter"
    INPUT = "input"
    FORWARD = "forward"
    GRADIENT = "gradient of an activation"
    PARAMETER_GRADIENT = "gradient of a parameter"


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDifference:
    """The first traced tensor of `other` that is further from the reference's than its bound."""

    kind: Kind
    name: str  # qualified, as Hugging Face has it; of an input what is fed: "position_ids"
    what: str  # "output" or "input" of a module; "weight" or "gradient" of a parameter; "fed"
    layer: int | None  # None outside of the transformer layers
    source: str | None  # the input's file, or the first of a window's; None for parameters
    row: (
        int | None
    )  # of the captured micro-batch, where the difference is largest; of a parameter along its shorter dim
    token: int | None  # column of the captured micro-batch; None for parameters and their gradients
    relative: float  # the largest of a row, see distances.py; of inputs the share of tokens that differ
    bound: float  # that it leaves
    num_following: int  # traced tensors behind it
    num_following_beyond: int  # of those, how many leave their bound too


Parted = Mapping[int, FirstDifference | None]  # by number of the run that was compared with a reference, if traced


def first_difference(reference: Path, other: Path, equivalents: Sequence[Path] = ()) -> FirstDifference | None:
    """The first traced tensor of `other` that leaves its bound, by the log folders of runs with --trace; None: none.

    `equivalents` are traced runs known to be as right as the reference: how far they are from it is the noise floor.
    They should differ in kernel, order or sharding, not be copies. Raises UsageError for runs that were not traced, or
    have no input in common.
    """
    from replay.tracing.distances import distances
    from replay.tracing.reader import TracedRun
    from replay.tracing.tolerances import bounds_between

    first, second = TracedRun.read(reference), TracedRun.read(other)
    found = distances(first, second)
    bounds = bounds_between(first, second, [TracedRun.read(path) for path in equivalents], found)
    beyond = [place for place, one in enumerate(found) if not one.relative <= bounds[place]]
    if not beyond:
        return None
    one = found[beyond[0]]
    return FirstDifference(
        kind=one.key.kind,
        name=one.key.name,
        what=one.key.what,
        layer=first.layer_of(one.key.name),
        source=one.source,
        row=one.row,
        token=one.token,
        relative=one.relative,
        bound=bounds[beyond[0]],
        num_following=len(found) - beyond[0] - 1,
        num_following_beyond=len(beyond) - 1,
    )
