"""What a replay looks at in a pass besides running it: each is an observer of `run_pass`."""

import re
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actor_init.backends.protocol import Backend
from actor_init.compiling import count_graphs
from actor_init.declarations.attention import find_form
from actor_init.inputs.packing import ActorInputs
from actor_init.world import World
from capture.file_format.optimizer_step import Sample
from replay.objective.objective import gain
from replay.output.text import one_line
from replay.runlog import gradient_sketches
from replay.runlog.records import CompilationSection, PassRecord
from replay.runner.first_uses import FirstUses
from replay.runner.run_pass import PassInputs, PassObserver
from replay.tracing.writer import RunTrace
from replay.verdict.job_values import GradientSamples, gradient_samples
from replay.watch.progress import Phase, Tracker

if TYPE_CHECKING:
    from replay.profiling.memory import History

CODE_OF_GUARD = re.compile(r"\s+# .*")  # behind a guard: the line of code that made it, and the stack there


class PositionMarker(PassObserver):
    """Tells the watch which phase this rank is in."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def at(self, phase: Phase) -> None:
        self._tracker.at(phase)


class FirstUseCounter(PassObserver):
    """Counts what a pass does for the first time in its process: compilations, plans, kernels, libraries."""

    def __init__(self, device: torch.device, kernel: str) -> None:
        self.first_uses: list[str] = []
        self._counters = FirstUses(device)
        self._kernel = kernel

    def begin(self, inputs: PassInputs) -> None:
        self._counters.begin(self._cudnn_calls(inputs.fed, backward=inputs.backward))

    def after_clock(self) -> None:
        self.first_uses = self._counters.end()

    def _cudnn_calls(self, fed: ActorInputs, *, backward: bool) -> set[Hashable]:
        """Return what tells the calls of cuDNN's attention in a pass from each other."""
        planned = find_form(self._kernel).plan_calls
        if planned is None:
            return set()
        lengths = [] if fed.cu_seq_lens is None else fed.cu_seq_lens.diff().tolist()
        rows, num_tokens = fed.input_ids.shape
        return {(*call, backward) for call in planned(rows, num_tokens, lengths)}


class CompilationCounter(PassObserver):
    """Counts the graphs that torch.compile makes for a pass, also behind its clock, and its time inside the clock."""

    def __init__(self) -> None:
        self.section = CompilationSection()
        self._num_graphs_before = 0

    def begin(self, inputs: PassInputs) -> None:
        self._num_graphs_before = count_graphs()
        forget_compilations()

    def after_clock(self) -> None:
        self.section = read_compilations()

    def close(self, error: BaseException | None) -> None:
        self.section = replace(self.section, new_graphs=count_graphs() - self._num_graphs_before)


def forget_compilations() -> None:
    """Have dynamo's own metrics begin anew."""
    if (utils := sys.modules.get("torch._dynamo.utils")) is not None:
        utils.clear_compilation_metrics()


def read_compilations() -> CompilationSection:
    """Return what was compiled since: the seconds, and the function and the guard of each graph made again.

    A guard reads `forward: 0/0: tensor 'hidden_states' size mismatch at index 1. expected 5`. Dynamo keeps the last 64
    graphs; a pass that compiles more has more seconds than are returned.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    metrics = [] if utils is None else utils.get_compilation_metrics()
    seconds = sum(metric.duration_us or 0 for metric in metrics) / 1e6
    # torch 2.6 does not say the reason
    named = [(metric.co_name, getattr(metric, "recompile_reason", None)) for metric in metrics]
    reasons = [f"{name}: {CODE_OF_GUARD.sub('', one_line(reason))}" for name, reason in named if reason]
    return CompilationSection(compile_seconds=seconds, recompilations=reasons)


class TraceObserver(PassObserver):
    """Keeps sketches of what each layer computed. A traced pass is no measurement, so the clock runs on."""

    def __init__(self, trace: RunTrace) -> None:
        self._trace = trace
        self._ends_window = False

    def begin(self, inputs: PassInputs) -> None:
        self._ends_window = inputs.ends_window
        self._trace.begin(inputs.fed)

    def after_forward(self, log_probs_BA: Tensor, loss: Tensor) -> None:
        self._trace.end_forward(log_probs_BA)

    def after_backward(self) -> None:
        if self._ends_window:
            self._trace.end_window()


class GainProbe(PassObserver):
    """Measures how far the loss moves with the log-probs, for the verdict's bound on it."""

    stops_clock_after: ClassVar[frozenset[Phase]] = frozenset({Phase.FORWARD})

    def __init__(self) -> None:
        self.gain = 1.0

    def after_forward(self, log_probs_BA: Tensor, loss: Tensor) -> None:
        self.gain = gain(loss, log_probs_BA)


