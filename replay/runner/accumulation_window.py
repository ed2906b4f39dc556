"""Count the passes of the accumulation window that is open on one rank.

A window ends where the job's did, whatever fails in it: a pass that failed counts like one that ran, so that the passes
after it stay in their windows. The gradient that is left then lacks a pass, and the job never had it: it is dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actor_init.backends.protocol import Backend
from capture.file_format.gradient_signature import GradientSignature
from capture.file_format.optimizer_step import Sample
from replay.resolution.job_windows import did_job_average_means
from replay.resolution.windows import InputRound, compute_token_weight, find_training_rounds, find_window_size
from replay.tolerances.job_bounds import SAME_SHARES


@dataclass(kw_only=True, slots=True)
class AccumulationWindow:
    """The accumulation window that is open on one rank. It has the same passes on every rank.

    grad_accumulation passes of each data rank in a window, as --grad-accumulation says; a window of the job may have
                      fewer (`size`)
    rounds            for each pass, the inputs that the data ranks replay at the same time; empty: unknown
    first_index       index of the window's first pass
    num_passes_ended   passes of the window that ran or failed
    is_incomplete     a pass of the window failed, or is not among the inputs
    num_with_gradient passes of the window whose gradient the backend holds
    num_counted       passes of the window that the backend has counted, with those that it was told to skip
    recorded_samples  the job's samples of the window's gradient, by the parameter's name in the replay
    recorded_signatures  the job's signatures of that gradient, by the same name
    """

    grad_accumulation: int
    rounds: Sequence[InputRound] = ()
    first_index: int = 0
    num_passes_ended: int = 0
    is_incomplete: bool = False
    num_with_gradient: int = 0
    num_counted: int = 0
    recorded_samples: dict[str, list[Sample]] = field(default_factory=dict)
    recorded_signatures: dict[str, list[GradientSignature]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Passes of each data rank in this window."""
        return find_window_size(self.rounds, self.first_index, self.grad_accumulation)

    @property
    def is_open(self) -> bool:
        """Is a pass of the window over, and another to come?"""
        return self.num_passes_ended > 0

    def begin_pass(
        self,
        index: int,
        samples: Mapping[str, Sample],
        signatures: Mapping[str, GradientSignature],
        backend: Backend,
    ) -> None:
        """Begin a window with pass `index` if none is open, and add what was recorded of its gradient there."""
        self._begin(index)
        # The backend ends a window when it has counted `grad_accumulation` passes. So it is told to count more than
        # ran: in a short window as many as that lacks, in any window those that failed.
        num_over = self.grad_accumulation - self.size + self.num_passes_ended
        if num_over != self.num_counted:
            backend.skip_passes(num_over - self.num_counted)
            self.num_counted = num_over
        for name, sample in samples.items():
            self.recorded_samples.setdefault(name, []).append(sample)
        for name, signature in signatures.items():
            self.recorded_signatures.setdefault(name, []).append(signature)

    def _begin(self, index: int) -> None:
        if not self.is_open:
            self.first_index, self.recorded_samples, self.recorded_signatures = index, {}, {}
            self.is_incomplete = index < len(self.rounds) and self.rounds[index].is_incomplete
            self.num_with_gradient = 0

    def ends_with_this_pass(self, *, runs_backward: bool) -> bool:
        """Tell whether the pass that has begun, and is not counted yet, is the last one of the window."""
        return runs_backward and self.num_passes_ended + 1 == self.size

    def count_pass(self, *, runs_backward: bool) -> None:
        """Count a pass that succeeded."""
        is_last = self.ends_with_this_pass(runs_backward=runs_backward)
        self.num_with_gradient += runs_backward
        self.num_counted = 0 if is_last else self.num_counted + runs_backward
        self.num_passes_ended = 0 if is_last else self.num_passes_ended + runs_backward

    def count_failed_pass(self, index: int) -> bool:
        """Count pass `index`, which was to run a backward and failed.

        Returns whether the window ended with it and left a gradient in the backend, which then has to be opened again.
        """
        self._begin(index)
        self.is_incomplete = True
        is_last = self.ends_with_this_pass(runs_backward=True)
        self.num_passes_ended = 0 if is_last else self.num_passes_ended + 1
        return is_last and self.num_with_gradient > 0

    def reset_for_new_backend(self) -> None:
        """Begin with a new backend, which holds no gradient and has counted nothing."""
        self.num_with_gradient = self.num_counted = 0

    def has_gradient_samples(self, index: int) -> bool:
        """Did the job record samples of this window's gradient up to pass `index`? Every rank knows from the rounds."""
        return any(input_round.has_gradients for input_round in self.rounds[self.first_index : index + 1])

    def find_job_weight(self, index: int, data_rank: int) -> float:
        """Return the weight of pass `index` of a data rank: by tokens, or 1 where the job averaged the passes' means.

        Where the job weighed them by no such rule, that may be its mistake: they weigh by tokens, and the verdict says
        so.
        """
        token_weight = self.find_token_weight(index, data_rank)
        if abs(token_weight - 1) <= SAME_SHARES or not did_job_average_means(self.rounds, self.first_index, self.size):
            return token_weight
        return 1.0

    def find_token_weight(self, index: int, data_rank: int) -> float:
        """Return the weight of pass `index` of a data rank by tokens; 1 where the rounds do not tell."""
        if index >= len(self.rounds):
            return 1.0
        return compute_token_weight(self.rounds, index, data_rank, self.first_index, self.size)

    def count_tokens(self) -> list[int]:
        """Return the tokens of the loss in each pass of the window, of all data ranks; empty if unknown."""
        window = find_training_rounds(self.rounds, self.first_index, self.size)
        return [num_tokens for input_round in window for num_tokens in input_round.num_tokens]
