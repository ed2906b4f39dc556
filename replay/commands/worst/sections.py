"""Hold the result of worst.json: its sections, which the command writes one after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from replay.commands.worst.measuring import DeviceMemory, Fits
from replay.profiling.prediction import Cost, CostFit, InputShape, PredictionErrors, RowLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class InputCost:
    """An input, and its seconds and peaks by phase: as measured, or in a ranking as predicted."""

    number: int
    source: str
    trains: bool
    rows: int
    real_tokens: int
    seconds: Mapping[str, float]
    peaks: Mapping[str, float]

    @classmethod
    def from_shape(cls, shape: InputShape, cost: Cost, **more: Any) -> Self:
        """Return the cost of an input, with the other fields of this class."""
        return cls(
            number=shape.number,
            source=shape.source,
            trains=shape.trains,
            rows=shape.rows,
            real_tokens=shape.real_tokens,
            seconds=cost.seconds,
            peaks=cost.peaks,
            **more,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedInput(InputCost):
    """An input that was measured, and what was predicted of it."""

    predicted: Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedInput:
    """An input whose pass failed."""

    source: str
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KindFits:
    """What was fitted to training passes, or to rollouts, by phase."""

    seconds: Mapping[str, CostFit]
    peaks: Mapping[str, CostFit]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRanking:
    """The inputs that --check ran; `run` is the folder of their log."""

    run: str
    inputs: Sequence[PredictedInput]
    failed: Sequence[FailedInput]
    ended: str
    error: PredictionErrors | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredWith:
    """What one rank ran for a prediction of another configuration."""

    run: str
    layers: int | None
    zero_stage: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedPass:
    """The bounds of a pass of another configuration."""

    sources: Sequence[str]
    least: Cost
    most: Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPrediction:
    """What was predicted of another configuration."""

    text: str
    num_layers: int
    num_parameters: int
    measured_with: Sequence[MeasuredWith]
    fits_here: Fits
    passes: Sequence[PredictedPass]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedPass:
    """A pass of another configuration: its bounds, and what it cost."""

    least: Cost
    most: Cost
    measured: Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedOther:
    """The passes of another configuration that --check ran."""

    text: str
    run: str
    passes: Sequence[CheckedPass]
    failed: Sequence[str]
    ended: str
    error: PredictionErrors | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstOutcome:
    """The `result` of worst.json. Sections that the command has not reached are empty; `ranking` is slowest first."""

    damaged: Sequence[str] = ()
    run: str | None = None
    measured: Sequence[InputCost] = ()
    failed: Sequence[FailedInput] = ()
    ended: str = ""
    memory: DeviceMemory | None = None
    overhead: float | None = None
    rows: Mapping[str, RowLayout] = field(default_factory=dict)
    fits: Mapping[str, KindFits] = field(default_factory=dict)
    held_out: Sequence[PredictedInput] = ()
    error: PredictionErrors | None = None
    fits_here: Fits | None = None
    ranking: Sequence[InputCost] = ()
    checked: CheckedRanking | None = None
    others: Sequence[OtherPrediction] = ()
    others_checked: Sequence[CheckedOther] = ()
