"""What a replay looks at in a pass besides running it: each is an observer of `run_pass`."""

import re
import sys
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actor_init.backends.protocol import Backend
from actor_init.compiling import count_graphs
from actor_init.declarations.attention import find_attention_form
from actor_init.inputs.packing import ActorInputs
from actor_init.model import ModelSource
from actor_init.world import World
from capture.file_format.gradient_signature import GradientSignature
from capture.file_format.optimizer_state import StateSample
from capture.file_format.optimizer_step import Sample
from replay.objective.objective import WEIGHTS_IN_MEAN, measure_log_prob_weights
from replay.output.text import join_lines
from replay.runlog import gradient_sketches
from replay.runlog.records import CompilationSection, PassRecord
from replay.runner.first_uses import FirstUses
from replay.runner.run_pass import PassInputs, PassObserver, WindowEnd
from replay.tracing.writer import TraceWriter
from replay.verdict.gradient_samples import GradientSamples, sample_gradients
from replay.verdict.state_samples import StateElements, sample_states
from replay.watch.progress import RankPhase, Tracker

if TYPE_CHECKING:
    from replay.profiling.peak_holders import AllocationHistory

# Dynamo writes, after a guard, the line of code that made it and the stack there.
GUARD_ORIGIN = re.compile(r"\s+# .*")


class PhaseReporter(PassObserver):
    """Tells the watch which phase this rank is in."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def before_phase(self, phase: RankPhase) -> None:
        self._tracker.enter_phase(phase)


class FirstUseObserver(PassObserver):
    """Notices what a pass does for the first time in its process: compilations, plans, kernels, libraries."""

    def __init__(self, device: torch.device, kernel: str) -> None:
        self.first_uses: list[str] = []
        self._counters = FirstUses(device)
        self._kernel = kernel

    def before_pass(self, inputs: PassInputs) -> None:
        self._counters.begin(self._list_cudnn_calls(inputs.actor_inputs, runs_backward=inputs.runs_backward))

    def after_measurement(self) -> None:
        self.first_uses = self._counters.end()

    def _list_cudnn_calls(self, actor_inputs: ActorInputs, *, runs_backward: bool) -> set[Hashable]:
        """Return a key for each kind of call of cuDNN's attention in a pass: cuDNN makes a plan for each."""
        plan_calls = find_attention_form(self._kernel).plan_calls
        if plan_calls is None:
            return set()
        lengths = [] if actor_inputs.cu_seq_lens is None else actor_inputs.cu_seq_lens.diff().tolist()
        rows, num_tokens = actor_inputs.input_ids.shape
        return {(*call, runs_backward) for call in plan_calls(rows, num_tokens, lengths)}


class CompilationCounter(PassObserver):
    """Counts the graphs that torch.compile makes in a whole pass, and its seconds for them until the clock stops."""

    def __init__(self) -> None:
        self.section = CompilationSection()
        self._num_graphs_before = 0

    def before_pass(self, inputs: PassInputs) -> None:
        self._num_graphs_before = count_graphs()
        reset_compilations()

    def after_measurement(self) -> None:
        self.section = read_compilations()

    def close(self, error: BaseException | None) -> None:
        self.section = replace(self.section, new_graphs=count_graphs() - self._num_graphs_before)


def reset_compilations() -> None:
    """Clear dynamo's own metrics."""
    if (utils := sys.modules.get("torch._dynamo.utils")) is not None:
        utils.clear_compilation_metrics()


def read_compilations() -> CompilationSection:
    """Return what was compiled since the reset: the seconds, and function and guard of each graph that was made again.

    A guard reads `forward: 0/0: tensor 'hidden_states' size mismatch at index 1. expected 5`. Dynamo keeps the last 64
    graphs; a pass that compiles more has more seconds than are returned.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    return describe_compilations([] if utils is None else utils.get_compilation_metrics())


def describe_compilations(metrics: Collection[Any]) -> CompilationSection:
    """Return the seconds and the failed guards of graphs, of which these are dynamo's metrics."""
    seconds = sum(metric.duration_us or 0 for metric in metrics) / 1e6
    # The metrics of torch 2.6 have no reason.
    reason_by_name = [(metric.co_name, getattr(metric, "recompile_reason", None)) for metric in metrics]
    reasons = [f"{name}: {GUARD_ORIGIN.sub('', join_lines(reason))}" for name, reason in reason_by_name if reason]
    return CompilationSection(compile_seconds=seconds, recompilations=reasons)


class TraceObserver(PassObserver):
    """Keeps sketches of what each layer computed. A traced pass is no measurement, so the clock runs on."""

    def __init__(self, trace: TraceWriter) -> None:
        self._trace = trace
        self._ends_complete_window = False

    def before_pass(self, inputs: PassInputs) -> None:
        self._ends_complete_window = inputs.window_end is WindowEnd.COMPLETE
        self._trace.begin_pass(inputs.actor_inputs, inputs.window_factor)

    def after_forward(self, log_probs_BA: Tensor, loss: Tensor) -> None:
        self._trace.end_forward(log_probs_BA)

    def after_backward(self) -> None:
        if self._ends_complete_window:
            self._trace.end_window()


class LogProbWeightMeter(PassObserver):
    """Measures what the log-probs weigh in the loss."""

    pauses_clock_after: ClassVar[frozenset[RankPhase]] = frozenset({RankPhase.FORWARD})

    def __init__(self) -> None:
        self.log_prob_weights = WEIGHTS_IN_MEAN

    def after_forward(self, log_probs_BA: Tensor, loss: Tensor) -> None:
        self.log_prob_weights = measure_log_prob_weights(loss, log_probs_BA)


