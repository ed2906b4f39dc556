"""Turn a training run into a loss curve and judge it. Takes and returns plain data.

The bounds on the distance from plain DDP are absolute, in nats of a step's mean loss; the one from DeepSpeed is
relative.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median

from actor_init.as_json import AnyFloat
from replay.commands.suite.plan import DDP, DEEPSPEED, PlannedTraining
from replay.comparison.differences import ComparedPoint, Quantity
from replay.output.text import pluralise
from replay.runlog.reader import PastRun
from replay.runlog.records import PassRecord
from replay.runlog.summary import find_peak_bytes
from replay.tolerances.run_bounds import FROM_DDP, FROM_DEEPSPEED, INITIAL_FROM_DDP


class TrainingStatus(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class NoCurve:
    """Why a configuration has no curve."""

    reason: str
    # Whether the replay refused its options before it started.
    is_refusal: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStep:
    """One optimizer step over all ranks; a line of <name>.jsonl."""

    # Counted from 1.
    step: int
    # Mean over the micro-batches of the step.
    loss: AnyFloat
    # Gradient norm over all ranks, before clipping.
    norm: AnyFloat
    # Sum over the passes of the step, each on its slowest rank.
    seconds: AnyFloat
    # Highest peak of any rank. What is measured is `memory_kind` in the run's run.json.
    memory_bytes: int
    # Digests of the micro-batches of the step, sorted.
    inputs: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCurve:
    """The loss curve of one training run."""

    steps: Sequence[TrainingStep]

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def mean(self) -> float:
        return fmean(self.losses)

    @property
    def seconds_a_step(self) -> float:
        """The median, because the first step includes allocation and compilation."""
        return median(step.seconds for step in self.steps[1:] or self.steps)

    @property
    def peak_bytes(self) -> int:
        return max(step.memory_bytes for step in self.steps)

    def explain_no_fall(self, steps_an_epoch: int) -> str:
        """Explain why the loss does not fall; empty if the last epoch's mean is below the first epoch's, over the same
        inputs.

        If no input occurs twice, the last quarter of the steps is compared with the first.
        """
        num_steps = len(self.losses)
        repeats = 2 * steps_an_epoch <= num_steps
        span = steps_an_epoch if repeats else max(1, num_steps // 4)
        first, last = fmean(self.losses[:span]), fmean(self.losses[-span:])
        if last < first:
            return ""
        steps = pluralise(span, "step")
        reason = f"the loss does not fall: mean {first:.5f} in the first {steps}, {last:.5f} in the last"
        return reason if repeats else f"{reason}, on other inputs. Try: --steps {2 * steps_an_epoch}"


def read_curve(run: PastRun) -> LossCurve:
    """Return the steps of a run with --step. An incomplete last window is not a step."""
    ends = sorted({record.index for record in run.records if record.result.grad_norm is not None})
    windows: list[list[PassRecord]] = [[] for _ in ends]
    for record in run.records:
        if (number := bisect_left(ends, record.index)) < len(ends):
            windows[number].append(record)
    return LossCurve(steps=[_combine_step(number, window) for number, window in enumerate(windows)])


def _list_norms(window: Sequence[PassRecord]) -> list[float]:
    return [record.result.grad_norm for record in window if record.result.grad_norm is not None]


def _combine_step(number: int, window: Sequence[PassRecord]) -> TrainingStep:
    """Combine a window into a step. Ranks that share a micro-batch report the same loss, so the mean over all is
    correct.
    """
    by_pass: dict[int, list[float]] = {}
    by_data_rank: dict[tuple[int, int], str] = {}
    for record in window:
        assert record.cost.seconds is not None
        assert record.input.input_digest is not None
        by_pass.setdefault(record.index, []).append(record.cost.seconds)
        by_data_rank[record.index, record.data_rank] = record.input.input_digest
    return TrainingStep(
        step=number + 1,
        loss=fmean(record.result.loss for record in window if record.result.loss is not None),
        norm=_list_norms(window)[0],
        seconds=sum(max(ranks) for ranks in by_pass.values()),
        memory_bytes=max(map(find_peak_bytes, window)),
        inputs=sorted(by_data_rank.values()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveComparison:
    """One configuration's curve compared with the reference curves that ran."""

    curve: LossCurve
    from_ddp: Quantity | None
    from_deepspeed: Quantity | None
    # Why the run did not train, or trained differently.
    faults: Sequence[str] = ()
    # Bounds that are exceeded, which rounding alone may do.
    beyond: Sequence[str] = ()

    @property
    def complaints(self) -> list[str]:
        """All reasons against the curve; empty if it passed."""
        return [*self.faults, *self.beyond]


