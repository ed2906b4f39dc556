"""Declare the options that commands of many runs share, and begin or continue the campaign that they ask for.

Nothing here is heavy: torch and the like are imported by the command's `runs.py`, when its work begins.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from capture.facts import flag_of
from replay.options.option_parsing import CommandAction, refuse_typed
from replay.options.path_checks import check_paths
from replay.options.spec import ReplaySpec, check_result_folder
from replay.processes.launch import refuse_launcher


def continue_option(command: str) -> Any:
    return typer.Option(
        None,
        "--continue",
        metavar="FOLDER",
        help=f"Run what is missing in a folder that `replay {command}` left, and report all of it.",
    )


def run_limit_option(run: str, seconds: float = 600.0) -> Any:
    """Return --run-limit. `run` says what it limits, such as `one run`."""
    return typer.Option(
        seconds, min=1.0, metavar="SECONDS", show_default=False, help=f"For {run}. (default: {seconds:.0f})"
    )


def time_limit_option(run: str) -> Any:
    """Return --time-limit. `run` says what is not started any more, such as `run`."""
    return typer.Option(None, min=0.0, metavar="SECONDS", help=f"Start no {run} after so long; --continue goes on.")


def at_once_option(help: str) -> Any:
    return typer.Option(None, min=1, metavar="N", help=help)


def make_begin_action(command: str, paths: ReplaySpec | None, *arguments: Any, **options: Any) -> CommandAction:
    """Return the work of a new campaign: `begin(*arguments, **options)` of the command's `runs.py`.

    paths  what its options name must be on this machine; None: it may be elsewhere
    """

    def begin() -> int:
        refuse_launcher(command)
        if paths is not None:
            check_paths(paths)
        runs = import_module(f"replay.commands.{command}.runs")
        return int(runs.begin(*arguments, **options))

    return begin


def make_continue_action(
    command: str, folder: Path, typed: Mapping[str, Any], *arguments: Any, **options: Any
) -> CommandAction:
    """Return the work of --continue: `resume(folder, *arguments, **options)` of the command's `runs.py`.

    typed  the options that it takes from the folder, by parameter name

    Raises UsageError if one of these was given, that is, if it is not None.
    """
    refuse_typed(typed, "--continue takes its options from that folder")

    def resume() -> int:
        refuse_launcher(command)
        check_result_folder(command, folder)
        runs = import_module(f"replay.commands.{command}.runs")
        return int(runs.resume(folder, *arguments, **options))

    return resume


def list_words(options: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line that set options, by parameter name; None and False set nothing."""
    words: list[str] = []
    for name, values in options.items():
        for value in values if isinstance(values, list) else [values]:
            if value is True:
                words.append(flag_of(name))
            elif value is not None and value is not False:
                words += [flag_of(name), str(value)]
    return words
