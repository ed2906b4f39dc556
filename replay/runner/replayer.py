"""Replay one capture after another on this rank: a capture goes in, its record comes out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from actor_init.backends.protocol import Backend, free_closed_backends, open_backend
from actor_init.dropout_settings import find_acting_dropouts
from actor_init.inputs.documents import KeptLogits
from actor_init.inputs.packing import ActorInputs, find_own_targets
from actor_init.model import ModelSource, strip_config
from actor_init.model_positions import add_model_positions
from actor_init.spec import ActorSpec
from actor_init.weights import OnProgress, ignore_progress
from actor_init.world import World
from capture.file_format.capture_file import Call, read_call
from capture.file_format.micro_batch import MicroBatch, with_rows_reversed
from capture.file_format.optimizer_step import Sample
from replay.objective.inputs import ObjectiveInputs
from replay.objective.inputs import Recorded as RecordedForObjective
from replay.objective.objective import Objective, may_count_after_padding, negated_mean, tokens_for
from replay.options.option_parsing import in_flags
from replay.options.resolved import ResolvedReplay
from replay.options.spec import WindowWeights
from replay.output.text import one_line
from replay.resolution.windows import Round, weight_of
from replay.runlog import token_log_probs
from replay.runlog.records import InputSection, PassRecord, ResultSection
from replay.runner.checkpoint import digest_of_inputs
from replay.runner.first_uses import Expectations, with_second_run
from replay.runner.meter import Meter
from replay.runner.non_finite import Search
from replay.runner.observers import (
    CompilationCounter,
    FirstUseCounter,
    GainProbe,
    GradientProbe,
    LossCheck,
    PassObservers,
    PositionMarker,
    SketchProbe,
    TraceObserver,
)
from replay.runner.run_pass import MeterClock, PassInputs, PassObserver, PassOutcome, inputs_for, run_pass
from replay.tracing.writer import RunTrace
from replay.verdict.job_values import (
    Recorded,
    Replayed,
    action_log_probs,
    recorded_in,
    sampled_log_probs,
    token_places,
    without_router_loss,
)
from replay.verdict.judge import Pass
from replay.verdict.weight_check import SameWeights
from replay.watch.progress import Phase, Tracker


@dataclass(kw_only=True, slots=True)
class Window:
    """The open accumulation window of one rank. It has the same passes on every rank.

    size    passes of each data rank in a window
    rounds  the inputs that all data ranks replay at the same time; empty: unknown
    begin   index of the window's first pass
    wanted  gradient samples that the job recorded in the window, by the replay's name of the parameter
    """

    size: int
    rounds: Sequence[Round] = ()
    begin: int = 0
    num_passes: int = 0
    wanted: dict[str, list[Sample]] = field(default_factory=dict)

    def enter(self, index: int, recorded: Mapping[str, Sample]) -> None:
        """Begin a window with pass `index` if none is open, and take on the samples recorded with the pass."""
        if not self.num_passes:
            self.begin, self.wanted = index, {}
        for name, sample in recorded.items():
            self.wanted.setdefault(name, []).append(sample)

    def is_last(self, *, backward: bool) -> bool:
        """Does the window end with the next pass?"""
        return backward and self.num_passes + 1 == self.size

    def has_run(self, *, backward: bool) -> None:
        """Count a pass that succeeded."""
        self.num_passes = 0 if self.is_last(backward=backward) else self.num_passes + backward

    def break_off(self) -> None:
        """Forget the window: a pass of it failed, and its gradient is gone."""
        self.num_passes = 0

    def has_gradient_samples(self, index: int) -> bool:
        """Did the job record samples of this window's gradient up to pass `index`? Every rank knows from the rounds."""
        return any(passes.has_gradients for passes in self.rounds[self.begin : index + 1])

    def token_weight(self, index: int, data_rank: int) -> float:
        """Return the weight of pass `index` of a data rank by tokens; 1 where the rounds do not tell."""
        if index >= len(self.rounds):
            return 1.0
        return weight_of(self.rounds, index, data_rank, self.begin, self.size)

    def token_counts(self) -> list[int]:
        """Return the tokens of the loss in each pass of the window, of all data ranks; empty if unknown."""
        window = [passes for passes in self.rounds[self.begin :] if passes.trains][: self.size]
        return [number for passes in window for number in passes.num_tokens]


