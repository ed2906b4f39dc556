"""Refuse a recording whose passes lack what is to be computed from them, before anything heavy is imported."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from actor_init.spec import UsageError
from capture.facts import Setting
from replay.options.declarations import OBJECTIVES
from replay.options.recorded_names import read_first_names
from replay.options.spec import InputsSpec, find_sample_folder


class Recorded(Protocol):
    """What a capture has: its name, its tensors by name, and what could not be kept, with the reason."""

    @property
    def source(self) -> str: ...
    @property
    def tensors(self) -> Collection[str]: ...
    @property
    def left_out(self) -> Mapping[str, str]: ...


def explain_missing(recorded: Recorded, names: Sequence[str]) -> str:
    """Say that a capture has no tensor of these names, what it has, and what to type."""
    name = names[0]
    if (reason := next((recorded.left_out[noted] for noted in names if noted in recorded.left_out), None)) is not None:
        return f"{recorded.source}: {name} was {reason}"
    available = ", ".join(sorted(recorded.tensors))
    return (
        f"{recorded.source}: no {name} in this capture, which has {available}. "
        f"Try: recorder.note({name}=...) in the job (docs/objectives.md)"
    )


def find_lack(inputs: InputsSpec, names: Sequence[str]) -> str | None:
    """Say that none of the first inputs has a tensor of these names; None if one has, or that is not known yet.

    What selects other inputs than the first of a folder is left to those who read them.
    """
    has_first = replace(inputs, inputs=None, max_inputs=None, epochs=1, uneven=False) == InputsSpec()
    passes = read_first_names(inputs.inputs or find_sample_folder()) if has_first else []
    if not passes or any(not recorded.tensors.isdisjoint(names) for recorded in passes):
        return None
    return explain_missing(passes[0], names)


def check_objective_needs(loss: str, inputs: InputsSpec) -> None:
    """Raise UsageError for an objective whose passes lack what it needs in any case."""
    declaration = OBJECTIVES.get(loss)
    if declaration is None or not declaration.needs:
        return
    if (lack := find_lack(inputs, declaration.needs)) is not None:
        raise UsageError(Setting("loss", loss), f": {lack}")
