"""One micro-batch through the actor, measured. The only caller of a backend."""

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from actor_init.backends import Backend, open_backend
from actor_init.compiling import num_graphs
from actor_init.model import ModelSource, lasting_config
from actor_init.packing import ActorInputs, actor_inputs, padded_to, sliced
from actor_init.ring import may_zigzag, ring_slice
from actor_init.spec import ActorSpec, PadTo
from actor_init.world import World
from capture.capture_file import read_call
from capture.micro_batch import CaptureError, MicroBatch, with_rows_reversed
from capture.reproduction import restore_random_states
from replay.digests import digest_of_inputs
from replay.loss import negated_mean, tokens_for
from replay.meter import Meter
from replay.position import Phase, Tracker
from replay.recorded import Recorded, recorded_in
from replay.records import PassRecord
from replay.run_trace import RunTrace
from replay.same_weights import SameWeights
from replay.same_work import dropouts
from replay.spec import RunSpec
from replay.wording import one_line


class ReopeningError(RuntimeError):
    """A pass broke off, and the actor could not be opened again."""


class ReopenedActor:
    """A backend that is opened again after a pass that broke off: its leftovers would falsify the next pass."""

    def __init__(self, spec: ActorSpec, source: ModelSource, world: World, load_state: Path | None = None) -> None:
        self._arguments = (spec, source, world)
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
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            self.backend = self._opened()
        except Exception as error:
            raise ReopeningError(f"the actor could not be opened again after the failed pass: {error}") from error


class PassRunner:
    """One pass after the other through the actor, and where the accumulation window stands."""

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
    ) -> None:
        self.spec = spec
        self.world = world
        self.source = source
        self.actor = actor
        self.meter = meter
        self.tracker = tracker
        self.same_weights = same_weights
        self.recorded: Recorded | None = None  # what the latest input says of the job; None if it could not be read
        self.trace = trace
        self.num_settled = 0  # inputs after which no accumulation window was left open
        self._num_in_window = 0
        self._broke_off = False
        self._reverses = spec.inputs.reverse_rows
        self._is_random = bool(dropouts(lasting_config(source.config)))

    def mend(self) -> None:
        """Open the actor again if a pass broke off. Call it once the error is dropped: its frames hold the model."""
        if self._broke_off:
            self.actor.reopen()
            if self.trace:
                self.trace.attach(self.actor.backend)
            self._broke_off = False

    def replay(self, index: int, path: Path) -> tuple[PassRecord, Exception | None]:
        """One input through forward, and backward and step if it is to. What goes wrong is recorded and returned."""
        known: dict[str, Any] = {
            "index": index,
            "source": path.name,
            "rank": self.world.rank,
            "data_rank": self.world.data_rank,
            "warmup": index < self.spec.measure.warmup,
            "traced": self.trace is not None,
        }
        self.tracker.begins(index, path.name, place_in_window=self._num_in_window)
        self.recorded = None
        try:
            call = read_call(path)
            batch = call.micro_batch()
            known |= {
                "rows": batch.num_rows,
                "padded_tokens": batch.num_padded_tokens,
                "real_tokens": batch.num_real_tokens,
                "row_tokens": batch.attention_mask_BS.sum(dim=1).tolist(),
                "input_digest": digest_of_inputs(batch),
                "trains": batch.trains,
            }
            weights = self.same_weights.check(call.weights)
            self.recorded = recorded_in(call, batch, self.spec.measure.loss, weights)
            self.tracker.has_read(batch.num_rows, batch.num_padded_tokens, batch.num_real_tokens)
            batch = tokens_for(self.spec.measure.loss, batch)
            random = call.random if self._is_random else {}
            measured = self._measured(with_rows_reversed(batch) if self._reverses else batch, random)
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

    def _measured(self, batch: MicroBatch, random: Mapping[str, Any]) -> dict[str, Any]:
        """`random` are the generators' states to begin with; empty: whatever they are."""
        backward = batch.trains and self.spec.measure.backward
        last_of_window = backward and self._num_in_window + 1 == self.spec.actor.grad_accumulation
        step = last_of_window and self.spec.measure.step
        inputs = inputs_for(batch, self.spec.actor, self.source, self.world)
        graphs_before = num_graphs()
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
                    loss = negated_mean(log_probs_BA, inputs)
                self.tracker.at(Phase.WAITING)
                if self.world.world_size > 1:
                    with self.meter.phase("wait"):
                        self.world.meet()
                if backward:
                    self.tracker.at(Phase.BACKWARD)
                    with self.meter.phase("backward"):
                        self.actor.backend.backward(loss)
                grad_norm = None
                if self.trace and last_of_window:
                    self.trace.end_window()
                if step:
                    self.tracker.at(Phase.STEP)
                    with self.meter.phase("step"):
                        grad_norm = self.actor.backend.end_window(step=True)
            self.tracker.at(Phase.SETTLING)
            phases, seconds = self.meter.end_pass()
            self.tracker.at(Phase.ENDING)
            if last_of_window and not step:
                grad_norm = self.actor.backend.end_window(step=False)
        except (Exception, SystemExit):
            self._num_in_window = 0
            self._broke_off = True
            raise
        self._num_in_window = 0 if last_of_window else self._num_in_window + backward
        wait = phases.pop("wait", None)
        return {
            "fed_tokens": inputs.input_ids.numel() * self.spec.actor.parallel.ring,
            "phases": phases,
            "seconds": seconds,
            "wait_seconds": wait.seconds if wait else None,
            "loss": loss.item(),
            "row_log_probs": log_probs_BA.detach().double().sum(dim=1).tolist()[:: -1 if self._reverses else 1],
            "row_action_tokens": inputs.action_mask_BA.sum(dim=1).tolist()[:: -1 if self._reverses else 1],
            "grad_norm": grad_norm,
            "new_graphs": num_graphs() - graphs_before,
        }


def inputs_for(batch: MicroBatch, spec: ActorSpec, source: ModelSource, world: World) -> ActorInputs:
    """`batch` on the device, padded and sliced as the toggles say. Raises CaptureError if it is no input of the model.

    For all ranks to call.
    """
    check_vocabulary(batch, source)
    inputs = actor_inputs(batch, packing=spec.packing)
    if spec.pad_to is PadTo.LONGEST:
        inputs = padded_to(inputs, max(world.gather(inputs.input_ids.shape[1])))
    if spec.parallel.ring > 1:
        assert inputs.cu_seq_lens is not None
        ring = ring_slice(
            inputs.cu_seq_lens,
            world.ring_group,
            head_stride=spec.parallel.ring_head_stride,
            may_zigzag=may_zigzag(source.config),
        )
        inputs = sliced(inputs, ring)
    return inputs.to(world.device)


def check_vocabulary(batch: MicroBatch, source: ModelSource) -> None:
    """Raises CaptureError for token ids that the model does not have."""
    largest, size = int(batch.sequences_BS.max()), source.config.get_text_config().vocab_size
    if largest >= size:
        raise CaptureError(
            f"{batch.origin.source}: token id {largest} is beyond the model's vocabulary of {size}; "
            "these inputs belong to another model. Name it with --model"
        )
