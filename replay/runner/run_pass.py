"""Run one pass through an open actor, the model under a backend.

No other code of replay/ calls a backend's `forward`, `backward` or `end_window`.

    outcome = run_pass(backend, inputs, MeterClock(meter, world), observers)

A replay, its second run of a slow pass, the search for the first NaN, a profile, the runs with which a verdict tries
out suspected causes, `diagnose` and `mismatch` all run their passes here. They differ in the inputs, the clock and the
observers.

Collectives have the same order on every rank: the wait for all ranks (only with a clock); the forward; the observers
after the forward; the wait for the slowest rank (only with a clock); the backward; the observers after the backward;
the observers before a measured step; the end of the window.

Shape letters: B rows, S tokens a row, A columns of the action mask (the last tokens of each row).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from actor_init.attention.cudnn import refuse_padding_between_tokens
from actor_init.attention.kernel_choice import choose_kernel_name
from actor_init.attention.ring_split import compute_ring_indices, may_zigzag
from actor_init.backends.protocol import Backend
from actor_init.declarations.attention import find_attention_form
from actor_init.inputs.packing import ActorInputs, apply_layout, pad_to, prepare_inputs, slice_for_ring
from actor_init.model import ModelSource
from actor_init.routes import PassRoutes, RouterFlips, RouterState, collect_flips, steer_routers
from actor_init.schedule_and_norm import StepSettings
from actor_init.spec import ActorSpec, PadTo
from actor_init.world import World
from capture.facts import Setting
from capture.file_format.micro_batch import CaptureError, MicroBatch
from capture.file_format.tensor_codec import RandomStates
from capture.record.random_states import restore_random_states
from replay.objective.router_loss import RouterLossTerm
from replay.runlog.records import CostSection
from replay.runner.meter import Meter
from replay.watch.progress import RankPhase

# The phase of waiting for the slowest rank. It is not among a record's `phases`: `MeterClock.stop` turns it into
# `wait_seconds`.
WAIT_PHASE = "wait"


class WindowEnd(Enum):
    """Whether an accumulation window ends with a pass, and whether this window is complete.

    A window is the passes, of all data ranks, whose gradients are accumulated for one optimizer step. It is incomplete
    if one of its passes failed, or is not among the inputs; a window that the job itself made shorter is complete. The
    job never had the gradient of an incomplete window, so this gradient is cleared without a step, and its norm is not
    kept.
    """

    NONE = auto()
    COMPLETE = auto()
    INCOMPLETE = auto()


class StepTiming(Enum):
    """Whether the optimizer steps at the end of a complete window, and whether the clock runs then.

    NONE        no step
    MEASURED    --step was typed, or a command trains the model: the step is part of the pass, and the clock, if there
                is one, runs
    UNMEASURED  --step was not typed: the optimizer steps because the job's did, after the clock has stopped
    """

    NONE = auto()
    MEASURED = auto()
    UNMEASURED = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class PassInputs:
    """A micro-batch laid out on the device, and what a pass does with it.

    actor_inputs         token ids, masks and positions, as the actor's forward takes them
    compute_loss         computes the loss from log-probs [B, A]
    train_mode           the forward runs in the model's train mode; otherwise in its eval mode
    builds_graph         the forward builds an autograd graph
    runs_backward        the pass differentiates the loss
    loss_weight          the factor on the loss in the backward
    window_factor        a further factor on the loss: `grad_accumulation` divided by the number of passes that a data
                         rank has in this window. The backend itself always divides by `grad_accumulation`
    window_end           whether an accumulation window ends with this pass, and whether it is complete
    frozen               names of parameters that the job trained in other windows, but not in this one. The backward
                         computes their gradients too. These are dropped after the last backward of a complete window
    step_timing          whether the optimizer steps, and when; NONE unless a complete window ends
    step_settings        settings of the optimizer in this step; None: those of the spec
    random_states        what the random generators are set to before the forward; empty: they are left as they are
    captured_row_length  tokens in a row of the capture, including padding
    has_reversed_rows    the rows are in the reverse of the capture's order
    routes               whether the routers of a mixture of experts choose the job's experts, or their own choice is
                         only compared with the job's; and which routers keep their logits; None: nothing of this
    router_loss_term     computes the routers' auxiliary (load-balancing) loss from the logits of the routers that are
                         keys of `routes.logits_index`. It is added to the pass's loss as the job added it to its own;
                         None: no such loss is added
    """

    actor_inputs: ActorInputs
    compute_loss: Callable[[Tensor], Tensor]
    train_mode: bool
    builds_graph: bool
    runs_backward: bool
    loss_weight: float = 1.0
    window_factor: float = 1.0
    window_end: WindowEnd = WindowEnd.NONE
    frozen: frozenset[str] = frozenset()
    step_timing: StepTiming = StepTiming.NONE
    step_settings: StepSettings | None = None
    random_states: RandomStates = field(default_factory=RandomStates)
    captured_row_length: int
    has_reversed_rows: bool = False
    routes: PassRoutes | None = None
    router_loss_term: RouterLossTerm | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PassOutcome:
    """What a pass computed, without its graph.

    loss          includes the routers' auxiliary loss, but not the factors `loss_weight` and `window_factor`
    grad_norm     the gradient norm of the window; None: no complete window ends with this pass
    router_flips  how the choice of each router here differs from the job's; empty: no router was compared
    router_loss   the part of `loss` that comes from the routers: 0 if `router_loss_factor` is 0 or nan; None: the pass
                  has no `router_loss_term`
    router_loss_factor  the factor on the routers' loss in the loss that the job's training loop called backward on. The
                  loss that the loop gave to `recorder.note` tells it.
                  0: the loop did not add the routers' loss
                  1: the loop added the routers' loss undivided
                  another number: the loop added the routers' loss, and then divided the sum: by 4 if the factor is 1/4
                  nan: unknown, as when the loop gave no loss to `recorder.note`
                  None: the pass has no `router_loss_term`, or the job's model itself added the routers' loss
                  There is a factor only under `--loss recorded`: the replay then weighs log-probs by the gradient of
                  the logits that the job recorded. This gradient already includes the division. The routers' loss is
                  computed anew, so it is multiplied by this factor
    """

    log_probs_BA: Tensor
    loss: Tensor
    grad_norm: float | None
    cost: CostSection
    router_flips: Sequence[RouterFlips] = ()
    router_loss: Tensor | None = None
    router_loss_factor: Tensor | None = None


class PassObserver:
    """Look at a pass without changing what it computes. Each method does nothing unless an observer overrides it.

    Every rank has the same observers in the same order, since an observer may gather from all ranks. An observer keeps
    nothing of the graph after `close`. After the phases in `pauses_clock_after`, the clock pauses while this observer
    looks, because it makes the device work, or waits for the device. If BACKWARD is among these phases, the clock
    pauses in `before_step` too.
    """

    pauses_clock_after: ClassVar[frozenset[RankPhase]] = frozenset()

    def before_pass(self, inputs: PassInputs) -> None:
        """Prepare for a pass, before the ranks wait for each other."""

    def before_phase(self, phase: RankPhase) -> None:
        """Prepare for a phase that begins. The clock may be running, so this must not wait for the device."""

    def after_forward(self, log_probs_BA: Tensor, loss: Tensor) -> None:
        """Look at what the forward computed, with its graph."""

    def after_backward(self) -> None:
        """Look at gradients before the window's end clears them. Also called in a pass without a backward."""

    def before_step(self, loss: Tensor) -> None:
        """Look at a loss before the optimizer steps with its gradient. Called only in a pass with a measured step."""

    def after_measurement(self) -> None:
        """Read counters: the measured part of the pass has ended."""

    def close(self, error: BaseException | None) -> None:
        """Release what belongs to the pass. Also called if the pass failed before its forward.

        error  what the pass raised; None: it succeeded
        """


