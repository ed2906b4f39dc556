"""How far a fault moves what its job computes: the numbers of two runs of one job, one of them unbroken."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.broken_jobs.declarations import Job

CARRIES = 3.0  # an effect of so many times what another kernel makes is more than the dtype's rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """The largest change of each quantity, in the passes and steps that a replay can judge.

    loss      of a pass, relative
    token     log-prob of a label, absolute
    norm      of a step's gradient before clipping, relative
    gradient  length of the difference of a step's gradients, as the optimizer got them, by the length of the right one
    update    the same of how far the weights moved in all steps
    """

    loss: float
    token: float
    norm: float
    gradient: float
    update: float

    @property
    def largest(self) -> tuple[str, float]:
        return max(asdict(self).items(), key=lambda item: float(item[1]))

    def exceeds(self, floor: "Effect") -> bool:
        """Is one quantity further off than rounding puts it?"""
        floors = asdict(floor)
        return any(value > CARRIES * floors[name] for name, value in asdict(self).items())


def effect_of(job: Job, run: Path, twin: Path) -> Effect:
    """Measure the effect on a run's values, compared with its unbroken twin, over all ranks."""
    found = [_of_rank(job, _read(run, rank), _read(twin, rank)) for rank in range(job.kind.num_ranks)]
    return Effect(**{name: max(getattr(effect, name) for effect in found) for name in Effect.__slots__})


def judged_steps(job: Job) -> range:
    """Return those that began with the weights of a replay."""
    setup = job.setup
    is_stepped = job.is_stepped or any("--step" in arguments for arguments in job.replays)
    moves = setup.learning_rate > 0 and not is_stepped
    return range(setup.saved_at, setup.saved_at + 1) if moves else range(setup.num_steps)


def _read(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"numbers_rank{rank}.pt")
    return found


def _of_rank(job: Job, run: Mapping[str, Any], twin: Mapping[str, Any]) -> Effect:
    """Passes and steps with the weights of the replay; all of them where it steps too, or nothing moves."""
    setup, steps = job.setup, judged_steps(job)
    passes = [step * setup.accumulation + number for step in steps for number in range(setup.accumulation)]
    with_update = len(steps) > 1 and run["moved"] and twin["moved"]
    return Effect(
        loss=max(_relative(run["losses"][at], twin["losses"][at]) for at in passes),
        token=max(_token(run["log_probs"][at], twin["log_probs"][at]) for at in passes),
        norm=max(_relative(run["norms"][at], twin["norms"][at]) for at in steps) if twin["norms"] else 0.0,
        gradient=max(_apart(run["gradients"][at], twin["gradients"][at]) for at in steps),
        update=_apart(run["moved"], twin["moved"]) if with_update else 0.0,
    )


def _relative(value: float, right: float) -> float:
    return abs(value - right) / max(abs(right), 1e-12)


def _token(values: Tensor, right: Tensor) -> float:
    """Return the largest distance; of labels that are other tokens, or none, it is infinite."""
    if len(values) != len(right):
        return math.inf
    return float((values - right).abs().max())


def _apart(values: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Return the relative distance; a parameter that only one side has counts as zeros in the other."""
    squares = total = 0.0
    for name in values.keys() | right.keys():
        here, there = values.get(name), right.get(name)
        known = there if there is not None else here
        assert known is not None
        zeros = torch.zeros_like(known)
        difference = (here if here is not None else zeros) - (there if there is not None else zeros)
        squares += float(difference.double().square().sum())
        total += float(there.double().square().sum()) if there is not None else 0.0
    return (squares / total) ** 0.5 if total else float(squares > 0)
