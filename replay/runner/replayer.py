"""Replay one capture after another on this rank: a capture goes in, its record comes out.

Shape letters: B rows, S tokens a row, A columns of the action mask (the last tokens of each row).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from actor_init.backends.protocol import Backend, free_closed_backends, open_backend
from actor_init.inputs.documents import KeptLogits
from actor_init.inputs.packing import ActorInputs, find_targets_equal_to_input_tokens
from actor_init.model import ModelSource, to_plain_config
from actor_init.model_positions import add_model_positions
from actor_init.spec import ActorSpec
from actor_init.weights import OnProgress, ignore_progress
from actor_init.world import World
from capture.file_format.capture_file import CapturedCall, read_call
from capture.file_format.micro_batch import MicroBatch, with_rows_reversed
from replay.objective.inputs import ObjectiveData, ObjectiveInputs
from replay.objective.objective import (
    WEIGHTS_IN_MEAN,
    Objective,
    compute_negated_mean,
    padding_may_predict_label,
    select_loss_tokens,
)
from replay.options.option_parsing import format_error_with_flags
from replay.options.resolved import ResolvedReplay
from replay.options.spec import WindowWeights
from replay.output.text import join_lines
from replay.resolution.windows import InputRound
from replay.runlog.records import InputSection, PassRecord, ResultSection
from replay.runlog.token_log_probs import TokenPlaces, write_token_log_probs
from replay.runner.accumulation_window import AccumulationWindow
from replay.runner.checkpoint import StateWeights, digest_inputs
from replay.runner.first_uses import ExpectedTimes
from replay.runner.generator_observer import GeneratorObserver, RandomDrawCounter, was_fed_as_captured
from replay.runner.loss_variants import has_other_log_probs, try_losses
from replay.runner.meter import Meter
from replay.runner.non_finite import NonFiniteSearch
from replay.runner.observers import (
    CompilationCounter,
    FirstUseObserver,
    GradientSampler,
    GradientSketcher,
    LogProbWeightMeter,
    LossCheck,
    OptimizerStateSampler,
    PhaseReporter,
    RunObservers,
    TraceObserver,
)
from replay.runner.pass_routes import PassRouting
from replay.runner.run_pass import (
    MeterClock,
    PassInputs,
    PassObserver,
    PassOutcome,
    StepTiming,
    WindowEnd,
    prepare_actor_inputs,
    run_pass,
    run_pass_again,
)
from replay.runner.step_follower import StepFollower
from replay.tolerances.job_bounds import LOSS, TOKEN_LOG_PROBS
from replay.tracing.writer import TraceWriter
from replay.verdict.judge import PassEvidence
from replay.verdict.noted_log_probs import (
    NotedLogProbs,
    collect_noted_log_probs,
    has_noted_log_probs,
    place_own_log_probs,
)
from replay.verdict.recorded_pass import (
    RecordedPass,
    ReplayedPass,
    doubt_loss_and_grad_norm,
    list_action_log_probs,
    list_log_probs_at,
    list_modules_in_other_mode,
    read_recorded_log_probs,
    read_recorded_pass,
    read_token_positions,
)
from replay.verdict.special_tokens import SpecialTokens
from replay.verdict.tried_losses import TriedLosses
from replay.verdict.weight_check import WeightChecker
from replay.watch.progress import RankPhase, Tracker

# If the objective's loss is not the job's in a pass, other losses are tried, in at most this many passes.
MAX_TRIED_PASSES = 4


class ReopeningError(RuntimeError):
    """Raised if the actor could not be opened again after a pass failed."""


class ReopenableActor:
    """Hold a backend and open it again after a failed pass.

    What the failed pass left in the backend would corrupt the next pass.

    If the weights are to come from a state that --save-state wrote, this state is loaded into each backend that is
    opened. Until then the weights are NaN.
    """

    def __init__(
        self,
        spec: ActorSpec,
        source: ModelSource,
        world: World,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        self._arguments = (spec, source, world, on_progress)
        self._state_folder = source.weights.folder if isinstance(source.weights, StateWeights) else None
        self.backend: Backend = self._open_backend()

    def _open_backend(self) -> Backend:
        backend = open_backend(*self._arguments)
        if self._state_folder is not None:
            backend.load_state(self._state_folder)
        return backend

    def reopen(self) -> None:
        """Close the backend and open another one. Raises ReopeningError if that fails."""
        # The old backend has to free its memory, since the new backend needs as much.
        self.backend.close()
        del self.backend
        free_closed_backends(after_failed_pass=True)
        try:
            self.backend = self._open_backend()
        except Exception as error:
            raise ReopeningError(
                f"the actor could not be opened again after the failed pass: {format_error_with_flags(error)}"
            ) from error


class Replayer:
    """Replay captures through an actor, one after another, and keep track of the accumulation window.

    `replay` reads a capture, runs its pass and returns a `PassEvidence` and the error, if any. When each rank has the
    pass's records of all ranks, the ranks may decide together to run the pass once more:
    `find_non_finite_in_latest_pass` searches it for the first NaN or infinity, and `time_second_run` measures it again.
    After a pass that failed, `reopen_after_failure` opens the actor again.

    Here a `record` describes one pass in this replay's log. A name with `recorded`, such as `recorded_pass`, is for
    what the job recorded.

    spec            what to replay, and how: `spec.actor` are the actor's options, and `spec.measure` says what each
                    pass does and where it is logged
    meter           measures seconds and memory of a pass's phases
    tracker         tells the watch, which notices dead and waiting ranks, what this rank is doing
    weight_checker  compares the weights that the job recorded with the model's
    trace           writes short random projections (sketches) of what each layer computed; None: the run is not traced
    rounds          for each pass index: the inputs that the data ranks replay at the same time; empty: unknown
    log_folder      where details (token log-probs, gradient sketches) are written if `spec.measure` keeps them; None:
                    they are not written
    """

    def __init__(
        self,
        spec: ResolvedReplay,
        world: World,
        reopenable_actor: ReopenableActor,
        meter: Meter,
        tracker: Tracker,
        weight_checker: WeightChecker,
        trace: TraceWriter | None = None,
        rounds: Sequence[InputRound] = (),
        log_folder: Path | None = None,
    ) -> None:
        self.spec = spec
        self.world = world
        self.model_source = spec.source
        self.reopenable_actor = reopenable_actor
        self.tracker = tracker
        self.weight_checker = weight_checker
        self.trace = trace
        self.window = AccumulationWindow(grad_accumulation=spec.actor.resolved_grad_accumulation, rounds=rounds)
        self.details_folder = log_folder if spec.measure.keeps_details else None
        self.non_finite_search = NonFiniteSearch(spec=spec.actor, world=world, report_progress=tracker.report_progress)
        # Decides which passes end with a step of the optimizer, and with which settings, and counts the steps.
        self.step_follower = StepFollower(spec=spec, world=world)
        # The number of inputs up to the latest pass that succeeded and left no window open.
        self.num_inputs_completed = 0
        self._clock = MeterClock(meter, world)
        # Names the one-time costs of each pass: what it compiled, and which kernels and libraries this process used in
        # it for the first time.
        self._first_use_observer = FirstUseObserver(world.device, spec.kernel)
        self._expected_times = ExpectedTimes()
        self._latest_inputs: PassInputs | None = None
        # True once a failed pass has left something in the backend that would spoil later passes.
        self._must_reopen = False
        # True once the accumulation window has counted the latest pass as one that succeeded.
        self._is_pass_counted = False
        self._random_draw_counter = RandomDrawCounter()
        self._objective = Objective.open(spec)
        self._kept_logits = (
            KeptLogits() if self._objective is not None and self._objective.needs_logits_or_entropies else None
        )
        self._make_objective_inputs: Callable[[Tensor], ObjectiveInputs] | None = None
        self._num_tried_passes = 0
        self._routing = PassRouting.open(reopenable_actor.backend.model, spec)
        self._special_tokens = SpecialTokens.from_config(to_plain_config(self.model_source.config))
        # In a left-padded row the last padding token predicts the label of the row's first token, and a model's own
        # loss counts that label. A layout that joins rows leaves out this padding.
        keeps_padding = not self.model_source.layout_under(spec.actor).joins_rows
        self._padding_predicts_label = keeps_padding and padding_may_predict_label(spec)

    def reopen_after_failure(self) -> None:
        """Open the actor again if a pass that failed has left something in it.

        Before this call, drop the pass's error: the frames of its traceback hold the model.
        """
        if self._must_reopen:
            self.reopenable_actor.reopen()
            if self.trace:
                self.trace.attach(self.reopenable_actor.backend)
            self._must_reopen = False
            self.window.reset_for_new_backend()
            self.step_follower.forget_steps("a pass failed, and the weights are again those that the run began with")

    def find_non_finite_in_latest_pass(self, record: PassRecord) -> PassRecord:
        """Run the latest pass again to find its first tensor that is not finite.

        Returns the pass's `record` with the name of the tensor, or with the reason why the tensor cannot be found;
        unchanged if this rank has no such tensor. All ranks must call this.
        """
        assert self._latest_inputs is not None
        self.tracker.enter_phase(RankPhase.SEARCHING_NON_FINITE)
        tensor_name = self.non_finite_search.find_first(
            self.reopenable_actor.backend,
            self._latest_inputs,
            have_weights_changed=self.step_follower.latest_pass_has_stepped,
        )
        return replace(record, first_non_finite=tensor_name)

    def needs_second_run(self, rank_records: Sequence[PassRecord]) -> bool:
        """Must the latest pass run again, to see whether it is always this slow? The answer is equal on every rank."""
        # A second run with a backward clears the gradient. In an open window the gradient accumulated so far would be
        # lost.
        return self.spec.actor.resolved_grad_accumulation == 1 and self._expected_times.is_unexpectedly_slow(
            rank_records
        )

    def learn_times(self, rank_records: Sequence[PassRecord]) -> None:
        """Learn from the latest pass, which needs no second run, how long later passes should take."""
        self._expected_times.learn(rank_records)

    def time_second_run(self, record: PassRecord, rank_records: Sequence[PassRecord]) -> PassRecord:
        """Return the latest pass's `record` with the seconds of a second run, which changes no weights.

        All ranks must call this.
        """
        assert self._latest_inputs is not None
        self.tracker.enter_phase(RankPhase.RERUNNING)
        cost = run_pass_again(self.reopenable_actor.backend, self._latest_inputs, self.world.device, self._clock).cost
        seconds = sum(phase.seconds for phase in cost.phases.values())
        return self._expected_times.learn_second_run(record, seconds, rank_records, self.world)

    def replay(
        self, index: int, path: Path, extra_observers: Sequence[PassObserver] = ()
    ) -> tuple[PassEvidence, Exception | None]:
        """Replay the capture in `path` as pass `index`.

        The capture is read (`captured_call`) and described in the record. `recorded_pass` is what the verdict needs of
        the capture. Then the pass runs, and its results are added to the record.

        Returns the evidence from which the verdict judges the pass, and the error with which the pass failed; None: it
        succeeded. The record of a failed pass has the error, and describes the input if the capture could be read, but
        has no results. The error is not raised, since the caller decides with the other ranks what the error means for
        the run.

        extra_observers  look at this pass, besides the observers that the run has for every pass
        """
        record = PassRecord(
            index=index,
            source=path.name,
            rank=self.world.rank,
            data_rank=self.world.data_rank,
            warmup=index < self.spec.measure.warmup,
            traced=self.trace is not None,
        )
        recorded_pass: RecordedPass | None = None
        self._is_pass_counted = False
        self.tracker.begin_pass(index, path.name, index_in_window=self.window.num_passes_ended)
        try:
            captured_call = read_call(path)
            batch = replace(captured_call.micro_batch(), padding_predicts_label=self._padding_predicts_label)
            record = replace(record, input=_describe_input(batch))
            weight_comparison = self.weight_checker.check(captured_call.weights)
            recorded_pass = read_recorded_pass(
                captured_call, batch, self.spec.measure.loss, weight_comparison, self._special_tokens
            )
            # If the job's model added a routers' loss that cannot be computed here, the job's loss and gradient norm
            # cannot be compared with the replay's.
            model_router_loss = self._routing.find_router_loss(captured_call)
            if model_router_loss is not None and model_router_loss.why_not_computable is not None:
                recorded_pass = doubt_loss_and_grad_norm(recorded_pass, model_router_loss.why_not_computable)
            self.tracker.set_shapes(batch.num_rows, batch.num_padded_tokens, batch.num_real_tokens)
            batch = select_loss_tokens(self.spec.measure.loss, add_model_positions(batch, self.model_source.config))
            record_with_results, replayed_pass = self.run_micro_batch(
                record, captured_call, recorded_pass, batch, extra_observers
            )
            # In at most one pass of the run, the random numbers are counted, and the counts added to both. In every
            # other pass both come back unchanged.
            recorded_pass, replayed_pass = self._random_draw_counter.add_counts(
                recorded_pass, replayed_pass, captured_call.random
            )
            return PassEvidence(record_with_results, recorded_pass, replayed_pass), None
        except SystemExit as error:
            # A user's code may call sys.exit. Then the pass fails, but the run must not end without a report.
            exit_error = RuntimeError(f"sys.exit({error.code!r}) was called").with_traceback(error.__traceback__)
            failed_record = replace(record, error=str(exit_error), error_type="SystemExit")
            return PassEvidence(self.count_failed_pass(failed_record), recorded_pass, ReplayedPass()), exit_error
        except Exception as error:
            message = join_lines(format_error_with_flags(error))
            failed_record = replace(record, error=message, error_type=type(error).__name__)
            return PassEvidence(self.count_failed_pass(failed_record), recorded_pass, ReplayedPass()), error

    def count_failed_pass(self, record: PassRecord) -> PassRecord:
        """Count a failed pass too: its window ends where it would have ended without the failure.

        If `run_pass` succeeded, and only its results could not be collected, the pass is counted already. Returns the
        record with the pass's window; unchanged if the pass, as far as is known, belongs to no window.
        """
        rounds, index = self.window.rounds, record.index
        # If the capture could not be read, ask the round whether the job trained on it.
        trains = record.input.trains
        if trains is None and index < len(rounds):
            trains = rounds[index].trains
        if not trains or not self.spec.measure.backward:
            return record
        if not self._is_pass_counted:
            leaves_stale_gradient = self.window.count_failed_pass(index)
            self._must_reopen |= leaves_stale_gradient
            self.step_follower.stop_following_steps("a pass of the step failed")
        return replace(record, window=self.window.first_index)

    def run_micro_batch(
        self,
        record: PassRecord,
        captured_call: CapturedCall,
        recorded_pass: RecordedPass,
        batch: MicroBatch,
        extra_observers: Sequence[PassObserver],
    ) -> tuple[PassRecord, ReplayedPass]:
        """Run the pass of a micro-batch. Returns `record` with its results, and further results for the verdict.

        The pass is added to the accumulation window, the micro-batch is laid out on the device, and `run_pass` runs the
        pass under the observers of this run. If `run_pass` fails, the actor has to be opened again. If it succeeds,
        loss and gradient norm go into the record, log-probs and samples into the `ReplayedPass`, and details and trace
        are written.
        """
        # Samples are neighbouring elements of a gradient. A signature is the norm of a gradient and elements from all
        # over the gradient. `weight_checker` translates the job's parameter names, which wrappers such as DDP change,
        # into this model's names.
        gradients = captured_call.step.gradients if captured_call.step is not None else None
        gradient_samples = self.weight_checker.match_to_parameters(gradients.samples if gradients is not None else ())
        gradient_signatures = self.weight_checker.match_to_parameters(
            captured_call.step.signatures if captured_call.step is not None else ()
        )
        self.window.begin_pass(record.index, gradient_samples, gradient_signatures, self.reopenable_actor.backend)
        inputs = self._prepare_inputs(record.index, captured_call, batch)
        inputs = self.step_follower.plan_step(inputs, record.index, self.reopenable_actor.backend)
        self._latest_inputs = inputs
        # The number of steps before this pass. This pass may end with one more.
        num_steps = self.step_follower.num_steps
        weights_before_pass = self.step_follower.sample_weights(
            self.reopenable_actor.backend, captured_call.weights, self.weight_checker
        )

        run_observers = self._choose_observers(record.index, inputs)
        generator_observer = GeneratorObserver(self.world.device)
        state_samples = self.weight_checker.match_to_parameters(
            captured_call.step.state if captured_call.step is not None else ()
        )
        state_sampler = OptimizerStateSampler.choose(
            self.reopenable_actor.backend, self.model_source, self.world, inputs, state_samples
        )
        observers = [generator_observer, *extra_observers, *run_observers.in_order]
        observers += [state_sampler] if state_sampler is not None else []
        try:
            outcome = run_pass(self.reopenable_actor.backend, inputs, self._clock, observers)
        except (Exception, SystemExit):
            self._must_reopen = True
            raise
        self.window.count_pass(runs_backward=inputs.runs_backward)
        self._is_pass_counted = True
        # If the optimizer steps although --step was not typed, the memory of its state is left out of the cost: the
        # user did not ask what a step costs.
        cost = self.step_follower.subtract_optimizer_state_bytes(outcome.cost)
        self.step_follower.count_step(inputs, self.reopenable_actor.backend)

        # The weight of a log-prob is the negated derivative of the loss with respect to this log-prob. The weights tell
        # how far rounding can move the loss. Without an objective the loss is a mean, so they need not be measured.
        log_prob_weight_meter, gradient_sampler = run_observers.log_prob_weight_meter, run_observers.gradient
        log_probs_at_recorded_positions, all_action_log_probs = self._collect_log_probs(
            outcome, inputs, captured_call, batch
        )
        replayed_pass = ReplayedPass(
            log_probs_at_recorded_positions=log_probs_at_recorded_positions,
            all_action_log_probs=all_action_log_probs,
            log_prob_weights=log_prob_weight_meter.log_prob_weights
            if log_prob_weight_meter is not None
            else WEIGHTS_IN_MEAN,
            gradient=gradient_sampler.samples if gradient_sampler is not None else None,
            state=state_sampler.samples if state_sampler is not None else {},
            draws=generator_observer.draws,
            # A dropout mask that is drawn here is the job's only if each token is fed at the position where the job fed
            # it. The check waits for the device, so it is made only if the forward drew random numbers.
            was_fed_as_captured=generator_observer.has_drawn
            and was_fed_as_captured(inputs, batch, self.spec.actor.parallel),
            router_flips=outcome.router_flips,
            has_job_routes=self._routing.has_job_routes(outcome.router_flips),
            router_loss_of_training_loop=self._routing.describe_router_loss_of_training_loop(
                captured_call, outcome.router_loss_factor
            ),
            weights_before_pass=weights_before_pass,
            tried_losses=self._try_losses(outcome, inputs, recorded_pass, log_probs_at_recorded_positions),
            noted_log_probs=_collect_noted_log_probs(outcome, inputs, captured_call, batch),
        )
        if self.details_folder is not None:
            write_token_log_probs(
                self.details_folder,
                record.index,
                record.rank,
                all_action_log_probs,
                _locate_tokens(captured_call, batch),
            )
        # Each rank of a ring is fed an equal slice of the row.
        fed_tokens = inputs.actor_inputs.input_ids.numel() * self.spec.actor.parallel.ring
        record = run_observers.add_to(
            replace(
                record,
                window=self.window.first_index if inputs.runs_backward else None,
                input=replace(record.input, fed_tokens=fed_tokens),
                cost=cost,
                result=replace(
                    _describe_result(outcome, inputs),
                    num_steps=num_steps,
                    has_stepped=self.step_follower.latest_pass_has_stepped,
                ),
                routes=self._routing.describe(outcome.router_flips, outcome.router_loss),
            )
        )
        if self.trace:
            self.trace.write_pass(record.index, record.source, num_columns=inputs.captured_row_length)
        if not self.window.is_open:
            self.num_inputs_completed = record.index + 1
        return record, replayed_pass

    def _choose_observers(self, index: int, inputs: PassInputs) -> RunObservers:
        """Choose the observers of one pass. They are the same on every rank."""
        backend, ends_complete_window = self.reopenable_actor.backend, inputs.window_end is WindowEnd.COMPLETE
        has_samples = ends_complete_window and self.window.has_gradient_samples(index)
        folder = self.details_folder if ends_complete_window else None
        return RunObservers(
            first_uses=self._first_use_observer,
            compilation=CompilationCounter(),
            trace=TraceObserver(self.trace) if self.trace else None,
            phase=PhaseReporter(self.tracker),
            log_prob_weight_meter=LogProbWeightMeter() if self._objective is not None else None,
            gradient=GradientSampler(backend, self.window.recorded_samples, self.window.recorded_signatures)
            if has_samples
            else None,
            sketch=GradientSketcher(backend, folder, index, self.world) if folder is not None else None,
            # A step of --step may be taken with a gradient that is not finite. It spoils the weights, so the search has
            # to come before it. A step without --step is not taken with such a gradient.
            loss_check=LossCheck(self.non_finite_search.is_needed_for_loss, self._find_non_finite_before_step)
            if inputs.step_timing is StepTiming.MEASURED
            else None,
        )

    def _prepare_inputs(self, index: int, captured_call: CapturedCall, batch: MicroBatch) -> PassInputs:
        """Return what `run_pass` needs of a micro-batch, all but the step, which `StepFollower.plan_step` adds.

        Raises CaptureError and UsageError as `prepare_actor_inputs` does, and ObjectiveError if the capture lacks what
        the objective needs. All ranks must call this.
        """
        has_reversed_rows, measure = self.spec.inputs.reverse_rows, self.spec.measure
        runs_backward = batch.trains and measure.backward
        window_end = WindowEnd.NONE
        if self.window.ends_with_this_pass(runs_backward=runs_backward):
            window_end = WindowEnd.INCOMPLETE if self.window.is_incomplete else WindowEnd.COMPLETE
        objective_data = self._read_objective_data(captured_call, batch)
        fed_batch = with_rows_reversed(batch) if has_reversed_rows else batch
        actor_inputs = prepare_actor_inputs(fed_batch, self.spec.actor, self.model_source, self.world)
        # A job may train with modules that are in eval mode inside a module in train mode, or the other way round.
        actor_inputs = replace(
            actor_inputs, modules_in_other_mode=list_modules_in_other_mode(captured_call) if batch.trains else ()
        )
        if objective_data is None:
            # The loss is sft's, or the negated mean log-prob, which stands in for an unknown loss. Both are means of
            # log-probs, so the derivative is the same for each log-prob. Then the head may compute its gradients in the
            # forward already. This would be wasted work if no backward followed.
            actor_inputs = replace(actor_inputs, has_uniform_gradient=runs_backward)
            compute_loss: Callable[[Tensor], Tensor] = partial(_compute_mean_loss, actor_inputs)
        else:
            actor_inputs = replace(actor_inputs, kept_logits=self._kept_logits)
            assert self._objective is not None
            objective, self._make_objective_inputs = self._objective, self._bind_objective(actor_inputs, objective_data)
            make_objective_inputs = self._make_objective_inputs

            def compute_objective(log_probs_BA: Tensor) -> Tensor:
                return objective(make_objective_inputs(log_probs_BA))

            compute_loss = compute_objective
        routes, router_loss_term = self._routing.prepare(captured_call, batch, actor_inputs)
        return PassInputs(
            actor_inputs=actor_inputs,
            compute_loss=compute_loss,
            train_mode=batch.trains,
            builds_graph=batch.trains,
            runs_backward=runs_backward,
            loss_weight=self._choose_loss_weight(index, objective_data),
            window_factor=self.window.grad_accumulation / self.window.size,
            window_end=window_end,
            frozen=self.model_source.find_frozen_at(captured_call.origin.forward_number),
            random_states=captured_call.random,
            captured_row_length=batch.sequences_BS.shape[1],
            has_reversed_rows=has_reversed_rows,
            routes=routes,
            router_loss_term=router_loss_term,
        )

    def _read_objective_data(self, captured_call: CapturedCall, batch: MicroBatch) -> ObjectiveData | None:
        """Return what the job's objective is computed from; None without an objective.

        Raises ObjectiveError if the capture lacks what the objective needs.
        """
        if self._objective is None:
            return None
        objective_data = ObjectiveData.collect(captured_call, batch)
        self._objective.check(objective_data)
        return objective_data

    def _choose_loss_weight(self, index: int, objective_data: ObjectiveData | None) -> float:
        """Return the factor on the loss of a pass.

        The gradient of the weighted loss is then divided by the number of the window's passes on a data rank (backend
        and `window_factor` do this together), and averaged over the data ranks: in all, it is divided by the number of
        the window's passes on all data ranks.
        """
        num_window_passes = self.window.size * self.world.num_data_ranks
        if objective_data is not None:
            assert self._objective is not None
            # To divide by the number of passes is right for a loss that is a mean over its pass. Of a loss that is
            # normalised over the whole window, the gradients of the passes are added up, and the sum is divided by the
            # number of the job's ranks, since the job averaged gradients over its ranks. So the factor undoes the
            # division by the number of passes, and divides by the number of the job's ranks.
            return num_window_passes / objective_data.num_job_ranks if self._objective.sums_over_window else 1.0
        # The value of --window: the rule for the weights of a window's passes.
        window_weights = self.spec.measure.window
        if num_window_passes == 1 or window_weights is WindowWeights.MEAN_OF_MEANS:
            return 1.0
        if window_weights is WindowWeights.TOKENS:
            return self.window.find_token_weight(index, self.world.data_rank)
        return self.window.find_job_weight(index, self.world.data_rank)

    def _bind_objective(
        self, actor_inputs: ActorInputs, objective_data: ObjectiveData
    ) -> Callable[[Tensor], ObjectiveInputs]:
        """Return a function that makes the objective's inputs from the log-probs [B, A] of the pass.

        If the pass has reversed rows, the function restores the captured order.
        """
        objective_data_on_device = objective_data.to(self.world.device)
        has_reversed_rows, kept_logits = self.spec.inputs.reverse_rows, self._kept_logits
        # If the rounds are unknown, the window is assumed to have this one pass.
        token_counts = self.window.count_tokens() or [int(actor_inputs.action_mask_BA.sum())]

        def restore_row_order(tensor: Tensor) -> Tensor:
            return tensor.flip(0) if has_reversed_rows else tensor

        def make_objective_inputs(log_probs_BA: Tensor) -> ObjectiveInputs:
            return ObjectiveInputs(
                log_probs_BA=restore_row_order(log_probs_BA),
                action_mask_BA=restore_row_order(actor_inputs.action_mask_BA),
                recorded=objective_data_on_device,
                num_window_tokens=sum(token_counts),
                num_window_passes=len(token_counts),
                kept_logits=kept_logits,
                kept_logits_are_reversed=has_reversed_rows,
            )

        return make_objective_inputs

    def _try_losses(
        self,
        outcome: PassOutcome,
        inputs: PassInputs,
        recorded_pass: RecordedPass,
        log_probs_at_recorded_positions: Sequence[float | None],
    ) -> TriedLosses | None:
        """Compute the values that other losses have in this pass, since the job may have used one of them instead.

        They are computed now, from the log-probs of this pass: a later forward may run on other weights.

        Returns None if there is no objective, if the pass has reversed rows or is no training pass, if its log-probs
        are not the job's, after MAX_TRIED_PASSES passes, and where `try_losses` returns None.
        """
        # A run with reversed rows only measures what rounding does.
        is_comparable = inputs.train_mode and not inputs.has_reversed_rows
        if self._objective is None or not is_comparable or self._num_tried_passes == MAX_TRIED_PASSES:
            return None
        # If the log-probs are not the job's, every loss differs from the job's, whichever loss the job used.
        job_log_probs = next((claim.values for claim in recorded_pass.claims if claim.name == TOKEN_LOG_PROBS), ())
        if has_other_log_probs(job_log_probs, log_probs_at_recorded_positions, recorded_pass.dtypes):
            return None
        # A claim with a doubt proves nothing about the losses.
        losses = (claim for claim in recorded_pass.claims if claim.name == LOSS and claim.doubt is None)
        job_loss = next((claim.values[0] for claim in losses), None)
        assert self._make_objective_inputs is not None
        tried_losses = try_losses(self._objective, self._make_objective_inputs, outcome.log_probs_BA, job_loss)
        self._num_tried_passes += tried_losses is not None
        return tried_losses

    def _find_non_finite_before_step(self, inputs: PassInputs) -> str | None:
        """Return the name of the first parameter or tensor of the forward that is not finite, or why it is not found.

        None: only other ranks have such a tensor. No backward runs: it would change the gradient that the optimizer is
        about to step with.
        """
        inputs_without_backward = replace(inputs, runs_backward=False)
        return self.non_finite_search.find_first(
            self.reopenable_actor.backend, inputs_without_backward, have_weights_changed=False
        )

    def _collect_log_probs(
        self, outcome: PassOutcome, inputs: PassInputs, captured_call: CapturedCall, batch: MicroBatch
    ) -> tuple[Sequence[float | None], Sequence[float | None]]:
        """Collect the log-probs at the positions where the job recorded log-probs, and those of all action tokens.

        In the first list, None stands for a position without a log-prob of the input token, so that the list stays
        aligned with the job's. The second list has None where the action mask is off. It is empty unless details are
        kept, or the job recorded a number for each token: these may be log-probs, which are compared one by one.
        """
        is_reversed = inputs.has_reversed_rows
        # The job recorded log-probs of input tokens. If the label at a position is another token, the log-prob here is
        # the label's.
        targets = find_targets_equal_to_input_tokens(with_rows_reversed(batch) if is_reversed else batch)
        action_mask_BA = inputs.actor_inputs.action_mask_BA
        needs_all_action_tokens = self.details_folder is not None or _has_number_per_token(captured_call)
        log_probs_at_recorded_positions = list_log_probs_at(
            outcome.log_probs_BA,
            action_mask_BA & targets.are_input_tokens_BA.to(self.world.device),
            read_token_positions(captured_call, *batch.sequences_BS.shape),
            first_column=targets.first_column,
            is_reversed=is_reversed,
        )
        if not needs_all_action_tokens:
            return log_probs_at_recorded_positions, ()
        return log_probs_at_recorded_positions, list_action_log_probs(
            outcome.log_probs_BA, action_mask_BA, is_reversed=is_reversed
        )


def _collect_noted_log_probs(
    outcome: PassOutcome, inputs: PassInputs, captured_call: CapturedCall, batch: MicroBatch
) -> NotedLogProbs | None:
    """Collect the log-probs of tokens that the job noted or gave the model, each beside the replay's own.

    None if there are none to set side by side, or if the rows are reversed: such a run only measures what rounding
    does.
    """
    tensors = {**captured_call.tensors, **captured_call.notes}
    if inputs.has_reversed_rows or not has_noted_log_probs(tensors):
        return None
    targets = find_targets_equal_to_input_tokens(batch)
    own_BS, has_own_BS = place_own_log_probs(
        outcome.log_probs_BA.detach().cpu(),
        inputs.actor_inputs.action_mask_BA.cpu() & targets.are_input_tokens_BA,
        first_column=targets.first_column,
        num_tokens=batch.sequences_BS.shape[1],
    )
    return collect_noted_log_probs(tensors, batch.sequences_BS, own_BS, has_own_BS)


def _locate_tokens(captured_call: CapturedCall, batch: MicroBatch) -> TokenPlaces:
    """Return where the log-probs of a pass stand in its rows, and what the job recorded of the same tokens."""
    are_input_tokens_BA, first_column = find_targets_equal_to_input_tokens(batch)
    are_input_tokens = are_input_tokens_BA.tolist()
    recorded = {
        (row, column): value
        for (row, column), value in read_recorded_log_probs(captured_call, batch).items()
        if column >= first_column and are_input_tokens[row][column - first_column]
    }
    return TokenPlaces(num_rows=batch.num_rows, first_column=first_column, recorded=recorded)


def _has_number_per_token(captured_call: CapturedCall) -> bool:
    """Did the job record an output with a number for each token, such as log-probs?"""
    # `summarise_outputs` (outputs.py) stores the numbers of such an output as NAME_values.
    return any(name.endswith("_values") for name in captured_call.outputs)


def _describe_input(batch: MicroBatch) -> InputSection:
    return InputSection(
        rows=batch.num_rows,
        padded_tokens=batch.num_padded_tokens,
        real_tokens=batch.num_real_tokens,
        row_tokens=batch.attention_mask_BS.sum(dim=1).tolist(),
        input_digest=digest_inputs(batch),
        trains=batch.trains,
    )


def _describe_result(outcome: PassOutcome, inputs: PassInputs) -> ResultSection:
    """Return what the log keeps of the outcome. Rows are in the order in which they were captured."""
    row_stride = -1 if inputs.has_reversed_rows else 1
    return ResultSection(
        loss=outcome.loss.item(),
        row_log_probs=outcome.log_probs_BA.double().sum(dim=1).tolist()[::row_stride],
        row_action_tokens=inputs.actor_inputs.action_mask_BA.sum(dim=1).tolist()[::row_stride],
        weight=inputs.loss_weight,
        grad_norm=outcome.grad_norm,
    )


def _compute_mean_loss(actor_inputs: ActorInputs, log_probs_BA: Tensor) -> Tensor:
    return compute_negated_mean(log_probs_BA, actor_inputs)
