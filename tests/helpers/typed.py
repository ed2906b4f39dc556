"""Read what is typed behind `replay`."""

from collections.abc import Sequence

from replay.command_line.cli import parse_command_line
from replay.options.spec import ReplaySpec


def spec_of(words: Sequence[str]) -> ReplaySpec:
    spec: ReplaySpec = parse_command_line(words).args[0].spec
    return spec
