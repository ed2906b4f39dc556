"""What became of each configuration of a suite, and of the suite. Plain data in, plain data out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from replay.curves import Curve, Judgement, judge
from replay.suite_plan import DDP, DEEPSPEED, Planned


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Why a configuration has no curve."""

    reason: str
    is_refusal: bool = False  # its replay said beforehand that it cannot be had


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A judgement on a configuration's curve, or the reason why there is none."""

    planned: Planned
    status: Status
    reason: str = ""
    judgement: Judgement | None = None


def outcomes(
    plan: Sequence[Planned],
    curves: Mapping[str, Curve],
    troubles: Mapping[str, Trouble],
    *,
    num_steps: int,
    steps_an_epoch: int,
) -> list[Outcome]:
    """In the order of `plan`. What has neither a curve nor a trouble was not come to."""
    found = []
    for one in plan:
        trouble = troubles.get(one.name, Trouble(reason=one.reason or "not come to", is_refusal=True))
        if curve := curves.get(one.name):
            judgement = judge(
                one.name,
                curve,
                num_steps=num_steps,
                steps_an_epoch=steps_an_epoch,
                ddp=curves.get(DDP) if one.name != DDP else None,
                deepspeed=curves.get(DEEPSPEED) if one.name != DEEPSPEED else None,
                is_standard=one.configuration.is_standard,
            )
            status = Status.FAILED if judgement.complaints else Status.PASSED
            found.append(Outcome(planned=one, status=status, judgement=judgement))
        else:
            may_refuse = one.name not in troubles or not one.configuration.is_standard
            status = Status.NOT_RUN if trouble.is_refusal and may_refuse else Status.FAILED
            found.append(Outcome(planned=one, status=status, reason=trouble.reason))
    return found