class GradientSampler(PassObserver):
    """Takes of a window's gradient the elements that the job recorded of its own. Gathers each gradient."""

    pauses_clock_after: ClassVar[frozenset[RankPhase]] = frozenset({RankPhase.BACKWARD})

    def __init__(
        self,
        backend: Backend,
        recorded_samples: Mapping[str, Sequence[Sample]],
        recorded_signatures: Mapping[str, Sequence[GradientSignature]],
    ) -> None:
        self.samples: GradientSamples | None = None
        self._backend = backend
        self._recorded_samples = recorded_samples
        self._recorded_signatures = recorded_signatures

    def after_backward(self) -> None:
        self.samples = sample_gradients(self._backend.gradients(), self._recorded_samples, self._recorded_signatures)


class OptimizerStateSampler(PassObserver):
    """Takes of the optimizer's state the elements that the job recorded before the step that ends this window.

    Each rank of the job may have recorded other parameters. Each state is gathered, so the ranks first agree on which.

    samples  empty where the replay's optimizer holds no state yet, or no rank of the job recorded any
    """

    pauses_clock_after: ClassVar[frozenset[RankPhase]] = frozenset({RankPhase.BACKWARD})

    def __init__(self, backend: Backend, world: World, recorded: Mapping[str, StateSample]) -> None:
        self.samples: StateElements = {}
        self._backend = backend
        self._world = world
        self._recorded = recorded

    @classmethod
    def choose(
        cls,
        backend: Backend,
        source: ModelSource,
        world: World,
        inputs: PassInputs,
        recorded: Mapping[str, StateSample],
    ) -> Self | None:
        """Return what looks at the state, if there is one before this window's end. The same on every rank."""
        has_state = source.optimizer_state is not None or backend.progress().num_steps > 0
        return cls(backend, world, recorded) if has_state and inputs.window_end is WindowEnd.COMPLETE else None

    def after_backward(self) -> None:
        names = {name for rank_names in self._world.gather(sorted(self._recorded)) for name in rank_names}
        if names:
            self.samples = sample_states(self._backend.optimizer_states(names), self._recorded)


class GradientSketcher(PassObserver):
    """Writes a sketch of each gradient of a window, for `compare`. Gathers each gradient."""

    pauses_clock_after: ClassVar[frozenset[RankPhase]] = frozenset({RankPhase.BACKWARD})

    def __init__(self, backend: Backend, folder: Path, index: int, world: World) -> None:
        self._backend = backend
        self._folder = folder
        self._index = index
        self._world = world

    def after_backward(self) -> None:
        gradient_sketches.write(self._folder, self._index, self._backend.gradients(), self._world)


class LossCheck(PassObserver):
    """Looks for the first tensor that is not finite before a step hides it, if a rank's loss is not finite.

    is_needed  tells from a loss whether to look; the same on every rank
    search     names the tensor on this rank; None if only other ranks have one
    """

    pauses_clock_after: ClassVar[frozenset[RankPhase]] = frozenset({RankPhase.BACKWARD})

    def __init__(self, is_needed: Callable[[Tensor], bool], search: Callable[[PassInputs], str | None]) -> None:
        self.first_non_finite: str | None = None
        self._is_needed = is_needed
        self._search = search
        self._inputs: PassInputs | None = None

    def before_pass(self, inputs: PassInputs) -> None:
        self._inputs = inputs

    def before_step(self, loss: Tensor) -> None:
        assert self._inputs is not None
        if self._is_needed(loss):
            self.first_non_finite = self._search(self._inputs)

    def close(self, error: BaseException | None) -> None:
        self._inputs = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunObservers:
    """The observers that a run has for one pass; None: not in this pass."""

    first_uses: FirstUseObserver
    compilation: CompilationCounter
    trace: TraceObserver | None
    phase: PhaseReporter
    log_prob_weight_meter: LogProbWeightMeter | None
    gradient: GradientSampler | None
    sketch: GradientSketcher | None
    loss_check: LossCheck | None

    @property
    def in_order(self) -> list[PassObserver]:
        """The observers of this pass. Their order is that of their collectives, and the same on every rank."""
        observers = (
            self.first_uses,
            self.compilation,
            self.trace,
            self.phase,
            self.log_prob_weight_meter,
            self.gradient,
            self.sketch,
            self.loss_check,
        )
        return [observer for observer in observers if observer is not None]

    def add_to(self, record: PassRecord) -> PassRecord:
        """Return the record of the pass with what its observers have seen. Call it after they were closed."""
        return replace(
            record,
            compilation=self.compilation.section,
            first_uses=self.first_uses.first_uses,
            first_non_finite=self.loss_check.first_non_finite if self.loss_check is not None else None,
        )


class AllocationHistoryMarker(PassObserver):
    """Marks the borders of a pass in the history of its allocations."""

    def __init__(self, history: "AllocationHistory", model: PreTrainedModel) -> None:
        self._history = history
        self._model = model

    def before_phase(self, phase: RankPhase) -> None:
        if phase is RankPhase.WAITING_FOR_RANKS:
            self._history.note_forward_end()
        elif phase is RankPhase.DEVICE_SYNC:
            self._history.note_phases_end()

    def after_backward(self) -> None:
        self._history.note_gradients(self._model)
