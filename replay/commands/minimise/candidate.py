"""Describe what one trial of `replay minimise` replays: parts of captures, options, processes."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from actor_init.as_json import to_json
from replay.options.option_parsing import Toggle, command_line, toggles, with_values
from replay.options.spec import ReplaySpec

NAMING = ("--loss", "--model", "--weights", "--adapter", "--deepspeed-config", "--load-state")  # files and folders
SET_HERE = ("inputs", "input_file", "skip_inputs", "max_inputs", "log_folder")  # by minimise, in every trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The rows, and the columns from `first` to before `end`, of the capture with the number `source`."""

    source: int
    rows: tuple[int, ...]
    first: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """What a trial replays: `spec` has the defaults of what minimise sets in every trial."""

    cuts: tuple[Cut, ...]
    spec: ReplaySpec
    num_processes: int = 1

    @classmethod
    def of(cls, cuts: Sequence[Cut], spec: ReplaySpec, num_processes: int) -> "Candidate":
        return cls(cuts=tuple(cuts), spec=without_inputs(spec), num_processes=num_processes)

    @property
    def arguments(self) -> list[str]:
        return command_line(self.spec)

    @property
    def contents(self) -> str:
        """Return a digest of what its inputs hold."""
        return hashlib.sha256(json.dumps(to_json(self.cuts)).encode()).hexdigest()

    @property
    def given(self) -> list[Toggle]:
        """Return the options that are given."""
        return given_in(self.spec)

    def with_cut(self, place: int, **changes: Any) -> "Candidate":
        cuts = list(self.cuts)
        cuts[place] = replace(cuts[place], **changes)
        return replace(self, cuts=tuple(cuts))

    def without(self, dropped: Sequence[Toggle]) -> "Candidate":
        """Return the candidate without these options. Raises UsageError if the rest contradict each other."""
        return replace(self, spec=with_values(self.spec, [(toggle, toggle.default) for toggle in dropped]))

    def with_option(self, flag: str, value: Any) -> "Candidate":
        """Return the candidate with the option `flag` set. Raises UsageError if that contradicts the others."""
        toggle = next(one for one in toggles() if one.flag == flag)
        return replace(self, spec=with_values(self.spec, [(toggle, value)]))


def given_in(spec: ReplaySpec) -> list[Toggle]:
    """Return the options of a spec that are not at their default and that minimise does not set itself."""
    given: dict[tuple[str, str], Toggle] = {}
    for toggle in toggles():
        value = toggle.value_in(spec)
        is_default = value == toggle.default or (toggle.is_switch and toggle.sets != value)
        if toggle.field not in SET_HERE and not is_default:
            given.setdefault((toggle.part, toggle.field), toggle)  # a field's own option comes before its switches
    return list(given.values())


def without_inputs(spec: ReplaySpec) -> ReplaySpec:
    """Return the spec with the defaults of what minimise sets in every trial."""
    defaults = {toggle.field: toggle.default for toggle in toggles() if toggle.field in SET_HERE}
    log_folder = defaults.pop("log_folder")
    return replace(spec, inputs=replace(spec.inputs, **defaults), measure=replace(spec.measure, log_folder=log_folder))