class GradientProbe(PassObserver):
    """Takes the samples of a window's gradient that the job recorded. Gathers each gradient."""

    stops_clock_after: ClassVar[frozenset[Phase]] = frozenset({Phase.BACKWARD})

    def __init__(self, backend: Backend, wanted: Mapping[str, Sequence[Sample]]) -> None:
        self.samples: GradientSamples | None = None
        self._backend = backend
        self._wanted = wanted

    def after_backward(self) -> None:
        self.samples = gradient_samples(self._backend.gradients(), self._wanted)


class SketchProbe(PassObserver):
    """Writes a sketch of each gradient of a window, for `compare`. Gathers each gradient."""

    stops_clock_after: ClassVar[frozenset[Phase]] = frozenset({Phase.BACKWARD})

    def __init__(self, backend: Backend, folder: Path, index: int, world: World) -> None:
        self._backend = backend
        self._folder = folder
        self._index = index
        self._world = world

    def after_backward(self) -> None:
        gradient_sketches.keep(self._folder, self._index, self._backend.gradients(), self._world)


class LossCheck(PassObserver):
    """Looks for the first tensor that is not finite before a step hides it, if a rank's loss is not finite.

    is_wanted  tells from a loss whether to look; the same on every rank
    search     returns what this rank found; None if only other ranks found one
    """

    def __init__(self, is_wanted: Callable[[Tensor], bool], search: Callable[[PassInputs], str | None]) -> None:
        self.first_non_finite: str | None = None
        self._is_wanted = is_wanted
        self._search = search
        self._inputs: PassInputs | None = None

    def begin(self, inputs: PassInputs) -> None:
        self._inputs = inputs

    def before_step(self, loss: Tensor) -> None:
        assert self._inputs is not None
        if self._is_wanted(loss):
            self.first_non_finite = self._search(self._inputs)

    def close(self, error: BaseException | None) -> None:
        self._inputs = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PassObservers:
    """What a run looks at in one pass; None: not in this one."""

    first_uses: FirstUseCounter
    compilation: CompilationCounter
    trace: TraceObserver | None
    position: PositionMarker
    gain: GainProbe | None
    gradient: GradientProbe | None
    sketch: SketchProbe | None
    check: LossCheck | None

    @property
    def each(self) -> list[PassObserver]:
        """Those of this pass. Their order is that of their collectives, and the same on every rank."""
        counters = (self.first_uses, self.compilation)
        ordered = (*counters, self.trace, self.position, self.gain, self.gradient, self.sketch, self.check)
        return [observer for observer in ordered if observer is not None]

    def add_to(self, record: PassRecord) -> PassRecord:
        """Return the record of the pass with what they have seen. They are closed."""
        return replace(
            record,
            compilation=self.compilation.section,
            first_uses=self.first_uses.first_uses,
            first_non_finite=self.check.first_non_finite if self.check is not None else None,
        )


class HistoryMarker(PassObserver):
    """Marks the borders of a pass in the history of its allocations."""

    def __init__(self, history: "History", model: PreTrainedModel) -> None:
        self._history = history
        self._model = model

    def at(self, phase: Phase) -> None:
        if phase is Phase.WAITING:
            self._history.forward_ended()
        elif phase is Phase.SETTLING:
            self._history.phases_ended()

    def after_backward(self) -> None:
        self._history.backward_ended(self._model)
