"""Run one pass through an open actor. Nothing else calls a backend's `forward`, `backward` or `end_window`.

    outcome = run_pass(backend, inputs, MeterClock(meter, world), observers)

A replay, its second run of a slow pass, the search for the first NaN, a profile, `diagnose` and `mismatch` all run
their passes here. What differs between them is in the inputs, the clock and the observers.

The order of collectives in a pass, which is the same on every rank: the ranks meet; those of the forward; those of
probes after it; the ranks meet; those of the backward; those of probes after it; those of the window's end.

Shape letters: B rows, A trailing tokens of a row that the action mask covers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from actor_init.attention.cudnn import refuse_holes
from actor_init.attention.kernel_choice import choose_kernel
from actor_init.attention.ring import make_ring_slice, may_zigzag
from actor_init.backends.protocol import Backend
from actor_init.declarations.attention import find_form
from actor_init.inputs.packing import ActorInputs, arrange, pad_to, prepare_inputs, slice_for_ring
from actor_init.model import ModelSource
from actor_init.spec import ActorSpec, PadTo
from actor_init.world import World
from capture.facts import Setting
from capture.file_format.micro_batch import CaptureError, MicroBatch
from capture.file_format.tensor_codec import RandomStates
from capture.record.rng_and_outputs import restore_random_states
from replay.runlog.records import CostSection
from replay.runner.meter import Meter
from replay.watch.progress import Phase

WAIT = "wait"


@dataclass(frozen=True, kw_only=True, slots=True)
class PassInputs:
    """A micro-batch laid out on the device, and what is done with it.

    fed          what the actor is given
    loss_of      the loss of the log-probs [B, A]
    trains       the model's train mode, instead of its eval mode
    autograd     the forward builds a graph
    backward     the loss is differentiated
    weight       factor on the loss in the backward
    ends_window  the accumulation window ends with this pass
    steps        with a step of the optimizer
    random       initial states of the random generators; empty: they are left as they are
    num_columns  of the captured rows
    reverses     rows are fed from the last to the first
    """

    fed: ActorInputs
    loss_of: Callable[[Tensor], Tensor]
    trains: bool
    autograd: bool
    backward: bool
    weight: float = 1.0
    ends_window: bool = False
    steps: bool = False
    random: RandomStates = field(default_factory=RandomStates)
    num_columns: int
    reverses: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PassOutcome:
    """What a pass computed, without its graph. `grad_norm` is that of its window, if it ended there."""

    log_probs_BA: Tensor
    loss: Tensor
    grad_norm: float | None
    cost: CostSection


class PassObserver:
    """Look at a pass without changing what it computes. Each method does nothing unless an observer has its own.

    Every rank has the same observers in the same order, since a probe may gather from all ranks. An observer keeps no
    tensor after `close`. `stops_clock_after` are the phases after which it makes the device work, or waits for it.
    """

    stops_clock_after: ClassVar[frozenset[Phase]] = frozenset()

    def begin(self, inputs: PassInputs) -> None:
        """Prepare for a pass, before the ranks meet."""

    def at(self, phase: Phase) -> None:
        """Hear that a phase begins. On the host alone: this is inside the clock."""

    def after_forward(self, log_probs_BA: Tensor, loss: Tensor) -> None:
        """Look at what the forward computed, with its graph."""

    def after_backward(self) -> None:
        """Look at gradients before the window's end clears them. Also called in a pass without a backward."""

    def before_step(self, loss: Tensor) -> None:
        """Look at a loss before the optimizer steps with its gradient."""

    def after_clock(self) -> None:
        """Read counters: all of the pass that is measured has ended."""

    def close(self, error: BaseException | None) -> None:
        """Let go of the pass, which raised `error` if it failed."""


class Clock(Protocol):
    """Measures a pass, or does not."""

    def meet(self) -> None: ...  # of all ranks, so that none begins before the others
    def start(self) -> None: ...
    def phase(self, name: str) -> AbstractContextManager[None]: ...
    def wait(self) -> None: ...  # for the slowest rank's forward, so that no later phase is charged for it
    def paused(self) -> AbstractContextManager[None]: ...
    def stop(self) -> CostSection: ...


@dataclass(frozen=True, slots=True)
class MeterClock:
    """Measures a pass of all ranks, which meet before it and after the forward."""

    meter: Meter
    world: World

    def meet(self) -> None:
        self.world.meet()

    def start(self) -> None:
        self.meter.start_pass()

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.meter.phase(name)

    def wait(self) -> None:
        if self.world.world_size > 1:
            with self.meter.phase(WAIT):
                self.world.meet()

    def paused(self) -> AbstractContextManager[None]:
        return self.meter.paused()

    def stop(self) -> CostSection:
        phases, seconds = self.meter.end_pass()
        wait = phases.pop(WAIT, None)
        return CostSection(phases=phases, seconds=seconds, wait_seconds=wait.seconds if wait else None)


class Untimed:
    """Measures nothing, and lets the ranks meet where the model makes them."""

    def meet(self) -> None:
        pass

    def start(self) -> None:
        pass

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self) -> None:
        pass

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stop(self) -> CostSection:
        return CostSection()


