"""Define what an objective's module has to say: its loss, what it needs of a capture, and its words for the header."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from replay.objective.inputs import ObjectiveInputs, Recorded
from replay.options.spec import ObjectiveSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """A tensor that a capture must have, under one of some names; `or_else` says what to type where it has none."""

    names: tuple[str, ...]
    or_else: str = ""


def need_nothing(recorded: Recorded, spec: ObjectiveSpec) -> Iterable[Need]:
    return ()


def never(spec: ObjectiveSpec) -> bool:
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """What an objective computes, each part by the settings of --loss.

    loss                of a pass, a tensor of one number. Raises ObjectiveError
    describe            its settings, for the header
    needs               what a capture must have. Shapes are checked in the pass
    asks_entropies      does `loss` ask for the inputs' entropies?
    asks_logits         may it ask for their logits, which are then computed whole?
    is_share_of_window  is a pass's loss its share of the step's, so that the passes of a step add up?
    """

    loss: Callable[[ObjectiveInputs, ObjectiveSpec], Any]
    describe: Callable[[ObjectiveSpec], list[str]]
    needs: Callable[[Recorded, ObjectiveSpec], Iterable[Need]] = need_nothing
    asks_entropies: Callable[[ObjectiveSpec], bool] = never
    asks_logits: bool = False
    is_share_of_window: Callable[[ObjectiveSpec], bool] = never
