"""Look at torch's random generators before and after a pass's forward."""

from dataclasses import replace

import torch
from torch import Tensor

from actor_init.spec import ParallelSpec
from capture.file_format.micro_batch import MicroBatch
from capture.file_format.tensor_codec import RandomStates
from capture.record.generator_marks import CUDA, GeneratorSnapshot, count_drawn_numbers, take_generator_snapshot
from replay.runner.run_pass import PassInputs, PassObserver
from replay.verdict.random_draws import RandomDraws
from replay.verdict.recorded_pass import RecordedPass, ReplayedPass
from replay.watch.progress import RankPhase


class GeneratorObserver(PassObserver):
    """Takes the states of the generators where the forward begins and where it ends, as the recorder does in a job."""

    def __init__(self, device: torch.device) -> None:
        self._cuda_device = device if device.type == "cuda" else None
        self._before: GeneratorSnapshot | None = None
        self._after: GeneratorSnapshot | None = None

    def before_phase(self, phase: RankPhase) -> None:
        if phase is RankPhase.FORWARD:
            self._before = take_generator_snapshot(self._cuda_device)

    def after_forward(self, log_probs_BA: Tensor, loss: Tensor) -> None:
        self._after = take_generator_snapshot(self._cuda_device)

    @property
    def draws(self) -> RandomDraws | None:
        """The random numbers of the forward; None if it did not end."""
        if self._before is None or self._after is None:
            return None
        return RandomDraws.from_marks(self._before.to_marks(), self._after.to_marks())

    @property
    def has_drawn(self) -> bool:
        """Did the forward draw a random number?"""
        return self.draws is not None and self.draws.has_any


class RandomDrawCounter:
    """Counts random numbers in one pass of a run, since counting draws them all again."""

    def __init__(self) -> None:
        self._has_counted = False

    def add_counts(
        self, recorded: RecordedPass, replayed: ReplayedPass, states: RandomStates
    ) -> tuple[RecordedPass, ReplayedPass]:
        """Return both with how many random numbers their forwards drew, if this is the pass to count them in.

        That is the first pass of the run whose generators began where the job's did and ended elsewhere. Only what a
        CPU's generator drew can be counted. Other passes are returned unchanged.

        states  of the generators before the forward
        """
        job, replay = recorded.draws, replayed.draws
        if self._has_counted or job is None or replay is None:
            return recorded, replayed
        if job.after == replay.after or job.before != replay.before:
            return recorded, replayed
        self._has_counted = True
        if CUDA in job.after:
            return recorded, replayed
        job, replay = (replace(draws, num_drawn=count_drawn_numbers(states, draws.after)) for draws in (job, replay))
        return replace(recorded, draws=job), replace(replayed, draws=replay)


def was_fed_as_captured(inputs: PassInputs, batch: MicroBatch, parallel: ParallelSpec) -> bool:
    """Tell whether the model was fed the captured rows, each token in its place: so a random mask has its shape."""
    is_whole = parallel.ring == 1 and not parallel.sequence_parallel
    actor_inputs = inputs.actor_inputs
    if not is_whole or inputs.has_reversed_rows or actor_inputs.input_ids.shape != batch.sequences_BS.shape:
        return False
    index = actor_inputs.captured_index.flatten()
    is_in_place = (index < 0) | (index == torch.arange(len(index), device=index.device))
    return bool(is_in_place.all())
