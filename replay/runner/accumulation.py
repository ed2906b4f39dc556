"""Follow the open accumulation window of a replay: which passes it has, and how each weighs in its gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from capture.file_format.parameter_samples import Sample
from replay.resolution.windows import Round, weight_of


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
