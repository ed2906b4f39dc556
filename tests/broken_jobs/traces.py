"""What of a broken job's recording is other than in that of the same job unbroken: what could betray the fault."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from capture.file_format.capture_file import CapturedCall, read_call
from capture.file_format.listing import capture_files
from capture.file_format.optimizer_step import ParameterSamples
from tests.broken_jobs.declarations import Job
from tests.broken_jobs.effect import judged_steps

LEAST = 1e-7  # relative; both ran on the same machine, by the same kernels


def traces_of(job: Job, run: Path, twin: Path) -> dict[str, float]:
    """By recorded quantity the largest difference, of those that differ, in the passes that a replay can judge.

    loss, log-probs, norm, shares  of a pass or step, relative or, below 1, absolute
    gradients, weights             length of the samples' difference by the length of the unbroken job's samples
    parameter                      the same of the one parameter's gradient that is furthest off
    settings, optimizer            of the optimizer: 1 where another one
    untrained                      number of parameters without gradient in one of the two alone
    """
    found: dict[str, float] = {}
    for here, there in _pairs(job, run, twin):
        for name, value in _differences(here, there):
            if value > LEAST or math.isnan(value):
                found[name] = max(value, found.get(name, 0.0))
    return found


def _pairs(job: Job, run: Path, twin: Path) -> Iterator[tuple[CapturedCall, CapturedCall]]:
    runs, twins = (capture_files(folder / "captures") for folder in (run, twin))
    if len(runs) != len(twins):
        raise ValueError(f"{job.name}: {len(runs)} passes were recorded, and {len(twins)} of the unbroken job")
    by_rank: dict[int | None, int] = {}
    for here, there in zip(map(read_call, runs), map(read_call, twins), strict=True):
        number = by_rank.get(here.origin.rank, 0)
        by_rank[here.origin.rank] = number + 1
        if number // job.setup.accumulation in judged_steps(job):
            yield here, there


def _differences(here: CapturedCall, there: CapturedCall) -> Iterator[tuple[str, float]]:
    for name, kept_as in (("loss", "loss"), ("log-probs", "token_log_probs"), ("norm", "grad_norm")):
        yield name, _apart(_numbers(here.outputs.get(kept_as)), _numbers(there.outputs.get(kept_as)))
    yield "weights", _of_samples(here.weights, there.weights)
    if here.step is None or there.step is None:
        yield "steps", float((here.step is None) is not (there.step is None))
        return
    yield "gradients", _of_samples(here.step.gradients, there.step.gradients)
    yield "parameter", _of_worst_sample(here.step.gradients, there.step.gradients)
    yield "norm", _apart(_numbers(here.step.grad_norm), _numbers(there.step.grad_norm))
    yield "shares", _apart(_numbers(here.step.shares), _numbers(there.step.shares))
    yield "settings", float(list(here.step.settings) != list(there.step.settings))
    yield "optimizer", float(here.step.optimizer != there.step.optimizer)
    yield "state", float(here.step.has_state is not there.step.has_state)
    yield "untrained", float(len(set(here.step.without_gradient) ^ set(there.step.without_gradient)))


def _numbers(value: Any) -> list[float]:
    if value is None:
        return []
    values = value if isinstance(value, Sequence) else [value]
    return [math.nan if value is None else float(value) for value in values]


def _apart(here: Sequence[float], there: Sequence[float]) -> float:
    if len(here) != len(there):
        return math.inf
    pairs = [(a, b) for a, b in zip(here, there, strict=True) if not (math.isnan(a) and math.isnan(b))]
    return max((abs(a - b) / max(abs(b), 1.0) for a, b in pairs), default=0.0)


def _of_samples(here: ParameterSamples | None, there: ParameterSamples | None) -> float:
    ours, theirs = _values(here), _values(there)
    squares = total = 0.0
    for name in ours.keys() | theirs.keys():
        known = theirs.get(name, ours.get(name, ()))
        zeros = [0.0] * len(known)
        pairs = list(zip(ours.get(name, zeros), theirs.get(name, zeros), strict=True))
        squares += sum((a - b) ** 2 for a, b in pairs)
        total += sum(b * b for _, b in pairs)
    return math.sqrt(squares / total) if total else float(squares > 0)


def _of_worst_sample(here: ParameterSamples | None, there: ParameterSamples | None) -> float:
    ours, theirs = _values(here), _values(there)
    both = ours.keys() & theirs.keys()
    return max((_length(ours[name], theirs[name]) for name in both), default=0.0)


def _length(here: Sequence[float], there: Sequence[float]) -> float:
    difference = math.dist(here, there)
    return difference / math.hypot(*there) if any(there) else float(difference > 0)


def _values(found: ParameterSamples | None) -> Mapping[str, Sequence[float]]:
    return {} if found is None else {sample.name: sample.values for sample in found.samples}
