"""Say, of a pass that ran out of memory, what it would have needed, and which options would have needed less.

The passes that were measured tell: a fit of their peaks to their rows and tokens (`replay/profiling/prediction.py`)
predicts the peak of the one that failed. What of it grows with the tokens is held by activations, and by whole logits
where there are some; of the rest the backend declares weights, gradients and the optimizer's. `--memory-snapshot` shows
what was held when memory ran out, which is less than the pass would have needed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from actor_init.declarations.backends import find_declaration
from actor_init.declarations.backends.declaration import BytesPerParameter
from actor_init.model import count_parameters
from actor_init.spec import ActorSpec
from actor_init.world import World
from replay.options.spec import MeasureSpec
from replay.output.text import Pairs, counted, gibibytes
from replay.profiling.memory_advice import PassSize, savings
from replay.profiling.prediction import Cost, Measured, Model, Shape, read_shapes, spread
from replay.profiling.shares import Holder, HolderKind, Saving
from replay.profiling.text import saved
from replay.runlog.records import PassRecord

LEAST = 3  # passes that a fit of a peak to tokens takes
MOST = 24  # passes whose inputs are read for it
NO_PARTS = "of a model with an adapter no backend declares what its parts take"
SNAPSHOT = ". --memory-snapshot runs the pass once more and says what held its memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """What a pass would have needed by a fit, in bytes, and what it would need with other options."""

    num_measured: int
    peak_bytes: int
    error: float | None  # the most that such a fit was off on passes held out of it; None: too few to hold any out
    savings: Sequence[Saving]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """The first pass that ran out of memory on one rank, in bytes."""

    index: int
    rank: int
    weights_bytes: int | None  # that a rank holds whatever it is fed, as the backend declares it; None with an adapter
    gradients_bytes: int | None
    optimizer_bytes: int | None
    device_bytes: int | None  # of all memory; None on a CPU
    needed: Needed | None
    why_not: str = ""  # why nothing is predicted

    def lines(self, *, has_snapshot: bool) -> Pairs:
        hint = "" if has_snapshot else SNAPSHOT
        where = f"pass {self.index + 1}, rank {self.rank}"
        lasting = ", ".join(
            f"{gibibytes(size)} GiB of {name}"
            for name, size in (
                ("weights", self.weights_bytes),
                ("gradients", self.gradients_bytes),
                ("optimizer and masters", self.optimizer_bytes),
            )
        )
        device = "" if self.device_bytes is None else f"; the device has {gibibytes(self.device_bytes)} GiB"
        if self.needed is None:
            held = f"a rank holds {lasting}, whatever it is fed"
            if self.weights_bytes is None:
                held = "what a rank holds whatever it is fed is not known of a model with an adapter"
            return [
                ("memory", f"{where}: {held}{device}"),
                ("would need", f"not predicted: {self.why_not}{hint}"),
            ]
        needed, off = self.needed, ""
        if needed.error is not None:
            off = f", at most {needed.error:.1%} off on a third of them, held out"
        by = f"by a fit to {counted(needed.num_measured, 'measured pass')}{off}"
        return [
            ("memory", f"{where} would need {gibibytes(needed.peak_bytes)} GiB {by}{device}"),
            ("would need", f"by prediction, {saved(needed.savings)}{hint}"),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What is known of a run without a snapshot."""

    actor: ActorSpec
    measure: MeasureSpec
    world: World
    config: PretrainedConfig
    inputs: Sequence[Path]
    has_adapter: bool
    has_whole_logits: bool

    def of(self, records: Sequence[PassRecord], model: PreTrainedModel) -> OutOfMemory | None:
        """Return what is known of the first pass that ran out, given the records of one rank; None if none did."""
        failed = next((record for record in records if record.ran_out_of_memory), None)
        if failed is None:
            return None
        needed = NO_PARTS if self.has_adapter else self._needed(failed, records, model)
        held = {} if self.has_adapter else {kind: int(size) for kind, size in self._held_bytes().items()}
        device = self.world.device
        return OutOfMemory(
            index=failed.index,
            rank=failed.rank,
            weights_bytes=held.get(HolderKind.WEIGHTS),
            gradients_bytes=held.get(HolderKind.GRADIENTS),
            optimizer_bytes=held.get(HolderKind.OPTIMIZER),
            device_bytes=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
            needed=needed if isinstance(needed, Needed) else None,
            why_not="" if isinstance(needed, Needed) else needed,
        )

    def _needed(self, failed: PassRecord, records: Sequence[PassRecord], model: PreTrainedModel) -> Needed | str:
        """Return what is predicted, or why nothing can be."""
        finished = {
            record.index: record
            for record in records
            if record.error is None and record.input.trains == failed.input.trains
        }
        if len(finished) < LEAST:
            passes = counted(len(finished), "pass")
            return f"{passes} of its kind finished, and a fit of peaks to tokens takes {LEAST}"
        indices = [*finished, failed.index]
        shapes, _ = read_shapes([self.inputs[index] for index in indices], str(self.measure.loss))
        by_index = {indices[shape.number]: shape for shape in shapes}
        if failed.index not in by_index:
            return "its input cannot be read"
        shape = by_index.pop(failed.index)
        chosen = spread([_numbered(one, index) for index, one in by_index.items()], MOST)
        measured = [_measured(one, finished[one.number]) for one in chosen]
        measured = [one for one in measured if one.cost.peaks.keys() == measured[-1].cost.peaks.keys()]
        fitted = Model.of(measured)
        predictor = fitted.predictors[shape.trains]  # all are of its kind
        peaks = predictor.cost(shape).peaks
        phase = max(peaks, key=lambda name: peaks[name])
        peak = peaks[phase]
        fit = predictor.peaks[phase]
        growing = peak - max(fit.floor, fit.coefficients[0])
        if growing <= 0:
            return "the peaks of the measured passes do not grow with their tokens"
        if peak < max(one.cost.peak_bytes for one in measured):
            return "passes that finished had a higher peak than is predicted of it"
        size = PassSize.of(
            model,
            self.config,
            self.actor,
            shape.fed_tokens(predictor.rows) // self.actor.parallel.ring,
            trains=failed.input.trains is not False,
        )
        return Needed(
            num_measured=len(measured),
            peak_bytes=int(peak),
            error=None if fitted.error is None else fitted.error.most_of_peak,
            savings=savings(self._holders(peak, growing, phase, size), self.actor, size),
        )

    def _holders(self, peak: float, growing: float, phase: str, size: PassSize) -> list[Holder]:
        held = dict(self._held_bytes())
        if phase == "forward" and self.actor.num_accumulated == 1:
            held[HolderKind.GRADIENTS] = 0.0
        lasting = peak - growing
        for kind in held:  # no more than the fit says that there is
            held[kind] = min(held[kind], lasting)
            lasting -= held[kind]
        held[HolderKind.HEAD] = min(size.logits_bytes, growing) if self.has_whole_logits else 0.0
        held[HolderKind.ACTIVATIONS] = growing - held[HolderKind.HEAD]
        held[HolderKind.PROCESS] = lasting  # buffers, and on a CPU the process
        return [Holder(kind=kind, name="", num_bytes=int(size), count=1) for kind, size in held.items()]

    def _held_bytes(self) -> Mapping[HolderKind, float]:
        """Return what a rank holds whatever it is fed, as the backend declares it."""
        actor = self.actor
        holding = find_declaration(actor.backend).predict_memory(actor, self.measure.step)
        share = 1 - 1 / self.world.num_data_ranks
        number = count_parameters(self.config) / actor.parallel.tp
        backward = self.measure.backward

        def of(part: Callable[[BytesPerParameter], float]) -> float:
            return number * (part(holding.total) - share * part(holding.partitioned))

        weights, masters = of(lambda held: held.weights), of(lambda held: held.masters)
        return {
            HolderKind.WEIGHTS: weights or masters,  # the model may compute with casts of its masters
            HolderKind.OPTIMIZER: of(lambda held: held.moments) + (masters if weights else 0.0),
            HolderKind.GRADIENTS: of(lambda held: held.gradients) if backward else 0.0,
        }


def _numbered(shape: Shape, number: int) -> Shape:
    return replace(shape, number=number)


def _measured(shape: Shape, record: PassRecord) -> Measured:
    phases = record.cost.phases.items()
    cost = Cost(
        seconds={name: one.seconds for name, one in phases},
        peaks={name: float(one.peak_allocated_bytes) for name, one in phases},
    )
    return Measured(shape=shape, fed_tokens=record.input.fed_tokens, cost=cost)
