"""Where two traced runs part: the first layer and tensor that leaves its bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Kind(StrEnum):
    """What a traced tensor is, in the order in which they are looked at."""

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
    source: str | None  # the input's file; None for parameters
    row: int | None  # of the captured micro-batch, where the difference is largest; of a parameter its first dim's
    token: int | None  # column of the captured micro-batch; None for parameters
    relative: float  # the largest relative difference, of a token or of a parameter's row
    bound: float  # that it leaves
    num_following: int  # traced tensors behind it
    num_following_beyond: int  # of those, how many leave their bound too


def first_difference(reference: Path, other: Path, equivalents: Sequence[Path] = ()) -> FirstDifference | None:
    """The first traced tensor of `other` that leaves its bound, by the log folders of runs with --trace; None: none.

    `equivalents` are traced runs known to be as right as the reference: what they differ from it is the noise floor.
    Raises UsageError for runs that were not traced, or have no input in common.
    """
    raise NotImplementedError
