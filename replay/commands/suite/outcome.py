"""Determine the outcome of each configuration of a suite. Takes and returns plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from replay.commands.suite.loss_curve import Curve, CurveComparison, compare_curves
from replay.commands.suite.plan import DDP, DEEPSPEED, Planned


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class NoCurve:
    """Why a configuration has no curve."""

    reason: str
    is_refusal: bool = False  # its replay refused the options before it started


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingResult:
    """The judgement on a configuration's curve, or the reason why it has none."""

    planned: Planned
    status: Status
    reason: str = ""
    judgement: CurveComparison | None = None

    def summary(self) -> dict[str, Any]:
        """Return the entry of suite.json; the steps are in <name>.jsonl."""
        entry: dict[str, Any] = {"status": self.status, "reason": self.reason}
        if self.judgement is None:
            return entry
        curve, from_ddp, from_deepspeed = self.judgement.curve, self.judgement.from_ddp, self.judgement.from_deepspeed
        entry |= {"complaints": self.judgement.complaints, "num_processes": self.planned.num_processes}
        entry |= {"initial": curve.losses[0], "final": curve.losses[-1], "min": min(curve.losses), "mean": curve.mean}
        entry |= {"seconds_a_step": curve.seconds_a_step, "peak_bytes": curve.peak_bytes}
        if from_ddp is not None:
            initial = from_ddp.points[0].difference
            of_max, of_mean = from_ddp.max_difference, from_ddp.mean_difference
            entry["difference_from_ddp"] = {"initial": initial, "max": of_max, "mean": of_mean}
        if from_deepspeed is not None:
            entry["relative_difference_from_deepspeed"] = from_deepspeed.max_relative
        return entry


def outcomes(
    plan: Sequence[Planned],
    trained: Mapping[str, Curve | NoCurve],
    *,
    steps_an_epoch: int,
) -> list[TrainingResult]:
    """Return the results in the order of `plan`. A configuration that is not among `trained` was not reached."""
    curves = {name: curve for name, curve in trained.items() if isinstance(curve, Curve)}
    results = []
    for one in plan:
        curve = trained.get(one.name, NoCurve(reason=one.reason or "not reached", is_refusal=True))
        if isinstance(curve, Curve):
            judgement = compare_curves(
                one.name,
                curve,
                steps_an_epoch=steps_an_epoch,
                ddp=curves.get(DDP) if one.name != DDP else None,
                deepspeed=curves.get(DEEPSPEED) if one.name != DEEPSPEED else None,
                is_standard=one.configuration.is_standard,
            )
            status = Status.FAILED if judgement.complaints else Status.PASSED
            results.append(TrainingResult(planned=one, status=status, judgement=judgement))
        else:
            may_refuse = one.name not in trained or not one.configuration.is_standard
            status = Status.NOT_RUN if curve.is_refusal and may_refuse else Status.FAILED
            results.append(TrainingResult(planned=one, status=status, reason=curve.reason))
    return results