class Clock(Protocol):
    """Measures this rank's part of a pass. `NullClock` neither measures nor waits for other ranks."""

    def wait_for_all_ranks(self) -> None:
        """Wait, in the device's stream, until every rank has called this, so that all begin the pass together."""

    def start(self) -> None:
        """Begin to measure the pass."""

    def measure(self, name: str) -> AbstractContextManager[None]:
        """Measure the time inside the block as the phase `name`."""

    def wait_for_slowest_rank(self) -> None:
        """Wait, in the device's stream, until every rank has ended its forward.

        `stop` returns the time of the wait apart from that of the forward and the backward.
        """

    def pause(self) -> AbstractContextManager[None]:
        """Leave the time in the block out of the seconds of the whole pass. Call it between two phases."""

    def stop(self) -> CostSection:
        """Wait for the device, and return what the pass has cost."""


@dataclass(frozen=True, slots=True)
class MeterClock:
    """Measures this rank's part with `meter`. The ranks wait for each other before the pass and after the forward."""

    meter: Meter
    world: World

    def wait_for_all_ranks(self) -> None:
        self.world.barrier()

    def start(self) -> None:
        self.meter.start_pass()

    def measure(self, name: str) -> AbstractContextManager[None]:
        return self.meter.measure(name)

    def wait_for_slowest_rank(self) -> None:
        if self.world.world_size > 1:
            with self.meter.measure(WAIT_PHASE):
                self.world.barrier()

    def pause(self) -> AbstractContextManager[None]:
        return self.meter.pause()

    def stop(self) -> CostSection:
        phases, seconds = self.meter.end_pass()
        wait = phases.pop(WAIT_PHASE, None)
        return CostSection(phases=phases, seconds=seconds, wait_seconds=wait.seconds if wait else None)


