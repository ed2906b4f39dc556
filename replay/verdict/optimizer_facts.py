"""Tell from a recording alone how the optimizer's own count of steps goes on: whether its state was lost or left out.

An optimizer counts its steps in its state, and the recording counts those that it saw. Where the counts differ, the
state is another one than the steps of the recording made.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from capture.file_format.optimizer_step import OptimizerStep
from replay.output.text import pluralise
from replay.verdict.recorded_pass import RecordedPass


class StateFactKind(StrEnum):
    """What the count of steps shows.

    BEGINS_WITH_STATE   the optimizer held a state at the first step that it took in the recording
    BEGINS_WITH_ZEROS   it had counted steps by then, and its moments were 0: their bias is corrected otherwise
    LOST                its state was gone, or begun anew, in the midst of the recording
    REPLACED            it had counted fewer steps than before, as by a state of an earlier step
    COUNTS_TOO_FEW      it counted fewer steps than it was seen to take: it left some out
    COUNTS_TOO_MANY     it counted more steps than it was seen to take
    UNEVEN              some of its parameters have counted more steps than others
    """

    BEGINS_WITH_STATE = "begins with a state"
    BEGINS_WITH_ZEROS = "begins with moments of 0"
    LOST = "loses its state"
    REPLACED = "goes back to an earlier state"
    COUNTS_TOO_FEW = "counts too few steps"
    COUNTS_TOO_MANY = "counts too many steps"
    UNEVEN = "counts unevenly"


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFact:
    """One thing that the count of steps shows.

    step      number of the recorded step before which it shows, from 0
    counted   the steps that the optimizer had counted by then; None where it had no state
    expected  the steps that it would have counted, by its count at the recorded step before; None at the first one
    """

    kind: StateFactKind
    step: int
    counted: int | None
    expected: int | None = None

    def describe(self) -> str:
        """Say it in a sentence without a full stop. Steps count from 1, as people count them."""
        place, counted = f"step {self.step + 1}", pluralise(self.counted or 0, "step")
        match self.kind:
            case StateFactKind.BEGINS_WITH_STATE if self.counted is None:
                return f"the optimizer held a state before {place}, the first that was recorded"
            case StateFactKind.BEGINS_WITH_STATE:
                return f"the optimizer held the state of {counted} before {place}, the first that was recorded"
            case StateFactKind.BEGINS_WITH_ZEROS:
                return f"the optimizer had counted {counted} before {place}, and its moments were 0"
            case StateFactKind.LOST if self.counted is None:
                return f"the optimizer had no state before {place}, though it had stepped"
            case StateFactKind.LOST | StateFactKind.REPLACED:
                return f"the optimizer had counted {counted} before {place}, after {self.expected} in the recording"
            case StateFactKind.COUNTS_TOO_FEW | StateFactKind.COUNTS_TOO_MANY:
                return f"the optimizer had counted {counted} before {place}, and was seen to take {self.expected}"
            case StateFactKind.UNEVEN:
                return f"some parameters' state had counted {counted} before {place}, others' {self.expected}"


def count_stepped_parameters(steps: Sequence[OptimizerStep], num_trainable: int) -> int | None:
    """Count the parameters of the job's optimizer, if each step was of fewer than are trainable; None if not.

    A number of 0 is one that is not known.
    """
    stepped = {sum(group["num_parameters"] for group in step.settings) for step in steps}
    return None if not stepped or max(stepped) >= num_trainable or min(stepped) == 0 else max(stepped)


def read_step_count(step: OptimizerStep) -> int | None:
    """Return how many steps the state had counted before a step; None where it counts none, or was not recorded.

    Of several counts it is the largest: experts that no token took count fewer steps than the others.
    """
    return max(step.state_steps, default=0 if step.has_state is False else None)


def find_state_facts(steps: Iterable[OptimizerStep]) -> list[StateFact]:
    """Find what the counts of one rank's steps show, in the order of the steps.

    What was not recorded, as in a recording that an importer wrote, shows nothing.
    """
    ordered = sorted((step for step in steps if step.has_state is not None), key=lambda step: step.number)
    facts: list[StateFact] = []
    earlier: OptimizerStep | None = None
    for step in ordered:
        facts += _check_first(step) if earlier is None else _check_next(earlier, step)
        if len(step.state_steps) > 1 and (earlier is None or len(earlier.state_steps) < 2):
            facts.append(
                StateFact(
                    kind=StateFactKind.UNEVEN,
                    step=step.number,
                    counted=step.state_steps[-1],
                    expected=step.state_steps[0],
                )
            )
        earlier = step
    return facts


def find_facts_of_ranks(passes: Iterable[RecordedPass]) -> list[StateFact]:
    """Find what the counts of all ranks show; what several ranks show is one fact.

    What is trained from a later step on has counted fewer steps than the rest, as it should.
    """
    by_rank: dict[int | None, list[RecordedPass]] = {}
    for recorded in passes:
        by_rank.setdefault(recorded.rank, []).append(recorded)
    facts: dict[StateFact, None] = {}
    for of_rank in by_rank.values():
        steps = [recorded.step_after for recorded in of_rank if recorded.step_after is not None]
        numbers = {recorded.num_frozen for recorded in of_rank if recorded.weight_comparison.num_parameters}
        is_uneven_rightly = len(numbers) > 1
        for fact in find_state_facts(steps):
            if not (is_uneven_rightly and fact.kind is StateFactKind.UNEVEN):
                facts[fact] = None
    return sorted(facts, key=lambda fact: fact.step)


def _check_first(step: OptimizerStep) -> list[StateFact]:
    """Tell whether the first recorded step was the optimizer's first."""
    counted = step.state_steps[-1] if step.state_steps else None
    values = [value for sample in step.state for elements in sample.values.values() for value in elements]
    if counted and values and not any(values):
        return [StateFact(kind=StateFactKind.BEGINS_WITH_ZEROS, step=step.number, counted=counted)]
    # No step came before the first one that the recording counts, so none explains a state.
    if step.number == 0 and step.has_state and (counted is None or counted > 0):
        return [StateFact(kind=StateFactKind.BEGINS_WITH_STATE, step=step.number, counted=counted)]
    return []


def _check_next(earlier: OptimizerStep, step: OptimizerStep) -> list[StateFact]:
    """Tell whether the optimizer counted the steps from one recorded step to a later one."""
    num_between = step.number - earlier.number
    if not step.has_state:
        is_lost = earlier.has_state or keeps_state(earlier)
        return [StateFact(kind=StateFactKind.LOST, step=step.number, counted=None)] if is_lost else []
    if len(step.state_steps) != 1 or len(earlier.state_steps) > 1:
        return []
    [counted] = step.state_steps
    if not earlier.state_steps and earlier.has_state:
        return []
    before = earlier.state_steps[0] if earlier.state_steps else 0
    expected = before + num_between
    if counted == expected:
        return []
    if counted < before:
        # A state that was begun anew after the earlier step has counted the steps since then at most.
        kind = StateFactKind.LOST if counted < num_between else StateFactKind.REPLACED
    else:
        kind = StateFactKind.COUNTS_TOO_FEW if counted < expected else StateFactKind.COUNTS_TOO_MANY
    return [StateFact(kind=kind, step=step.number, counted=counted, expected=expected)]


def keeps_state(step: OptimizerStep) -> bool:
    """Tell whether an optimizer with these settings has a state after its first step; plain SGD has none."""
    return any(
        "betas" in group or "beta2_decay" in group or "decay_rate" in group or group.get("momentum")
        for group in step.settings
    )
