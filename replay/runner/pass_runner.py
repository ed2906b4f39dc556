"""Run one micro-batch through the actor and measure it. The only caller of a backend."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actor_init.attention.cudnn import refuse_holes
from actor_init.attention.kernel_choice import kernel_name
from actor_init.attention.ring import may_zigzag, ring_slice
from actor_init.backends.protocol import Backend, free_closed, open_backend
from actor_init.compiling import num_graphs
from actor_init.declarations.attention import form_of
from actor_init.dropout_settings import acting_dropouts
from actor_init.inputs.kept_logits import KeptLogits
from actor_init.inputs.packing import ActorInputs, actor_inputs, arranged, padded_to, predicts_own_tokens, sliced
from actor_init.model import ModelSource, lasting_config
from actor_init.own_positions import with_own_positions
from actor_init.spec import ActorSpec, PadTo
from actor_init.weights import OnProgress, unheard
from actor_init.world import World
from capture.file_format.capture_file import read_call
from capture.file_format.micro_batch import CaptureError, MicroBatch, with_rows_reversed
from capture.file_format.parameter_samples import Sample
from capture.record.rng_and_outputs import restore_random_states
from replay.loss import may_count_after_padding, negated_mean, tokens_for
from replay.objective.inputs import ObjectiveInputs
from replay.objective.inputs import Recorded as RecordedForObjective
from replay.objective.objective import Objective, gain
from replay.report.text import one_line
from replay.runlog import gradient_sketches, token_log_probs
from replay.runlog.records import PassRecord
from replay.runner import compilations
from replay.runner.digests import digest_of_inputs
from replay.runner.first_uses import FirstUses
from replay.runner.meter import Meter
from replay.runner.non_finite import Again, Search
from replay.runner.pass_again import Expectations, with_second_run
from replay.runner.windows import Round, weight_of
from replay.spec import RunSpec, WindowWeights
from replay.tracing.writer import RunTrace
from replay.verdict.job_values import Recorded, recorded_in, token_places
from replay.verdict.replayed_values import Replayed, action_log_probs, gradient_samples, sampled_log_probs
from replay.verdict.router_loss import without_router_loss
from replay.verdict.weight_check import SameWeights
from replay.watch.progress import Phase, Tracker


class ReopeningError(RuntimeError):
    """Raised if the actor could not be opened again after a pass failed."""


def what_wants_logits(spec: RunSpec, objective: Objective | None) -> str:
    """Return what of a run needs whole logits, whatever --whole-logits says; empty if nothing does."""
    if spec.measure.trace:
        return "the trace holds them"
    return f"--loss {objective.loss} may ask for them" if objective and objective.needs_whole_logits else ""


class ReopenedActor:
    """Hold a backend and open it again after a failed pass, whose leftover state would corrupt the next pass."""

    def __init__(
        self,
        spec: ActorSpec,
        source: ModelSource,
        world: World,
        load_state: Path | None = None,
        on_progress: OnProgress = unheard,
    ) -> None:
        self._arguments = (spec, source, world, on_progress)
        self._load_state = load_state
        self.backend: Backend = self._opened()

    def _opened(self) -> Backend:
        backend = open_backend(*self._arguments)
        if self._load_state is not None:
            backend.load_state(self._load_state)
        return backend

    def reopen(self) -> None:
        self.backend.close()
        del self.backend
        free_closed(failed=True)
        try:
            self.backend = self._opened()
        except Exception as error:
            raise ReopeningError(f"the actor could not be opened again after the failed pass: {error}") from error


class PassObserver(Protocol):
    """Is told how far a pass has come."""

    def forward_ended(self) -> None: ...
    def backward_ended(self, model: PreTrainedModel) -> None: ...  # before its gradients are cleared
    def phases_ended(self) -> None: ...  # those that are measured


class PassRunner:
    """Run one pass after another through the actor, and track the accumulation window."""

    def __init__(
        self,
        spec: RunSpec,
        world: World,
        source: ModelSource,
        actor: ReopenedActor,
        meter: Meter,
        tracker: Tracker,
        same_weights: SameWeights,
        trace: RunTrace | None = None,
        rounds: Sequence[Round] = (),
        folder: Path | None = None,
    ) -> None:
        self.spec = spec
        self.world = world
        self.source = source
        self.actor = actor
        self.meter = meter
        self.tracker = tracker
        self.same_weights = same_weights
        self.recorded: Recorded | None = None  # what the job recorded with the latest input; None if unreadable
        self.replayed = Replayed()  # values the latest pass computed besides its record
        self.trace = trace
        self.rounds = rounds
        self.details_folder = folder if spec.measure.details else None
        self.search = Search(spec=spec.actor, world=world, goes_on=tracker.goes_on)
        self._again: Again | None = None
        self._first_uses = FirstUses(world.device)
        self._kernel = kernel_name(spec.actor, world.device, source.config)
        self._expectations = Expectations()
        self.num_settled = 0  # inputs replayed before the open accumulation window
        self._num_in_window = 0
        self._window_begin = 0
        self._wanted: dict[str, list[Sample]] = {}  # gradient samples of the open window, by parameter
        self._token_places: Sequence[tuple[int, int]] = ()  # whose log-probs the job recorded
        self._wants_tokens = False  # the job recorded a value for each action token
        self._broke_off = False
        self._reverses = spec.inputs.reverse_rows
        self._objective = Objective.of(spec)
        self._kept_logits = KeptLogits() if self._objective is not None and self._objective.needs_logits else None
        self.observer: PassObserver | None = None
        self._is_random = bool(acting_dropouts(lasting_config(source.config)))
        self._padding_predicts = may_count_after_padding(spec) and not source.layout_under(spec.actor).joins

    @property
    def needs_whole_logits(self) -> bool:
        """Does the run need whole logits, whatever --whole-logits says?"""
        return bool(what_wants_logits(self.spec, self._objective))

    @property
    def num_in_window(self) -> int:
        """How many passes the open accumulation window has."""
        return self._num_in_window

    def mend(self) -> None:
        """Open the actor again if a pass failed. Call it after dropping the error, whose frames hold the model."""
        if self._broke_off:
            self.actor.reopen()
            if self.trace:
                self.trace.attach(self.actor.backend)
            self._broke_off = False

    def with_first_non_finite(self, record: PassRecord) -> PassRecord:
        """Return `record` of the latest pass with the first non-finite tensor added. All ranks must call this."""
        assert self._again is not None
        self.tracker.at(Phase.LOOKING)
        return replace(record, first_non_finite=self.search.run(self.actor.backend, self._again))

    def wants_again(self, ranks: Sequence[PassRecord]) -> bool:
        """Is the latest pass to be run again, to see if it is always as slow? The same on every rank."""
        wanted = self.spec.actor.num_accumulated == 1 and self._expectations.is_far_off(ranks)
        if not wanted:
            self._expectations.learn(ranks)
        return wanted

    def with_second_run(self, record: PassRecord, ranks: Sequence[PassRecord]) -> PassRecord:
        """Return `record` of the latest pass with the seconds of a second run, which changes no weights.

        All ranks must call this.
        """
        assert self._again is not None
        self.tracker.at(Phase.LOOKING)
        again, backend = self._again, self.actor.backend
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        self.world.meet()
        with torch.random.fork_rng(devices), torch.set_grad_enabled(again.trains):
            if again.random:
                restore_random_states(again.random)
            self.meter.start_pass()
            with self.meter.phase("forward"):
                log_probs_BA = backend.forward(again.inputs, trains=again.trains)
                if again.objective is None:
                    loss = negated_mean(log_probs_BA, again.inputs)
                else:
                    loss = again.objective(log_probs_BA)
            self.world.meet()
            if again.backward:
                with self.meter.phase("backward"):
                    backend.backward(loss)
        phases, _ = self.meter.end_pass()
        if again.backward:
            backend.end_window(step=False)
        if self._kept_logits is not None:
            self._kept_logits.drop()
        seconds = self.world.gather(sum(cost.seconds for cost in phases.values()))
        self._expectations.learn(ranks, max(seconds))
        return with_second_run(record, seconds, ranks)

    def _cudnn_calls(self, inputs: ActorInputs, *, backward: bool) -> set[tuple[int, int, bool]]:
        """Return what tells the calls of cuDNN's attention in a pass from each other."""
        planned = form_of(self._kernel).planned
        if planned is None:
            return set()
        lengths = [] if inputs.cu_seq_lens is None else inputs.cu_seq_lens.diff().tolist()
        rows, num_tokens = inputs.input_ids.shape
        return {(*call, backward) for call in planned(rows, num_tokens, lengths)}

    def replay(self, index: int, path: Path) -> tuple[PassRecord, Exception | None]:
        """Run forward, and backward and step if enabled, on one input. An error is recorded and returned."""
        known: dict[str, Any] = {
            "index": index,
            "source": path.name,
            "rank": self.world.rank,
            "data_rank": self.world.data_rank,
            "warmup": index < self.spec.measure.warmup,
            "traced": self.trace is not None,
        }
        self.tracker.begins(index, path.name, place_in_window=self._num_in_window)
        self.recorded, self.replayed = None, Replayed()
        try:
            call = read_call(path)
            batch = replace(call.micro_batch(), padding_predicts=self._padding_predicts)
            known |= {
                "rows": batch.num_rows,
                "padded_tokens": batch.num_padded_tokens,
                "real_tokens": batch.num_real_tokens,
                "row_tokens": batch.attention_mask_BS.sum(dim=1).tolist(),
                "input_digest": digest_of_inputs(batch),
                "trains": batch.trains,
            }
            weights = self.same_weights.check(call.weights)
            recorded = recorded_in(call, batch, self.spec.measure.loss, weights)
            self.recorded = without_router_loss(recorded, call, self.source.config)
            self.tracker.has_read(batch.num_rows, batch.num_padded_tokens, batch.num_real_tokens)
            batch = tokens_for(self.spec.measure.loss, with_own_positions(batch, self.source.config))
            random = call.random if self._is_random else {}
            self._token_places = token_places(call, *batch.sequences_BS.shape)
            self._wants_tokens = any(name.endswith("_values") for name in call.outputs)
            if not self._num_in_window:
                self._window_begin, self._wanted = index, {}
            if call.step is not None and call.step.gradients is not None:
                for name, sample in self.same_weights.by_own_name(call.step.gradients).items():
                    self._wanted.setdefault(name, []).append(sample)
            for_objective: RecordedForObjective | None = None
            if self._objective is not None:
                for_objective = RecordedForObjective.of(call, batch)
                self._objective.check(for_objective)
            fed = with_rows_reversed(batch) if self._reverses else batch
            measured = self._measured(index, fed, random, for_objective)
            record = PassRecord(**known, **measured)
            if self.trace:
                self.trace.write(index, path.name, num_columns=batch.sequences_BS.shape[1])
            self.num_settled = index + 1 if not self._num_in_window else self.num_settled
            return record, None
        except SystemExit as error:
            left = RuntimeError(f"sys.exit({error.code!r}) was called").with_traceback(error.__traceback__)
            return PassRecord(**known, error=str(left), error_type="SystemExit"), left
        except Exception as error:
            return PassRecord(**known, error=one_line(str(error)), error_type=type(error).__name__), error

    def _weight(self, index: int, for_objective: RecordedForObjective | None) -> float:
        """Return the factor on the pass's loss in the gradient of its window, which averages over its passes."""
        if for_objective is not None:
            assert self._objective is not None
            num_passes = self.spec.actor.num_accumulated * self.world.num_data_ranks
            return num_passes / for_objective.num_job_ranks if self._objective.is_share_of_window else 1.0
        is_shared = self.spec.actor.num_accumulated * self.world.num_data_ranks > 1
        if not is_shared or self.spec.measure.window is not WindowWeights.TOKENS or index >= len(self.rounds):
            return 1.0
        size = self.spec.actor.num_accumulated
        return weight_of(self.rounds, index, self.world.data_rank, self._window_begin, size)

    def _samples_gradients(self, index: int) -> bool:
        """Did the job record samples of this window's gradient? Every rank knows this from the rounds."""
        return any(one.has_gradients for one in self.rounds[self._window_begin : index + 1])

    def _objective_of(self, inputs: ActorInputs, recorded: RecordedForObjective) -> Callable[[Tensor], Tensor]:
        """Return the loss of the pass as a function of its log-probs, whose rows may be reversed."""
        assert self._objective is not None
        objective, here = self._objective, recorded.to(self.world.device)
        size = self.spec.actor.num_accumulated
        window = [one for one in self.rounds[self._window_begin :] if one.trains][:size]
        counts = [number for one in window for number in one.num_tokens] or [int(inputs.action_mask_BA.sum())]

        def in_captured_order(tensor: Tensor) -> Tensor:
            return tensor.flip(0) if self._reverses else tensor

        def loss_of(log_probs_BA: Tensor) -> Tensor:
            return objective(
                ObjectiveInputs(
                    log_probs_BA=in_captured_order(log_probs_BA),
                    action_mask_BA=in_captured_order(inputs.action_mask_BA),
                    recorded=here,
                    num_window_tokens=sum(counts),
                    num_window_passes=len(counts),
                    kept_logits=self._kept_logits,
                    is_fed_in_reverse=self._reverses,
                )
            )

        return loss_of

    def _measured(
        self, index: int, batch: MicroBatch, random: Mapping[str, Any], for_objective: RecordedForObjective | None
    ) -> dict[str, Any]:
        """Run one measured pass.

        random         initial generator states; if empty, they are left as they are
        for_objective  what the job's objective needs; None: the loss is the negated mean log-prob
        """
        backward = batch.trains and self.spec.measure.backward
        last_of_window = backward and self._num_in_window + 1 == self.spec.actor.num_accumulated
        step = last_of_window and self.spec.measure.step
        weight, gradient, loss_gain = self._weight(index, for_objective), None, 1.0
        inputs = inputs_for(batch, self.spec.actor, self.source, self.world)
        inputs = replace(inputs, is_even=backward and for_objective is None)
        loss_of: Callable[[Tensor], Tensor] | None = None
        if for_objective is not None:
            inputs = replace(inputs, kept_logits=self._kept_logits)
            loss_of = self._objective_of(inputs, for_objective)
        self._again = Again(
            inputs=inputs,
            trains=batch.trains,
            backward=backward,
            random=random,
            num_columns=batch.sequences_BS.shape[1],
            reverses=self._reverses,
            stepped=step,
            objective=loss_of,
        )
        named: str | None = None
        graphs_before = num_graphs()
        self._first_uses.begin(self._cudnn_calls(inputs, backward=backward))
        compilations.begin()
        if self.trace:
            self.trace.begin(inputs)
        self.world.meet()
        if random:
            restore_random_states(random)
        try:
            self.tracker.at(Phase.FORWARD)
            self.meter.start_pass()
            with torch.set_grad_enabled(batch.trains):
                with self.meter.phase("forward"):
                    log_probs_BA = self.actor.backend.forward(inputs, trains=batch.trains)
                    if self.trace:
                        self.trace.end_forward(log_probs_BA)
                    loss = negated_mean(log_probs_BA, inputs) if loss_of is None else loss_of(log_probs_BA)
                if loss_of is not None:
                    with self.meter.paused():
                        loss_gain = gain(loss, log_probs_BA)
                if self.observer is not None:
                    self.observer.forward_ended()
                self.tracker.at(Phase.WAITING)
                if self.world.world_size > 1:
                    with self.meter.phase("wait"):
                        self.world.meet()
                if backward:
                    self.tracker.at(Phase.BACKWARD)
                    with self.meter.phase("backward"):
                        self.actor.backend.backward(loss if weight == 1 else loss * weight)
                grad_norm = None
                if self.observer is not None:
                    self.observer.backward_ended(self.actor.backend.model)
                if self.trace and last_of_window:
                    self.trace.end_window()
                if last_of_window and self._samples_gradients(index):
                    with self.meter.paused():
                        gradient = gradient_samples(self.actor.backend.gradients(), self._wanted)
                if last_of_window and self.details_folder is not None:
                    with self.meter.paused():
                        gradient_sketches.keep(self.details_folder, index, self.actor.backend.gradients(), self.world)
                if step and self.search.is_any(loss):
                    named = self.search.run(self.actor.backend, replace(self._again, stepped=False, backward=False))
                if step:
                    self.tracker.at(Phase.STEP)
                    with self.meter.phase("step"):
                        grad_norm = self.actor.backend.end_window(step=True)
            self.tracker.at(Phase.SETTLING)
            if self.observer is not None:
                self.observer.phases_ended()
            phases, seconds = self.meter.end_pass()
            first_uses = self._first_uses.end()
            compile_seconds, recompilations = compilations.end()
            self.tracker.at(Phase.ENDING)
            if last_of_window and not step:
                grad_norm = self.actor.backend.end_window(step=False)
        except (Exception, SystemExit):
            self._num_in_window = 0
            self._broke_off = True
            if self._kept_logits is not None:
                self._kept_logits.drop()  # they hold the pass's graph, and with it the actor that is to be closed
            raise
        self._num_in_window = 0 if last_of_window else self._num_in_window + backward
        order = -1 if self._reverses else 1
        own_BA, first = predicts_own_tokens(batch)
        self.replayed = Replayed(
            token_log_probs=sampled_log_probs(
                log_probs_BA,
                inputs.action_mask_BA & own_BA.to(self.world.device),
                self._token_places,
                first=first,
                is_reversed=self._reverses,
            ),
            action_log_probs=action_log_probs(log_probs_BA, inputs.action_mask_BA, is_reversed=self._reverses)
            if self._wants_tokens or self.details_folder is not None
            else (),
            loss_gain=loss_gain,
            gradient=gradient,
        )
        if self._kept_logits is not None:
            self._kept_logits.drop()
        if self.details_folder is not None:
            token_log_probs.keep(self.details_folder, index, self.world.rank, self.replayed.action_log_probs)
        wait = phases.pop("wait", None)
        return {
            "fed_tokens": inputs.input_ids.numel() * self.spec.actor.parallel.ring,
            "phases": phases,
            "seconds": seconds,
            "wait_seconds": wait.seconds if wait else None,
            "loss": loss.item(),
            "row_log_probs": log_probs_BA.detach().double().sum(dim=1).tolist()[::order],
            "row_action_tokens": inputs.action_mask_BA.sum(dim=1).tolist()[::order],
            "weight": weight,
            "grad_norm": grad_norm,
            "new_graphs": num_graphs() - graphs_before,
            "first_uses": first_uses,
            "compile_seconds": compile_seconds,
            "recompilations": recompilations,
            "first_non_finite": named,
        }


