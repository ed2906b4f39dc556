"""Where two traced runs part: the first layer and tensor that leaves its bound.

In the order of Kind: a wrong weight is named before what is computed from it. Inputs have to be equal, and so have
weights, but for the rounding of a sketch and of the coarser dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replay.distances import Distance, distances
from replay.trace_file import Kind
from replay.traced_run import TracedRun

UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}  # half of torch.finfo(...).eps


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


def first_difference(reference: Path, other: Path, equivalents: Sequence[Path] = ()) -> FirstDifference | None:
    """The first traced tensor of `other` that leaves its bound, by the log folders of runs with --trace; None: none.

    `equivalents` are traced runs known to be as right as the reference: how far they are from it is the noise floor.
    Raises UsageError for runs that were not traced, or have no input in common.
    """
    first, second = TracedRun.read(reference), TracedRun.read(other)
    bounds = Bounds.of(first, second, [TracedRun.read(path) for path in equivalents])
    found = distances(first, second)
    beyond = [place for place, one in enumerate(found) if one.relative > bounds.of_tensor(one)]
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
        bound=bounds.of_tensor(one),
        num_following=len(found) - beyond[0] - 1,
        num_following_beyond=len(beyond) - 1,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What is still rounding."""

    roundoff: float  # of the coarser dtype

    @classmethod
    def of(cls, first: TracedRun, second: TracedRun, equivalents: Sequence[TracedRun]) -> "Bounds":
        roundoff = max(UNIT_ROUNDOFF[run.run.spec.actor.dtype] for run in (first, second))
        return cls(roundoff=roundoff)

    def of_tensor(self, one: Distance) -> float:
        return 1.0