@dataclass(frozen=True, slots=True)
class Observers:
    """Tells the observers of a pass, in their order, how far it has come."""

    each: Sequence[PassObserver]
    clock: Clock

    @contextmanager
    def of(self, inputs: PassInputs) -> Iterator[None]:
        """Begin and close every observer, also if the pass fails."""
        error: BaseException | None = None
        for observer in self.each:
            observer.begin(inputs)
        try:
            yield
        except BaseException as reason:
            error = reason
            raise
        finally:
            for observer in self.each:
                observer.close(error)
            del error  # its frames hold the pass's tensors

    def at(self, phase: Phase) -> None:
        for observer in self.each:
            observer.at(phase)

    def after_forward(self, log_probs_BA: Tensor, loss: Tensor) -> None:
        self._look(Phase.FORWARD, lambda observer: observer.after_forward(log_probs_BA, loss))

    def after_backward(self) -> None:
        self._look(Phase.BACKWARD, lambda observer: observer.after_backward())

    def before_step(self, loss: Tensor) -> None:
        for observer in self.each:
            observer.before_step(loss)

    def after_clock(self) -> None:
        for observer in self.each:
            observer.after_clock()

    def _look(self, phase: Phase, look: Callable[[PassObserver], None]) -> None:
        """Let all observers look after a phase; first those that do not stop the clock, then the others."""
        probes = [observer for observer in self.each if phase in observer.stops_clock_after]
        for observer in self.each:
            if phase not in observer.stops_clock_after:
                look(observer)
        if probes:
            with self.clock.paused():
                for probe in probes:
                    look(probe)


def run_pass(
    backend: Backend, inputs: PassInputs, clock: Clock | None = None, observers: Sequence[PassObserver] = ()
) -> PassOutcome:
    """Run one pass: forward, and backward and the window's end where `inputs` ask for them.

    clock  None: the pass is not measured

    All ranks must call this. Raises what the model, the loss or an observer raises.
    """
    clock = clock or Untimed()
    told = Observers(observers, clock)
    grad_norm: float | None = None
    try:
        with told.of(inputs), torch.set_grad_enabled(inputs.autograd):
            clock.meet()
            if inputs.random:
                restore_random_states(inputs.random)
            told.at(Phase.FORWARD)
            clock.start()
            with clock.phase("forward"):
                log_probs_BA = backend.forward(inputs.fed, trains=inputs.trains)
                loss = inputs.loss_of(log_probs_BA)
            told.after_forward(log_probs_BA, loss)
            told.at(Phase.WAITING)
            clock.wait()
            if inputs.backward:
                told.at(Phase.BACKWARD)
                with clock.phase("backward"):
                    backend.backward(loss if inputs.weight == 1 else loss * inputs.weight)
            told.after_backward()
            if inputs.steps:
                told.before_step(loss)
                told.at(Phase.STEP)
                with clock.phase("step"):
                    grad_norm = backend.end_window(step=True)
            told.at(Phase.SETTLING)
            cost = clock.stop()
            told.after_clock()
            told.at(Phase.ENDING)
            # Without a step this reads the norm and clears the gradients, which training does not do: it is unmeasured.
            if inputs.ends_window and not inputs.steps:
                grad_norm = backend.end_window(step=False)
        return PassOutcome(log_probs_BA=log_probs_BA.detach(), loss=loss.detach(), grad_norm=grad_norm, cost=cost)
    finally:
        # Kept logits hold the pass's graph, and with it an actor that is to be closed if the pass failed.
        if inputs.fed.kept_logits is not None:
            inputs.fed.kept_logits.drop()


def inputs_for(batch: MicroBatch, spec: ActorSpec, source: ModelSource, world: World) -> ActorInputs:
    """Return `batch` on the device, laid out, padded and sliced as the source and the spec say.

    Raises CaptureError if it is not valid input for the model. All ranks must call this.
    """
    check_vocabulary(batch, source)
    layout = source.layout_under(spec)
    inputs = arrange(prepare_inputs(batch, packing=layout.joins), layout)
    if (
        inputs.attention_mask_BS is not None
        and not find_form(choose_kernel(spec, world.device, source.config)).allows_inner_padding
    ):
        refuse_holes(inputs.attention_mask_BS, str(batch.origin.source))
    if spec.pad_to is PadTo.LONGEST:
        inputs = pad_to(inputs, max(world.gather(inputs.input_ids.shape[1])))
    num_tokens = inputs.input_ids.shape[1]
    if (length := spec.find_padded_length(num_tokens)) is None:
        why = f": a row of {num_tokens} tokens is longer than each of {Setting('pad_tokens', spec.pad_tokens)}"
        raise CaptureError(batch.origin.source, why, f"Add a length of at least {num_tokens}")
    inputs = pad_to(inputs, length)
    if spec.parallel.sequence_parallel:  # a rank would count its own part of a row
        inputs = replace(inputs, makes_positions=False)
    if spec.parallel.ring > 1:
        assert inputs.cu_seq_lens is not None
        ring = make_ring_slice(
            inputs.cu_seq_lens,
            world.ring_group,
            head_stride=spec.parallel.ring_head_stride,
            may_zigzag=may_zigzag(source.config),
        )
        inputs = slice_for_ring(inputs, ring)
    return replace(inputs, head=source.head).to(world.device)


def check_vocabulary(batch: MicroBatch, source: ModelSource) -> None:
    """Raise CaptureError for token ids outside the model's vocabulary."""
    largest, size = int(batch.sequences_BS.max()), source.config.get_text_config().vocab_size
    if largest >= size:
        why = f": token id {largest} is beyond the model's vocabulary of {size}; these inputs belong to another model"
        raise CaptureError(batch.origin.source, why, f"Name it with {Setting('model')}")
