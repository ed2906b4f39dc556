"""Predict a configuration that was not measured, from what one rank measured.

num-layers  every phase of an input grows by the same seconds and bytes with each layer, known from two numbers of them
zero-stage  one rank can run it, so it is measured
ranks       what data ranks share is divided by them: bytes for each parameter, as the backend declares them
ring        a rank has its share of a row's tokens
tp          weights are divided; of the rest it is not known what is. So a lower and an upper bound

Communication between ranks, and what it holds meanwhile, is not measured: seconds are without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from actor_init.declarations.backends import find_backend_declaration
from actor_init.declarations.backends.declaration import ShardedMemory
from actor_init.model import count_parameters
from actor_init.spec import ActorSpec, UsageError
from capture.facts import Setting
from replay.commands.worst.configuration import OtherConfiguration
from replay.options.spec import ReplaySpec
from replay.profiling.prediction import Cost, CostModel, InputShape, MeasuredPass
from replay.resolution.job_defaults import find_source


class Measure(Protocol):
    """Measures the chosen inputs with an actor of one rank, always the same ones in the same order."""

    def __call__(self, actor: ActorSpec) -> Sequence[MeasuredPass]: ...


class HeldBytes(Protocol):
    def __call__(self, *, gradients: bool) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The least and the most that a pass is predicted to cost; the same where nothing is left open."""

    least: Cost
    most: Cost

    def find_nearest(self, measured: Cost) -> Cost:
        """Return the prediction that is nearest to what was measured."""
        return Cost(
            seconds={name: self._within("seconds", name, value) for name, value in measured.seconds.items()},
            peaks={name: self._within("peaks", name, value) for name, value in measured.peaks.items()},
        )

    def _within(self, quantity: str, name: str, value: float) -> float:
        least, most = getattr(self.least, quantity)[name], getattr(self.most, quantity)[name]
        return float(min(max(value, least), most))


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPredictor:
    """Predicts another configuration's passes."""

    other: OtherConfiguration
    # Predicts the passes of one rank.
    model: CostModel
    num_layers: int
    num_parameters: int
    memory: ShardedMemory
    accumulates: bool

    def predict_bounds(self, shapes: Sequence[InputShape]) -> Bounds | None:
        """Predict the pass in which each data rank is fed one of `shapes`; None if no pass of its kind was measured."""
        costs = [cost for shape in shapes if (cost := self._predict_cost(shape)) is not None]
        if len(costs) < len(shapes):
            return None
        slowest = _find_maximum(costs)
        tp = self.other.actor.parallel.tp
        if tp == 1:
            return Bounds(least=slowest, most=slowest)
        return Bounds(
            least=Cost(
                seconds={name: value / tp for name, value in slowest.seconds.items()},
                peaks={name: value / tp for name, value in slowest.peaks.items()},
            ),
            most=Cost(
                seconds=slowest.seconds,
                peaks=self._subtract_share(slowest.peaks, 1 - 1 / tp, self._count_bytes_of_rank),
            ),
        )

    def _predict_cost(self, shape: InputShape) -> Cost | None:
        cost = self.model.predict(shape, ring=self.other.actor.parallel.ring)
        if cost is None:
            return None
        share = 1 - 1 / self.other.ranks
        return Cost(seconds=cost.seconds, peaks=self._subtract_share(cost.peaks, share, self.memory.partitioned.bytes))

    def _count_bytes_of_rank(self, *, gradients: bool) -> float:
        """Return the bytes for each parameter that one of the data ranks holds."""
        alone, shared = (held.bytes(gradients=gradients) for held in (self.memory.total, self.memory.partitioned))
        return alone - shared * (1 - 1 / self.other.ranks)

    def _subtract_share(self, peaks: Mapping[str, float], share: float, held: HeldBytes) -> dict[str, float]:
        """Return the peaks without that share of what is held."""
        before, later = (self.num_parameters * held(gradients=with_them) for with_them in (self.accumulates, True))
        return {name: peak - share * (before if name == "forward" else later) for name, peak in peaks.items()}


def predict_configuration(
    other: OtherConfiguration, spec: ReplaySpec, base: Sequence[MeasuredPass], measure: Measure, *, accumulates: bool
) -> OtherPredictor:
    """Measure as much of another configuration as one rank can run, and return what predicts its passes.

    base         measured with the actor of `spec`
    accumulates  passes begin with a gradient

    Raises UsageError for a number of layers that the model does not have.
    """
    source = find_source(replace(spec, actor=replace(other.actor, parallel=spec.actor.parallel)))
    if source.adapter is not None and (other.ranks > 1 or other.actor.parallel.tp > 1):
        why = ": ranks and tp are predicted for models without an adapter alone"
        raise UsageError(Setting("predict", other.text), why)
    measured_layers = count_layers(spec)
    num_layers = source.config.get_text_config().num_hidden_layers
    passes = base if other.alone == spec.actor else measure(other.alone)
    if num_layers != measured_layers:
        fewer = measured_layers // 2 or 2
        shallower_passes = measure(replace(other.alone, num_layers=fewer))
        share = (num_layers - measured_layers) / (fewer - measured_layers)
        passes = [
            _extrapolate(base_pass, another, share) for base_pass, another in zip(passes, shallower_passes, strict=True)
        ]
    return OtherPredictor(
        other=other,
        model=CostModel.fit(passes),
        num_layers=num_layers,
        num_parameters=count_parameters(source.config),
        memory=find_backend_declaration(spec.actor.backend).predict_memory(other.alone, spec.measure.steps),
        accumulates=accumulates,
    )


def count_layers(spec: ReplaySpec) -> int:
    return int(find_source(spec).config.get_text_config().num_hidden_layers)


def _extrapolate(base: MeasuredPass, other: MeasuredPass, share: float) -> MeasuredPass:
    """Return the cost on the line from one to the other, so many times their distance from the first."""
    seconds, peaks = (
        {name: before[name] + share * (after[name] - before[name]) for name in before}
        for before, after in ((base.cost.seconds, other.cost.seconds), (base.cost.peaks, other.cost.peaks))
    )
    return replace(base, cost=Cost(seconds=seconds, peaks=peaks))


def _find_maximum(costs: Sequence[Cost]) -> Cost:
    """Return the most of each phase: a pass takes as long as its slowest rank."""
    return Cost(
        seconds={name: max(cost.seconds[name] for cost in costs) for name in costs[0].seconds},
        peaks={name: max(cost.peaks[name] for cost in costs) for name in costs[0].peaks},
    )