def compare_curves(
    name: str,
    curve: LossCurve,
    *,
    steps_an_epoch: int,
    ddp: LossCurve | None,
    deepspeed: LossCurve | None,
    is_standard: bool,
) -> CurveComparison:
    """Compare a curve with `ddp` and `deepspeed`, which are None if they did not run or are this curve."""
    faults, beyond = [], []
    if bad := [step for step in curve.steps if not math.isfinite(step.loss)]:
        faults.append(f"the loss of step {bad[0].step} is {bad[0].loss}")
    elif reason := curve.explain_no_fall(steps_an_epoch):
        faults.append(reason)
    for reference_name, reference in (("ddp", ddp), ("deepspeed", deepspeed)):
        if reference is not None:
            faults += _other_inputs(curve, reference, reference_name)
    from_ddp = _difference(ddp, curve) if ddp is not None else None
    from_deepspeed = _difference(deepspeed, curve) if deepspeed is not None and is_standard else None
    if from_ddp is not None:
        beyond += _beyond(from_ddp.points[0].difference, INITIAL_FROM_DDP, "initial difference from ddp")
        for_max, for_mean = FROM_DDP.get(name, (math.inf, math.inf))
        beyond += _beyond(from_ddp.max_difference, for_max, "max difference from ddp")
        beyond += _beyond(from_ddp.mean_difference, for_mean, "mean difference from ddp")
    if from_deepspeed is not None and not from_deepspeed.max_relative <= FROM_DEEPSPEED:
        beyond.append(f"{from_deepspeed.max_relative:.2%} from deepspeed, bound {FROM_DEEPSPEED:.0%}")
    return CurveComparison(curve=curve, from_ddp=from_ddp, from_deepspeed=from_deepspeed, faults=faults, beyond=beyond)


def _difference(reference: LossCurve, curve: LossCurve) -> Quantity:
    points = [
        ComparedPoint(source=f"step {a.step}", place=a.step, reference=a.loss, other=b.loss)
        for a, b in zip(reference.steps, curve.steps, strict=False)
    ]
    return Quantity.summarize("loss", points)


def _beyond(value: float, bound: float, quantity: str) -> list[str]:
    return [] if value < bound or math.isinf(bound) else [f"{quantity} {value:.3g}, bound {bound:g}"]


def _other_inputs(curve: LossCurve, reference: LossCurve, name: str) -> list[str]:
    differing = [a.step for a, b in zip(curve.steps, reference.steps, strict=False) if a.inputs != b.inputs]
    return [f"step {differing[0]} was on other inputs than {name}'s"] if differing else []


@dataclass(frozen=True, kw_only=True, slots=True)
class DifferenceFromDdp:
    """How far the losses are from DDP's: at the first step, at most, and on average."""

    initial: AnyFloat
    max: AnyFloat
    mean: AnyFloat


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSummary:
    """What suite.json has of a configuration; the steps are in <name>.jsonl. Without a curve there is no number."""

    status: TrainingStatus
    reason: str
    complaints: Sequence[str] = ()
    num_processes: int | None = None
    initial: AnyFloat | None = None
    final: AnyFloat | None = None
    min: AnyFloat | None = None
    mean: AnyFloat | None = None
    seconds_a_step: float | None = None
    peak_bytes: int | None = None
    difference_from_ddp: DifferenceFromDdp | None = None
    relative_difference_from_deepspeed: AnyFloat | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingResult:
    """The judgement on a configuration's curve, or the reason why it has none."""

    planned: PlannedTraining
    status: TrainingStatus
    reason: str = ""
    judgement: CurveComparison | None = None

    def summarize(self) -> TrainingSummary:
        """Return the entry of suite.json."""
        if self.judgement is None:
            return TrainingSummary(status=self.status, reason=self.reason)
        curve, from_ddp, from_deepspeed = self.judgement.curve, self.judgement.from_ddp, self.judgement.from_deepspeed
        return TrainingSummary(
            status=self.status,
            reason=self.reason,
            complaints=self.judgement.complaints,
            num_processes=self.planned.num_processes,
            initial=curve.losses[0],
            final=curve.losses[-1],
            min=min(curve.losses),
            mean=curve.mean,
            seconds_a_step=curve.seconds_a_step,
            peak_bytes=curve.peak_bytes,
            difference_from_ddp=None
            if from_ddp is None
            else DifferenceFromDdp(
                initial=from_ddp.points[0].difference, max=from_ddp.max_difference, mean=from_ddp.mean_difference
            ),
            relative_difference_from_deepspeed=None if from_deepspeed is None else from_deepspeed.max_relative,
        )


def judge_trainings(
    plan: Sequence[PlannedTraining],
    trained: Mapping[str, LossCurve | NoCurve],
    *,
    steps_an_epoch: int,
) -> list[TrainingResult]:
    """Return the results in the order of `plan`. A configuration that is not among `trained` was not reached."""
    curves = {name: curve for name, curve in trained.items() if isinstance(curve, LossCurve)}
    results = []
    for training in plan:
        curve = trained.get(training.name, NoCurve(reason=training.reason or "not reached", is_refusal=True))
        if isinstance(curve, LossCurve):
            judgement = compare_curves(
                training.name,
                curve,
                steps_an_epoch=steps_an_epoch,
                ddp=curves.get(DDP) if training.name != DDP else None,
                deepspeed=curves.get(DEEPSPEED) if training.name != DEEPSPEED else None,
                is_standard=training.configuration.is_standard,
            )
            status = TrainingStatus.FAILED if judgement.complaints else TrainingStatus.PASSED
            results.append(TrainingResult(planned=training, status=status, judgement=judgement))
        else:
            may_refuse = training.name not in trained or not training.configuration.is_standard
            status = TrainingStatus.NOT_RUN if curve.is_refusal and may_refuse else TrainingStatus.FAILED
            results.append(TrainingResult(planned=training, status=status, reason=curve.reason))
    return results
