"""Check that the loss falls when the actor trains: on one row until it is memorised, and on several inputs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from capture.file_format.micro_batch import MicroBatch
from replay.commands.diagnose.untimed_actor import Trial
from replay.output.check import Check, Status
from replay.output.text import counted

ROW_LOSS = 0.1  # below it one row counts as memorised, if ROW_SHARE holds too
ROW_SHARE = 0.5  # of the first loss
INPUTS_SHARE = 0.8  # of the first loss: below it several inputs are being learned
STANDS = 0.01  # relative: a smaller change is none, or is due to weight decay


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The losses before each step, and after the last."""

    losses: tuple[float, ...]
    goal: float
    learning_rate: float

    @property
    def reached(self) -> bool:
        return self.losses[-1] <= self.goal

    def check(self, name: str) -> Check:
        text = (
            f"loss {self.losses[0]:.4g} to {self.losses[-1]:.4g} in {counted(len(self.losses) - 1, 'step')}, "
            f"wanted {self.goal:.3g}, learning rate {self.learning_rate:.2g}"
        )
        if self.reached:
            return Check(name=name, status=Status.OK, found=text)
        return Check(name=name, status=Status.FAILED, found=text, advice=self._advice(), needed=True)

    def _advice(self) -> str:
        """Return what the shape of the curve suggests."""
        first, lowest, last = self.losses[0], min(self.losses), self.losses[-1]
        lower = f"Try: --learning-rate {self.learning_rate / 10:.1g}"
        if not math.isfinite(last):
            return f"it is {last} at step {len(self.losses) - 1}: the steps are too large. {lower}"
        if max(self.losses) - lowest <= STANDS * abs(first):
            return (
                "it hardly moves: look for frozen parameters, a loss that none moves, and steps that are not made. "
                f"Try: --learning-rate {self.learning_rate * 10 or 1e-3:.1g}"
            )
        if last > first:
            return f"it rises: the steps are too large, or go the wrong way. {lower}"
        if last > 1.5 * lowest:
            return f"it fell to {lowest:.4g} and rose again: the steps are too large. {lower}"
        half = self.losses[(len(self.losses) - 1) // 2]
        if half - last > 0.1 * (first - last):
            return f"it is still falling. Try: --steps {4 * (len(self.losses) - 1)}"
        return (
            f"it stands at {last:.4g}: look for frozen parameters, dropout, or a target that no input tells. "
            f"Try: --learning-rate {self.learning_rate * 5:.1g}, and then {self.learning_rate / 5:.1g}"
        )


def learned(
    trial: Trial,
    batches: Sequence[MicroBatch],
    *,
    num_steps: int,
    goal_of: Callable[[float], float],
) -> Curve:
    """Train on all `batches` in each step, until the goal derived from the first loss is reached, or for `num_steps`.

    The loss is the mean over the batches of all data ranks, so that all ranks stop together.
    """
    losses: list[float] = []
    while True:
        own = sum(trial.train(batches, steps=len(losses) < num_steps)) / len(batches)
        everyones = trial.world.gather(own)
        losses.append(sum(everyones) / len(everyones))
        curve = Curve(losses=tuple(losses), goal=goal_of(losses[0]), learning_rate=trial.spec.learning_rate)
        ends = curve.reached or len(losses) > num_steps or not math.isfinite(losses[-1])
        if ends:
            return curve


def goal_of_a_row(first: float) -> float:
    return min(ROW_LOSS, ROW_SHARE * first)


def goal_of_inputs(first: float) -> float:
    return INPUTS_SHARE * first