class ReopeningError(RuntimeError):
    """Raised if the actor could not be opened again after a pass failed."""


class ReopenedActor:
    """Hold a backend and open it again after a failed pass, whose leftover state would corrupt the next pass."""

    def __init__(
        self,
        spec: ActorSpec,
        source: ModelSource,
        world: World,
        load_state: Path | None = None,
        on_progress: OnProgress = ignore_progress,
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
        free_closed_backends(failed=True)
        try:
            self.backend = self._opened()
        except Exception as error:
            raise ReopeningError(
                f"the actor could not be opened again after the failed pass: {in_flags(error)}"
            ) from error


class Replayer:
    """Feed captures to the actor, and track the accumulation window. Opens the actor again after a failed pass."""

    def __init__(
        self,
        spec: ResolvedReplay,
        world: World,
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
        self.source = spec.source
        self.actor = actor
        self.tracker = tracker
        self.same_weights = same_weights
        self.trace = trace
        self.window = Window(size=spec.actor.num_accumulated, rounds=rounds)
        self.details_folder = folder if spec.measure.keeps_details else None
        self.search = Search(spec=spec.actor, world=world, goes_on=tracker.goes_on)
        self.num_settled = 0  # inputs replayed before the open accumulation window
        self._clock = MeterClock(meter, world)
        self._first_uses = FirstUseCounter(world.device, spec.kernel)
        self._expectations = Expectations()
        self._latest: PassInputs | None = None
        self._broke_off = False
        self._objective = Objective.of(spec)
        self._kept_logits = KeptLogits() if self._objective is not None and self._objective.needs_logits else None
        self._is_random = bool(find_acting_dropouts(strip_config(self.source.config)))
        self._padding_predicts = may_count_after_padding(spec) and not self.source.layout_under(spec.actor).joins

    def mend(self) -> None:
        """Open the actor again if a pass failed. Call it after dropping the error, whose frames hold the model."""
        if self._broke_off:
            self.actor.reopen()
            if self.trace:
                self.trace.attach(self.actor.backend)
            self._broke_off = False

    def with_first_non_finite(self, record: PassRecord) -> PassRecord:
        """Return `record` of the latest pass with the first non-finite tensor added. All ranks must call this."""
        assert self._latest is not None
        self.tracker.at(Phase.LOOKING)
        found = self.search.run(self.actor.backend, self._latest, is_stepped=self._latest.steps)
        return replace(record, first_non_finite=found)

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
        assert self._latest is not None
        self.tracker.at(Phase.LOOKING)
        again = replace(self._latest, weight=1.0, ends_window=self._latest.backward, steps=False)
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            cost = run_pass(self.actor.backend, again, self._clock).cost
        seconds = self.world.gather(sum(phase.seconds for phase in cost.phases.values()))
        self._expectations.learn(ranks, max(seconds))
        return with_second_run(record, seconds, ranks)

    def replay(self, index: int, path: Path, observers: Sequence[PassObserver] = ()) -> tuple[Pass, Exception | None]:
        """Run forward, and backward and step if enabled, on one input. An error is recorded and returned.

        observers  of this pass, besides those that the run asks for
        """
        record = PassRecord(
            index=index,
            source=path.name,
            rank=self.world.rank,
            data_rank=self.world.data_rank,
            warmup=index < self.spec.measure.warmup,
            traced=self.trace is not None,
        )
        recorded: Recorded | None = None
        self.tracker.begins(index, path.name, place_in_window=self.window.num_passes)
        try:
            call = read_call(path)
            batch = replace(call.micro_batch(), padding_predicts=self._padding_predicts)
            section = InputSection(
                rows=batch.num_rows,
                padded_tokens=batch.num_padded_tokens,
                real_tokens=batch.num_real_tokens,
                row_tokens=batch.attention_mask_BS.sum(dim=1).tolist(),
                input_digest=digest_of_inputs(batch),
                trains=batch.trains,
            )
            record = replace(record, input=section)
            weights = self.same_weights.check(call.weights)
            recorded = recorded_in(call, batch, self.spec.measure.loss, weights)
            recorded = without_router_loss(recorded, call, self.source.config)
            self.tracker.has_read(batch.num_rows, batch.num_padded_tokens, batch.num_real_tokens)
            batch = tokens_for(self.spec.measure.loss, add_model_positions(batch, self.source.config))
            record, replayed = self._replay(record, call, batch, observers)
            return Pass(record, recorded, replayed), None
        except SystemExit as error:
            left = RuntimeError(f"sys.exit({error.code!r}) was called").with_traceback(error.__traceback__)
            failed = replace(record, error=str(left), error_type="SystemExit")
            return Pass(failed, recorded, Replayed()), left
        except Exception as error:
            failed = replace(record, error=one_line(in_flags(error)), error_type=type(error).__name__)
            return Pass(failed, recorded, Replayed()), error

    def _replay(
        self, record: PassRecord, call: Call, batch: MicroBatch, observers: Sequence[PassObserver]
    ) -> tuple[PassRecord, Replayed]:
        """Run the pass of a capture that was read, and return its record, and what a verdict needs besides."""
        gradients = call.step.gradients if call.step is not None else None
        self.window.enter(record.index, self.same_weights.by_own_name(gradients) if gradients is not None else {})
        inputs = self._inputs(record.index, call, batch)
        self._latest = inputs

        looked_at = self._observers(record.index, inputs)
        try:
            outcome = run_pass(self.actor.backend, inputs, self._clock, [*observers, *looked_at.each])
        except (Exception, SystemExit):
            self.window.break_off()
            self._broke_off = True
            raise
        self.window.has_run(backward=inputs.backward)
        replayed = replace(
            self._replayed(outcome, inputs, call, batch),
            loss_gain=looked_at.gain.gain if looked_at.gain is not None else 1.0,
            gradient=looked_at.gradient.samples if looked_at.gradient is not None else None,
        )
        if self.details_folder is not None:
            token_log_probs.keep(self.details_folder, record.index, record.rank, replayed.action_log_probs)
        order = -1 if inputs.reverses else 1
        result = ResultSection(
            loss=outcome.loss.item(),
            row_log_probs=outcome.log_probs_BA.double().sum(dim=1).tolist()[::order],
            row_action_tokens=inputs.fed.action_mask_BA.sum(dim=1).tolist()[::order],
            weight=inputs.weight,
            grad_norm=outcome.grad_norm,
        )
        fed_tokens = inputs.fed.input_ids.numel() * self.spec.actor.parallel.ring
        record = replace(record, input=replace(record.input, fed_tokens=fed_tokens), cost=outcome.cost, result=result)
        record = looked_at.add_to(record)
        if self.trace:
            self.trace.write(record.index, record.source, num_columns=inputs.num_columns)
        if not self.window.num_passes:
            self.num_settled = record.index + 1
        return record, replayed

    def _observers(self, index: int, inputs: PassInputs) -> PassObservers:
        """Return what this run looks at in one pass. The same on every rank."""
        backend, ends_window = self.actor.backend, inputs.ends_window
        has_samples = ends_window and self.window.has_gradient_samples(index)
        folder = self.details_folder if ends_window else None
        return PassObservers(
            first_uses=self._first_uses,
            compilation=CompilationCounter(),
            trace=TraceObserver(self.trace) if self.trace else None,
            position=PositionMarker(self.tracker),
            gain=GainProbe() if self._objective is not None else None,
            gradient=GradientProbe(backend, self.window.wanted) if has_samples else None,
            sketch=SketchProbe(backend, folder, index, self.world) if folder is not None else None,
            check=LossCheck(self.search.is_any, self._search_before_step) if inputs.steps else None,
        )

    def _inputs(self, index: int, call: Call, batch: MicroBatch) -> PassInputs:
        """Lay a micro-batch out on the device, with its loss, and its place in the window. All ranks must call this."""
        reverses, measure = self.spec.inputs.reverse_rows, self.spec.measure
        backward = batch.trains and measure.backward
        ends_window = self.window.is_last(backward=backward)
        recorded = self._recorded_for_objective(call, batch)
        fed = inputs_for(with_rows_reversed(batch) if reverses else batch, self.spec.actor, self.source, self.world)
        fed = replace(fed, has_uniform_gradient=backward and recorded is None)
        if recorded is not None:
            fed = replace(fed, kept_logits=self._kept_logits)
        return PassInputs(
            fed=fed,
            loss_of=partial(_stand_in, fed) if recorded is None else self._objective_of(fed, recorded),
            trains=batch.trains,
            autograd=batch.trains,
            backward=backward,
            weight=self._weight(index, recorded),
            ends_window=ends_window,
            steps=ends_window and measure.step,
            random=call.random if self._is_random else {},
            num_columns=batch.sequences_BS.shape[1],
            reverses=reverses,
        )

    def _recorded_for_objective(self, call: Call, batch: MicroBatch) -> RecordedForObjective | None:
        """Return what the job's objective is computed from; None without one. Raises ObjectiveError if it lacks it."""
        if self._objective is None:
            return None
        recorded = RecordedForObjective.of(call, batch)
        self._objective.check(recorded)
        return recorded

    def _weight(self, index: int, recorded: RecordedForObjective | None) -> float:
        """Return the factor on the pass's loss in the gradient of its window, which averages over its passes."""
        num_passes = self.window.size * self.world.num_data_ranks
        if recorded is not None:
            assert self._objective is not None
            return num_passes / recorded.num_job_ranks if self._objective.is_share_of_window else 1.0
        if num_passes == 1 or self.spec.measure.window is not WindowWeights.TOKENS:
            return 1.0
        return self.window.token_weight(index, self.world.data_rank)

    def _objective_of(self, fed: ActorInputs, recorded: RecordedForObjective) -> Callable[[Tensor], Tensor]:
        """Return the loss of the pass as a function of its log-probs, whose rows may be reversed."""
        assert self._objective is not None
        objective, on_device = self._objective, recorded.to(self.world.device)
        reverses, kept_logits = self.spec.inputs.reverse_rows, self._kept_logits
        counts = self.window.token_counts() or [int(fed.action_mask_BA.sum())]

        def in_captured_order(tensor: Tensor) -> Tensor:
            return tensor.flip(0) if reverses else tensor

        def loss_of(log_probs_BA: Tensor) -> Tensor:
            return objective(
                ObjectiveInputs(
                    log_probs_BA=in_captured_order(log_probs_BA),
                    action_mask_BA=in_captured_order(fed.action_mask_BA),
                    recorded=on_device,
                    num_window_tokens=sum(counts),
                    num_window_passes=len(counts),
                    kept_logits=kept_logits,
                    is_fed_in_reverse=reverses,
                )
            )

        return loss_of

    def _search_before_step(self, inputs: PassInputs) -> str | None:
        """Search the forward alone: the window's gradient is still to be stepped with."""
        return self.search.run(self.actor.backend, replace(inputs, backward=False), is_stepped=False)

    def _replayed(self, outcome: PassOutcome, inputs: PassInputs, call: Call, batch: MicroBatch) -> Replayed:
        """Collect the log-probs that the job recorded, or all where they are written down."""
        own_BA, first = find_own_targets(with_rows_reversed(batch) if inputs.reverses else batch)
        action_mask_BA, is_reversed = inputs.fed.action_mask_BA, inputs.reverses
        has_all_tokens = any(name.endswith("_values") for name in call.outputs)
        return Replayed(
            token_log_probs=sampled_log_probs(
                outcome.log_probs_BA,
                action_mask_BA & own_BA.to(self.world.device),
                token_places(call, *batch.sequences_BS.shape),
                first=first,
                is_reversed=is_reversed,
            ),
            action_log_probs=action_log_probs(outcome.log_probs_BA, action_mask_BA, is_reversed=is_reversed)
            if has_all_tokens or self.details_folder is not None
            else (),
        )


def _stand_in(fed: ActorInputs, log_probs_BA: Tensor) -> Tensor:
    return negated_mean(log_probs_BA, fed)
