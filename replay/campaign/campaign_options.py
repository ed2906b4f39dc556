"""Declare the options that commands of many runs share, and begin or continue the campaign that they ask for.

The command line and Python call the same `<command>` of `command.py`, which checks what it is given and returns a
`CampaignAction`: the command line calls that, and Python takes its result.

Nothing here is heavy: torch and the like are imported by the command's `runs.py`, when its work begins.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from actor_init.spec import UsageError
from capture.facts import Setting, flag_of
from replay.options.option_parsing import CommandAction, check_options, list_options, refuse_typed, unwrap_optional
from replay.options.path_checks import check_paths
from replay.options.spec import ReplaySpec, check_result_folder
from replay.options.value_checks import check_value
from replay.processes.error_reports import read_own_rank
from replay.processes.launch import refuse_launcher, refuse_process_group

if TYPE_CHECKING:
    from replay.campaign.result import CampaignResult


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignAction:
    """The work of a command of many replays, whose options have been checked, or that of a rank of such a command.

    run      does it, prints to the file that it gets, and returns the result
    as_json  print the result alone
    """

    run: Callable[[IO[str]], "CampaignResult"]
    as_json: bool

    def __call__(self) -> int:
        """Do it for the command line, and return the exit code."""
        result = self.run_silently() if self.as_json else self.run(sys.stdout)
        if self.as_json and read_own_rank() == 0:
            from replay.output.printing import print_json

            print_json(result)
        return result.exit_code

    def run_silently(self) -> Any:
        """Do it without a word, and return the result."""
        from replay.output.printing import open_silence

        with open_silence() as screen:
            return self.run(screen)


def call_command(command: Callable[..., CommandAction], own: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Run a command of many replays from Python, and return its result. The arguments are those of `check_call`.

    Raises UsageError for a name or a value that cannot be, and where this process is one of several.
    """
    values, options = check_call(command, own, options)
    action = command(json=False, **values, **options)
    assert isinstance(action, CampaignAction)
    return action.run_silently()


def check_call(
    command: Callable[..., CommandAction], own: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a command's own options and those of its replays, which a program gave, as they would be typed.

    own      its own options, by the names of its parameters; None stands for one that is not given
    options  those of a replay

    Raises UsageError for a name or a value that cannot be, and where this process is one of several.
    """
    name = command.__name__
    refuse_process_group(name)
    parameters = inspect.signature(command).parameters
    of_replays = {option.parameter for option in list_options()} & parameters.keys() - own.keys()
    options = check_options(options, of_replays, owner=f"replay.{name}", command=f"replay {name}")
    return {option: _check_value(parameters[option], value) for option, value in own.items()}, options


def _check_value(parameter: inspect.Parameter, value: Any) -> Any:
    """Return the value of a command's own option as typer would give it: checked, or its default."""
    declared = parameter.default
    if value is None:
        return getattr(declared, "default", None)
    annotation = parameter.annotation
    kind = unwrap_optional(get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation)
    if kind is typer.Context:
        return value
    if kind == list[str]:
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise UsageError.not_allowed(parameter.name, value, "Give a list")
        return [check_value(parameter.name, text, str) for text in value]
    return check_value(parameter.name, value, kind, min=getattr(declared, "min", None), max=math.inf)


def join_values(values: Any) -> str | None:
    """Return one value, or several, as the command line takes them: with commas between. None: none was given."""
    if values is None:
        return None
    several = isinstance(values, Iterable) and not isinstance(values, str)
    return ",".join(map(str, values if several else [values]))


def make_begin_action(
    command: str, paths: ReplaySpec | None, *arguments: Any, as_json: bool, **options: Any
) -> CampaignAction:
    """Return the work of a new campaign: `begin(*arguments, screen=..., **options)` of the command's `runs.py`.

    paths  what its options name must be on this machine; None: it may be elsewhere
    """

    def begin(screen: IO[str]) -> Any:
        refuse_launcher(command)
        if paths is not None:
            check_paths(paths)
        runs = import_module(f"replay.commands.{command}.runs")
        return runs.begin(*arguments, screen=screen, **options)

    return CampaignAction(run=begin, as_json=as_json)


def make_continue_action(
    command: str, folder: Path, typed: Mapping[str, Any], *arguments: Any, as_json: bool, **options: Any
) -> CampaignAction:
    """Return the work of --continue: `resume(folder, *arguments, screen=..., **options)` of the command's `runs.py`.

    typed  the options that it takes from the folder, by parameter name

    Raises UsageError if one of these was given, that is, if it is not None.
    """
    refuse_typed(typed, f"{Setting('continue_')} takes its options from that folder")

    def resume(screen: IO[str]) -> Any:
        refuse_launcher(command)
        check_result_folder(command, folder)
        runs = import_module(f"replay.commands.{command}.runs")
        return runs.resume(folder, *arguments, screen=screen, **options)

    return CampaignAction(run=resume, as_json=as_json)


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
