"""Read what is typed behind `replay`."""

from collections.abc import Sequence

from replay.command_line.cli import action_of
from replay.options.spec import ReplaySpec


def spec_of(words: Sequence[str]) -> ReplaySpec:
    spec: ReplaySpec = action_of(words).args[0].spec
    return spec