class NullClock:
    """Measures nothing. The ranks wait for each other only in the collectives of the model and the observers."""

    def wait_for_all_ranks(self) -> None:
        pass

    def start(self) -> None:
        pass

    def measure(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def wait_for_slowest_rank(self) -> None:
        pass

    def pause(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stop(self) -> CostSection:
        return CostSection()


@dataclass(frozen=True, slots=True)
class ObserverNotifier:
    """Tells the observers of a pass, one after another, how far the pass has come."""

    observers: Sequence[PassObserver]
    clock: Clock

    @contextmanager
    def open_observers(self, inputs: PassInputs) -> Iterator[None]:
        """Prepare every observer for the pass inside the block, and close every observer, also if the pass fails."""
        error: BaseException | None = None
        try:
            for observer in self.observers:
                observer.before_pass(inputs)
            yield
        except BaseException as reason:
            error = reason
            raise
        finally:
            for observer in self.observers:
                observer.close(error)
            # The error's traceback holds this frame, and frames with the tensors of the pass. If this frame held the
            # error too, this cycle would keep the tensors.
            del error

    def before_phase(self, phase: RankPhase) -> None:
        for observer in self.observers:
            observer.before_phase(phase)

    def after_forward(self, log_probs_BA: Tensor, loss: Tensor) -> None:
        self._notify_after(RankPhase.FORWARD, lambda observer: observer.after_forward(log_probs_BA, loss))

    def after_backward(self) -> None:
        self._notify_after(RankPhase.BACKWARD, lambda observer: observer.after_backward())

    def before_step(self, loss: Tensor) -> None:
        self._notify_after(RankPhase.BACKWARD, lambda observer: observer.before_step(loss))

    def after_measurement(self) -> None:
        for observer in self.observers:
            observer.after_measurement()

    def _notify_after(self, phase: RankPhase, notify: Callable[[PassObserver], None]) -> None:
        """Notify first the observers that leave the clock running, then, with the clock paused, the others."""
        pausing_observers = [observer for observer in self.observers if phase in observer.pauses_clock_after]
        for observer in self.observers:
            if phase not in observer.pauses_clock_after:
                notify(observer)
        if pausing_observers:
            with self.clock.pause():
                for observer in pausing_observers:
                    notify(observer)


def run_pass(
    backend: Backend, inputs: PassInputs, clock: Clock | None = None, observers: Sequence[PassObserver] = ()
) -> PassOutcome:
    """Run one pass: the forward, and if `inputs` ask for them the backward and the end of the accumulation window.

    With a clock, the ranks wait for each other and begin the pass together. The forward computes log-probs and the
    loss. With a clock, all ranks then wait for the slowest, so that this wait does not count as time of the backward.
    The backward adds to the gradient of the window. A MEASURED step is a phase of the pass. Without a MEASURED step the
    window's end (norm, step if any, clearing) runs unmeasured, after the clock has stopped. At the end of an incomplete
    window there is no step, and the norm is not kept. The observers have their turn before the pass and before each
    phase, after the forward, after the backward, before a measured step, after the clock has stopped, and at the end.

    clock      measures the pass; None: the pass is not measured
    observers  look at the pass; the same ones in the same order on every rank

    All ranks must call this. Raises what the model, the loss or an observer raises, and ValueError if the random states
    are damaged.
    """
    clock = clock or NullClock()
    notifier = ObserverNotifier(observers, clock)
    grad_norm: float | None = None
    try:
        with (
            notifier.open_observers(inputs),
            torch.set_grad_enabled(inputs.builds_graph),
            _steer_routers(backend, inputs) as router_states,
        ):
            clock.wait_for_all_ranks()
            # From the job's random states, dropout draws the job's masks if the rows are fed as the job fed them.
            if inputs.random_states:
                restore_random_states(inputs.random_states)

            notifier.before_phase(RankPhase.FORWARD)
            clock.start()
            with clock.measure("forward"):
                log_probs_BA = backend.forward(inputs.actor_inputs, train_mode=inputs.train_mode)
                loss = inputs.compute_loss(log_probs_BA)
                router_loss, router_loss_factor = _compute_router_loss(inputs, router_states, loss, log_probs_BA)
                if router_loss is not None:
                    loss = loss + router_loss
            notifier.after_forward(log_probs_BA, loss)

            notifier.before_phase(RankPhase.WAITING_FOR_RANKS)
            clock.wait_for_slowest_rank()

            if inputs.runs_backward:
                notifier.before_phase(RankPhase.BACKWARD)
                with clock.measure("backward"):
                    # A factor of 1 is left out: a product would launch one more CUDA kernel in a measured phase.
                    factor = inputs.loss_weight * inputs.window_factor
                    backend.backward(loss if factor == 1 else loss * factor)
            if inputs.window_end is WindowEnd.COMPLETE and inputs.frozen:
                _drop_gradients(backend.model, inputs.frozen)
            notifier.after_backward()

            if inputs.step_timing is StepTiming.MEASURED:
                notifier.before_step(loss)
                notifier.before_phase(RankPhase.STEP)
                with clock.measure("step"):
                    # Takes the norm, clips, steps and clears the gradients.
                    grad_norm = backend.end_window(step=True, settings=inputs.step_settings)

            notifier.before_phase(RankPhase.DEVICE_SYNC)
            cost = clock.stop()
            notifier.after_measurement()
            router_flips = collect_flips(router_states)

            notifier.before_phase(RankPhase.PASS_END)
            # A job ends each window with a step. So the time that an end without a step takes, to compute the norm and
            # clear the gradient, tells nothing of the job. The time of a step without --step is not measured either.
            if inputs.window_end is WindowEnd.COMPLETE and inputs.step_timing is not StepTiming.MEASURED:
                takes_step = inputs.step_timing is StepTiming.UNMEASURED
                grad_norm = backend.end_window(step=takes_step, settings=inputs.step_settings)
            elif inputs.window_end is WindowEnd.INCOMPLETE:
                backend.end_window(step=False)
        return PassOutcome(
            log_probs_BA=log_probs_BA.detach(),
            loss=loss.detach(),
            grad_norm=grad_norm,
            cost=cost,
            router_flips=router_flips,
            router_loss=None if router_loss is None else router_loss.detach(),
            router_loss_factor=router_loss_factor,
        )
    finally:
        # The logits that are kept for the loss hold the autograd graph, and the graph holds the parameters. After a
        # pass that failed, the actor is closed and its memory has to become free.
        if inputs.actor_inputs.kept_logits is not None:
            inputs.actor_inputs.kept_logits.drop()


def run_pass_again(
    backend: Backend,
    inputs: PassInputs,
    device: torch.device,
    clock: Clock | None = None,
    observers: Sequence[PassObserver] = (),
) -> PassOutcome:
    """Run a pass once more, without a step.

    With a backward, the pass is a window of its own: its end clears the gradient, also what earlier passes added to it.
    Without a backward, the gradient stays as it is.

    Afterwards torch's random generators, also that of `device`, go on as if this pass had not run. The other arguments
    are as in `run_pass`.
    """
    inputs_without_step = replace(
        inputs,
        window_end=WindowEnd.COMPLETE if inputs.runs_backward else WindowEnd.NONE,
        step_timing=StepTiming.NONE,
    )
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return run_pass(backend, inputs_without_step, clock, observers)


def _drop_gradients(model: nn.Module, names: Collection[str]) -> None:
    """Drop the gradients of these parameters: no norm counts the gradients, and the optimizer skips the parameters."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.grad = None


def _steer_routers(backend: Backend, inputs: PassInputs) -> AbstractContextManager[Mapping[str, RouterState]]:
    """Return a context in which the routers do what `inputs.routes` says, and which yields their states by name."""
    return nullcontext({}) if inputs.routes is None else steer_routers(backend.model, inputs.routes)


def _compute_router_loss(
    inputs: PassInputs, states: Mapping[str, RouterState], loss: Tensor, log_probs_BA: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Compute `PassOutcome.router_loss` and `router_loss_factor`."""
    if (term := inputs.router_loss_term) is None:
        return None, None
    router_loss = term.compute(states)
    if term.training_loop_loss is None:
        # The job's model itself added the routers' loss, so the whole of it is added here.
        return router_loss, None
    # The loss that the job's training loop gave to `recorder.note` tells whether the loop added the routers' loss, and
    # with which factor. Here the routers' loss is added with the same factor. If the factor is unknown, the routers'
    # loss is left out, and the verdict may doubt a gradient that differs.
    factor = term.training_loop_loss.find_factor(loss, log_probs_BA, router_loss)
    return factor.nan_to_num() * router_loss, factor


def prepare_actor_inputs(batch: MicroBatch, spec: ActorSpec, model_source: ModelSource, world: World) -> ActorInputs:
    """Return `batch` on the device, laid out, padded and sliced as the model and the spec say.

    Raises CaptureError if `batch` is not valid input for the model, or a row is longer than each length of
    --pad-tokens, and UsageError if the attention kernel cannot compute rows with padding between their tokens. All
    ranks must call this.
    """
    check_vocabulary(batch, model_source)
    layout = model_source.layout_under(spec)
    # A layout may make each document a padded row of its own. Only joined rows have the borders of documents. So the
    # rows are joined first, and `apply_layout` cuts them at the borders.
    inputs = apply_layout(prepare_inputs(batch, packing=layout.joins_rows), layout)
    # Only padded rows have an attention mask.
    if inputs.attention_mask_BS is not None:
        form = find_attention_form(choose_kernel_name(spec, world.device, model_source.config))
        if not form.allows_padding_between_tokens:
            refuse_padding_between_tokens(inputs.attention_mask_BS, str(batch.origin.source))
    # LONGEST is the longest row that any rank has in this pass.
    if spec.pad_to is PadTo.LONGEST:
        inputs = pad_to(inputs, max(world.gather(inputs.input_ids.shape[1])))
    num_tokens = inputs.input_ids.shape[1]
    if (length := spec.find_padded_length(num_tokens)) is None:
        why = f": a row of {num_tokens} tokens is longer than each of {Setting('pad_tokens', spec.pad_tokens)}"
        raise CaptureError(batch.origin.source, why, f"Add a length of at least {num_tokens}")
    inputs = pad_to(inputs, length)
    if spec.parallel.sequence_parallel:
        # A model that makes its own positions would count them from the beginning of this rank's part of a row.
        inputs = replace(inputs, makes_positions=False)
    if spec.parallel.ring > 1:
        assert inputs.cu_seq_lens is not None
        ring = compute_ring_indices(
            inputs.cu_seq_lens,
            world.ring_group,
            head_stride=spec.parallel.ring_head_stride,
            may_zigzag=may_zigzag(model_source.config),
        )
        inputs = slice_for_ring(inputs, ring)
    return replace(inputs, head=model_source.head).to(world.device)


def check_vocabulary(batch: MicroBatch, model_source: ModelSource) -> None:
    """Raise CaptureError for token ids outside the model's vocabulary."""
    largest, size = int(batch.sequences_BS.max()), model_source.config.get_text_config().vocab_size
    if largest >= size:
        why = f": token id {largest} is beyond the model's vocabulary of {size}; these inputs belong to another model"
        raise CaptureError(batch.origin.source, why, f"Name it with {Setting('model')}")
