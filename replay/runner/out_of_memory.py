"""Say, of a pass that ran out of memory, what it would have needed, and which options would have needed less.

The passes that were measured tell: a fit of their peaks to their rows and tokens (`replay/profiling/prediction.py`)
predicts the peak of the one that failed. What of it grows with the tokens is held by activations, and by whole logits
where there are some; of the rest the backend declares weights, gradients and the optimizer's. `--memory-snapshot` shows
what was held when memory ran out, which is less than the pass would have needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from actor_init.spec import ActorSpec
from actor_init.world import World
from replay.options.spec import MeasureSpec
from replay.output.text import Pairs, format_gibibytes, pluralise
from replay.profiling.memory_advice import PassSize, compute_declared_bytes, predict_savings
from replay.profiling.prediction import Cost, CostModel, InputShape, MeasuredPass, choose_spread, read_shapes
from replay.profiling.profile_records import Holder, HolderKind, Saving
from replay.profiling.text import describe_savings
from replay.runlog.records import PassRecord

MIN_PASSES_TO_FIT = 3
# Of more passes the inputs are not read: they would only cost time.
MAX_PASSES_TO_READ = 24
WHY_NOT_WITH_ADAPTER = "of a model with an adapter no backend declares what its parts take"
SNAPSHOT_HINT = ". --memory-snapshot runs the pass once more and says what held its memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedNeed:
    """What a pass would have needed by a fit, in bytes, and what it would need with other options.

    num_measured  passes that the fit is made from
    error         the most that such a fit was off on passes held out of it; None: too few to hold any out
    """

    num_measured: int
    peak_bytes: int
    error: float | None
    savings: Sequence[Saving]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """The first pass that ran out of memory on one rank, in bytes.

    Weights, gradients and optimizer are what a rank holds whatever it is fed, as the backend declares it; None with an
    adapter.

    device_bytes  all memory of the device; None on a CPU
    needed        None: nothing is predicted
    why_not       why nothing is predicted
    """

    index: int
    rank: int
    weights_bytes: int | None
    gradients_bytes: int | None
    optimizer_bytes: int | None
    device_bytes: int | None
    needed: PredictedNeed | None
    why_not: str = ""

    def lines(self, *, has_snapshot: bool) -> Pairs:
        hint = "" if has_snapshot else SNAPSHOT_HINT
        where = f"pass {self.index + 1}, rank {self.rank}"
        lasting = ", ".join(
            f"{format_gibibytes(size)} GiB of {name}"
            for name, size in (
                ("weights", self.weights_bytes),
                ("gradients", self.gradients_bytes),
                ("optimizer and masters", self.optimizer_bytes),
            )
        )
        device = "" if self.device_bytes is None else f"; the device has {format_gibibytes(self.device_bytes)} GiB"
        if self.needed is None:
            held = f"a rank holds {lasting}, whatever it is fed"
            if self.weights_bytes is None:
                held = "what a rank holds whatever it is fed is not known of a model with an adapter"
            return [
                ("memory", f"{where}: {held}{device}"),
                ("would need", f"not predicted: {self.why_not}{hint}"),
            ]
        need, error_text = self.needed, ""
        if need.error is not None:
            error_text = f", at most {need.error:.1%} off on a third of them, held out"
        basis = f"by a fit to {pluralise(need.num_measured, 'measured pass')}{error_text}"
        return [
            ("memory", f"{where} would need {format_gibibytes(need.peak_bytes)} GiB {basis}{device}"),
            ("would need", f"by prediction, {describe_savings(need.savings)}{hint}"),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemoryAnalysis:
    """Tells from a run's records what a pass that ran out of memory would have needed, without a snapshot."""

    actor: ActorSpec
    measure: MeasureSpec
    world: World
    config: PretrainedConfig
    inputs: Sequence[Path]
    has_adapter: bool
    has_whole_logits: bool

    def describe_first_failure(self, records: Sequence[PassRecord], model: PreTrainedModel) -> OutOfMemory | None:
        """Return what is known of the first pass that ran out, given the records of one rank; None if none did."""
        failed = next((record for record in records if record.ran_out_of_memory), None)
        if failed is None:
            return None
        need = WHY_NOT_WITH_ADAPTER if self.has_adapter else self._predict_need(failed, records, model)
        held = {} if self.has_adapter else {kind: int(size) for kind, size in self._declared_bytes.items()}
        device = self.world.device
        return OutOfMemory(
            index=failed.index,
            rank=failed.rank,
            weights_bytes=held.get(HolderKind.WEIGHTS),
            gradients_bytes=held.get(HolderKind.GRADIENTS),
            optimizer_bytes=held.get(HolderKind.OPTIMIZER),
            device_bytes=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
            needed=need if isinstance(need, PredictedNeed) else None,
            why_not="" if isinstance(need, PredictedNeed) else need,
        )

    def _predict_need(
        self, failed: PassRecord, records: Sequence[PassRecord], model: PreTrainedModel
    ) -> PredictedNeed | str:
        """Return what is predicted, or why nothing can be.

        The peaks of passes of the same kind that finished are fitted to their rows and tokens, and the fit predicts the
        peak of the failed pass, in the phase that needs most. A prediction that does not grow with the tokens, or lies
        below a peak that was measured, is not worth telling. What grows is activations and logits; the rest is what the
        backend declares. From these holders comes what each option would save.
        """
        finished = {
            record.index: record
            for record in records
            if record.error is None and record.input.trains == failed.input.trains
        }
        if len(finished) < MIN_PASSES_TO_FIT:
            passes = pluralise(len(finished), "pass")
            return f"{passes} of its kind finished, and a fit of peaks to tokens takes {MIN_PASSES_TO_FIT}"
        indices = [*finished, failed.index]
        # The failed pass is read with the others, so that its rows and tokens are counted alike.
        shapes, _ = read_shapes([self.inputs[index] for index in indices], str(self.measure.loss))
        by_index = {indices[shape.number]: shape for shape in shapes}
        if failed.index not in by_index:
            return "its input cannot be read"
        failed_shape = by_index.pop(failed.index)
        chosen_shapes = choose_spread(
            [replace(shape, number=index) for index, shape in by_index.items()], MAX_PASSES_TO_READ
        )
        measured_passes = [_pair_with_cost(shape, finished[shape.number]) for shape in chosen_shapes]
        # A fit takes passes of the same phases.
        phases = measured_passes[-1].cost.peaks.keys()
        measured_passes = [measured for measured in measured_passes if measured.cost.peaks.keys() == phases]
        cost_model = CostModel.fit(measured_passes)
        predictor = cost_model.predictors[failed_shape.trains]
        peaks = predictor.predict(failed_shape).peaks
        phase = max(peaks, key=lambda name: peaks[name])
        peak = peaks[phase]
        fit = predictor.peaks[phase]
        growing = peak - max(fit.floor, fit.coefficients[0])
        if growing <= 0:
            return "the peaks of the measured passes do not grow with their tokens"
        if peak < max(measured.cost.peak_bytes for measured in measured_passes):
            return "passes that finished had a higher peak than is predicted of it"
        size = PassSize.measure(
            model,
            self.config,
            self.actor,
            failed_shape.count_fed_tokens(predictor.rows) // self.actor.parallel.ring,
            trains=failed.input.trains is not False,
        )
        return PredictedNeed(
            num_measured=len(measured_passes),
            peak_bytes=int(peak),
            error=None if cost_model.error is None else cost_model.error.most_of_peak,
            savings=predict_savings(self._estimate_holders(peak, growing, phase, size), self.actor, size),
        )

    def _estimate_holders(self, peak: float, growing: float, phase: str, size: PassSize) -> list[Holder]:
        held = dict(self._declared_bytes)
        if phase == "forward" and self.actor.resolved_grad_accumulation == 1:
            held[HolderKind.GRADIENTS] = 0.0
        lasting = peak - growing
        # Together they take no more than the fit leaves for what does not grow.
        for kind in held:
            held[kind] = min(held[kind], lasting)
            lasting -= held[kind]
        held[HolderKind.HEAD] = min(size.logits_bytes, growing) if self.has_whole_logits else 0.0
        held[HolderKind.ACTIVATIONS] = growing - held[HolderKind.HEAD]
        # What is left over is buffers, and on a CPU the process itself.
        held[HolderKind.PROCESS] = lasting
        return [Holder(kind=kind, name="", num_bytes=int(size), count=1) for kind, size in held.items()]

    @property
    def _declared_bytes(self) -> Mapping[HolderKind, float]:
        return compute_declared_bytes(self.config, self.actor, self.measure, self.world.num_data_ranks)


def _pair_with_cost(shape: InputShape, record: PassRecord) -> MeasuredPass:
    phases = record.cost.phases.items()
    cost = Cost(
        seconds={name: phase.seconds for name, phase in phases},
        peaks={name: float(phase.peak_allocated_bytes) for name, phase in phases},
    )
    return MeasuredPass(shape=shape, fed_tokens=record.input.fed_tokens, cost=cost)