def inputs_for(batch: MicroBatch, spec: ActorSpec, source: ModelSource, world: World) -> ActorInputs:
    """Return `batch` on the device, laid out, padded and sliced as the source and the spec say.

    Raises CaptureError if it is not valid input for the model. All ranks must call this.
    """
    check_vocabulary(batch, source)
    layout = source.layout_under(spec)
    inputs = arranged(actor_inputs(batch, packing=layout.joins), layout)
    if inputs.attention_mask_BS is not None and not form_of(kernel_name(spec, world.device, source.config)).takes_holes:
        refuse_holes(inputs.attention_mask_BS, str(batch.origin.source))
    if spec.pad_to is PadTo.LONGEST:
        inputs = padded_to(inputs, max(world.gather(inputs.input_ids.shape[1])))
    num_tokens = inputs.input_ids.shape[1]
    if (length := spec.padded_length(num_tokens)) is None:
        raise CaptureError(
            f"{batch.origin.source}: a row of {num_tokens} tokens is longer than each of --pad-tokens "
            f"{spec.pad_tokens}. Add a length of at least {num_tokens}"
        )
    inputs = padded_to(inputs, length)
    if spec.parallel.sequence_parallel:  # a rank would count its own part of a row
        inputs = replace(inputs, makes_positions=False)
    if spec.parallel.ring > 1:
        assert inputs.cu_seq_lens is not None
        ring = ring_slice(
            inputs.cu_seq_lens,
            world.ring_group,
            head_stride=spec.parallel.ring_head_stride,
            may_zigzag=may_zigzag(source.config),
        )
        inputs = sliced(inputs, ring)
    return replace(inputs, head=source.head).to(world.device)


def check_vocabulary(batch: MicroBatch, source: ModelSource) -> None:
    """Raise CaptureError for token ids outside the model's vocabulary."""
    largest, size = int(batch.sequences_BS.max()), source.config.get_text_config().vocab_size
    if largest >= size:
        raise CaptureError(
            f"{batch.origin.source}: token id {largest} is beyond the model's vocabulary of {size}; "
            "these inputs belong to another model. Name it with --model"
        )
