"""Go on with the campaign that a command left in a folder, as `--continue` asks."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from replay.options.option_parsing import NOT_WITH_CONTINUE, Action, refuse_typed
from replay.options.spec import check_left_by
from replay.processes.launch import refuse_launcher


def going_on(command: str, folder: Path, typed: Mapping[str, Any], *arguments: Any, **named: Any) -> Action:
    """Return the work of --continue: `go_on(folder, *arguments, **named)` of the command's `runs.py`.

    typed  the options that it takes from the folder, by parameter name

    Raises UsageError if one of these was given, not None.
    """
    refuse_typed(typed, NOT_WITH_CONTINUE)

    def go_on() -> int:
        refuse_launcher(command)
        check_left_by(command, folder)
        runs = import_module(f"replay.commands.{command}.runs")  # torch and the like, which take seconds
        return int(runs.go_on(folder, *arguments, **named))

    return go_on
