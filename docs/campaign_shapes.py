"""Say what commands of many replays write and return, for `python -m docs.write_schemas`.

`Campaign` is `<command>.json` in the folder of the command. Its result is the `result` of what --json prints, as far as
the command came: sections that a command writes one after the other may be missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from actor_init.as_json import AnyFloat
from docs.shapes import CALL, list_fields, make_shape
from replay.agreement.noise_floor import MatrixResult
from replay.agreement.rows import ParityRun
from replay.campaign.campaign import FORMAT
from replay.commands.check_upgrade.result import UpgradeCheck, UpgradeResult
from replay.commands.minimise.runs import MinimisedOutcome
from replay.commands.recompiles.policies import PolicyResult
from replay.commands.scan.runs import ScanOutcome
from replay.commands.suite.loss_curve import TrainingStatus
from replay.commands.worst.measuring import DeviceMemory, Fits
from replay.commands.worst.sections import (
    CheckedOther,
    CheckedRanking,
    FailedInput,
    InputCost,
    KindFits,
    OtherPrediction,
    PredictedInput,
)
from replay.processes.pool import Machine
from replay.profiling.prediction import PredictionErrors, RowLayout


@dataclass(kw_only=True)
class Campaign:
    format: Literal[FORMAT]  # type: ignore[valid-type]
    command: str
    machine: Machine
    versions: Mapping[str, str | None]
    plan: Mapping[str, Any]
    result: Mapping[str, Any] | None


_PARITY = make_shape(
    "Parity",
    [
        ("finished", bool),
        ("runs", list[ParityRun]),
        *list_fields(MatrixResult),
        ("first_differences", list[str]),
    ],
)


_POLICY = make_shape("Policy", [*list_fields(PolicyResult), ("net_seconds", float | None)])


@dataclass(kw_only=True)
class _Recompiles:
    policies: list[_POLICY]  # type: ignore[valid-type]
    damaged: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class _FromDdp:
    initial: AnyFloat
    max: AnyFloat
    mean: AnyFloat


@dataclass(kw_only=True)
class _Training:
    status: TrainingStatus
    reason: str
    # Of a configuration that has a curve:
    complaints: list[str] = field(default_factory=list)
    num_processes: int | None = None
    initial: AnyFloat | None = None
    final: AnyFloat | None = None
    min: AnyFloat | None = None
    mean: AnyFloat | None = None
    seconds_a_step: float | None = None
    peak_bytes: int | None = None
    difference_from_ddp: _FromDdp | None = None
    relative_difference_from_deepspeed: AnyFloat | None = None


@dataclass(kw_only=True)
class _Suite:
    status: Literal["passed", "failed", "interrupted"]
    configurations: Mapping[str, _Training]


@dataclass(kw_only=True)
class _Worst:
    damaged: list[str] = field(default_factory=list)
    run: str | None = None
    measured: list[InputCost] = field(default_factory=list)
    failed: list[FailedInput] = field(default_factory=list)
    ended: str = ""
    memory: DeviceMemory | None = None
    overhead: float | None = None
    rows: Mapping[str, RowLayout] = field(default_factory=dict)
    fits: Mapping[str, KindFits] = field(default_factory=dict)
    held_out: list[PredictedInput] = field(default_factory=list)
    error: PredictionErrors | None = None
    fits_here: Fits | None = None
    ranking: list[InputCost] = field(default_factory=list)
    checked: CheckedRanking | None = None
    others: list[OtherPrediction] = field(default_factory=list)
    others_checked: list[CheckedOther] = field(default_factory=list)


def _make_printed(name: str, result: Any) -> type:
    """Return the shape of what --json prints of a command, which is what `CampaignResult.to_dict` returns."""
    return make_shape(name, [*CALL, ("result", result)])


# By command, what --json prints. check-upgrade has its result beside the fields of a campaign's folder.
PRINTED: Mapping[str, Any] = {
    "parity": _make_printed("ReplayParity", _PARITY),
    "scan": _make_printed("ReplayScan", ScanOutcome),
    "worst": _make_printed("ReplayWorst", _Worst),
    "recompiles": _make_printed("ReplayRecompiles", _Recompiles),
    "minimise": _make_printed("ReplayMinimise", MinimisedOutcome),
    "suite": _make_printed("ReplaySuite", _Suite),
    "check-upgrade": make_shape("ReplayCheckUpgrade", [("result", UpgradeResult), *list_fields(UpgradeCheck)]),
}


@dataclass(kw_only=True)
class _TensorForm:
    shape: Sequence[int]
    dtype: str


@dataclass(kw_only=True)
class CapturedPass:
    """What `to_dict` of a capture returns."""

    path: str
    rank: int | None
    forward: int | None
    step: int | None
    trains: bool
    tensors: Mapping[str, _TensorForm]
    notes: Mapping[str, _TensorForm]
