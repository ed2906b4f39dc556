"""Format --help, which shows what most people need, and --help-all, which shows every option.

`replay --help` has the options that their fields declare a `brief` line for, and the commands in their groups. A
command's --help has its own options, and a line on those that it shares with `replay`.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from actor_init.spec import UsageError
from capture.facts import flag_of
from replay.options.option_parsing import PANELS, list_options, with_parameters

# In a context's `meta`: is every option shown?
SHOWS_ALL = "replay.help_all"
# The longest left column that does not push its text to the next line, in characters.
MAX_OPTION_WIDTH, MAX_ALL_WIDTH = 34, 38
MAX_NAMED = 6
# Sections of --help-all in their order, and the order of the options of `replay --help`.
SECTIONS = ("Arguments", *sorted(PANELS.values(), key=lambda title: title != PANELS["inputs"]), "Options")

Record = tuple[str, str]


def add_help_all(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --help-all."""
    option = typer.Option(
        False,
        "--help-all",
        is_eager=True,
        callback=_print_all,
        help="Show every option.",
    )

    @wraps(command)
    def without_help_all(*, help_all: bool, **values: Any) -> Any:
        return command(**values)

    return with_parameters(
        without_help_all,
        [inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, annotation=bool, default=option)],
    )


def _print_all(context: typer.Context, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        context.meta[SHOWS_ALL] = True
        print(context.get_help())
        raise typer.Exit


def add_target(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let a command that replays a folder take it as its first word, too: `replay parity FOLDER`."""
    if "inputs" not in inspect.signature(command).parameters:
        return command

    @wraps(command)
    def with_target(*, folder: str | None, **values: Any) -> Any:
        if folder is not None:
            _refuse_other_inputs(folder, values)
            values["inputs"] = folder
        return command(**values)

    argument = typer.Argument(None, metavar="FOLDER", show_default=False, help="The same as --inputs.")
    kind = inspect.Parameter.KEYWORD_ONLY
    return with_parameters(
        with_target, [inspect.Parameter("folder", kind, annotation=str | None, default=argument)], come_first=True
    )


def _refuse_other_inputs(target: str, typed: Mapping[str, Any]) -> None:
    if others := [name for name in ("inputs", "input_file") if typed.get(name) is not None]:
        raise UsageError(f"{target} and {flag_of(others[0])} exclude each other. Give one of the two")


class CommandHelp(TyperCommand):
    """Plain text in two columns. Option names are never cut off, and rich is not imported for it."""

    def format_options(self, context: Any, formatter: Any) -> None:
        own, shared = _list_sections(self, context)
        if context.meta.get(SHOWS_ALL):
            _write_sections(formatter, own | shared, MAX_ALL_WIDTH)
            return
        _write_sections(formatter, own, MAX_OPTION_WIDTH)
        if shared:
            names = [
                max(parameter.opts, key=len)
                for title in SECTIONS
                for parameter in self.get_params(context)
                if title in shared and _find_panel(parameter) == title
            ]
            named, num_others = ", ".join(names[:MAX_NAMED]), len(names[MAX_NAMED:])
            others = f" and {num_others} more" if num_others else ""
            with formatter.section("Options of a replay"):
                formatter.write_text(f"{named}{others}: {context.command_path} --help-all")


class GroupHelp(TyperGroup):
    """The same for `replay` itself, with its commands in groups. `replay PATH` is `replay --inputs PATH`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, words, _ = self.make_parser(ctx).parse_args(args=list(args))
        if words and words[0] not in self.commands and (target := Path(words[0])).exists():
            typed = args[: len(args) - len(words)]
            typed = typed[:-1] if typed[-1:] == ["--"] else typed
            others, _, _ = self.make_parser(ctx).parse_args(args=[*typed, *words[1:]])
            _refuse_other_inputs(words[0], others)
            args = [*typed, f"--{'inputs' if target.is_dir() else 'input-file'}={target}", *words[1:]]
        return super().parse_args(ctx, args)

    def format_options(self, context: Any, formatter: Any) -> None:
        own, shared = _list_sections(self, context)
        if context.meta.get(SHOWS_ALL):
            _write_sections(formatter, own | shared, MAX_ALL_WIDTH)
        else:
            brief = {option.parameter: option.brief for option in list_options() if option.brief}
            records = [
                (_shorten_option(record[0]), brief[parameter.name])
                for title in SECTIONS
                for parameter in self.get_params(context)
                if _find_panel(parameter) == title and parameter.name in brief
                if (record := parameter.get_help_record(context)) is not None
            ]
            # Installing the completion is enough for most people; --help-all also tells how to look at it.
            general = [record for record in own["Options"] if record[0] != "--show-completion"]
            _write_sections(formatter, {"Options": records + general}, MAX_OPTION_WIDTH)
        self.format_commands(context, formatter)

    def format_commands(self, context: Any, formatter: Any) -> None:
        groups: dict[str, list[Record]] = {}
        for name in self.list_commands(context):
            command: Any = self.get_command(context, name)
            text = command.get_short_help_str(formatter.width)
            groups.setdefault(command.rich_help_panel, []).append((name, text))
        _write_sections(formatter, {f"Commands: {group}": records for group, records in groups.items()}, MAX_ALL_WIDTH)


def _shorten_option(text: str) -> str:
    """Shorten `--quiet / --no-quiet` to `--quiet`, and a long list of words to WORD."""
    text = text.partition(" / ")[0]
    return text if len(text) <= MAX_OPTION_WIDTH - 2 else f"{text.rpartition(' ')[0]} WORD"


def _find_panel(parameter: Any) -> str:
    """Return the section of an argument or option; those of `replay` alone declare one."""
    if parameter.param_type_name == "argument":
        return "Arguments"
    return getattr(parameter, "rich_help_panel", None) or "Options"


def _list_sections(command: Any, context: Any) -> tuple[dict[str, list[Record]], dict[str, list[Record]]]:
    """Return the help of a command's own parameters, and of those that it shares with `replay`, by section."""
    sections: dict[str, list[Record]] = {title: [] for title in SECTIONS}
    for parameter in command.get_params(context):
        if record := parameter.get_help_record(context):
            name, text = record
            if parameter.param_type_name == "argument":
                # typer adds a type, as in `FOLDER <path>`.
                name = re.sub(r" <\S+>$", "", name)
            sections[_find_panel(parameter)].append((name, text))
    filled = {title: records for title, records in sections.items() if records}
    own = {title: records for title, records in filled.items() if title not in PANELS.values()}
    return own, {title: records for title, records in filled.items() if title not in own}


def _write_sections(formatter: Any, sections: dict[str, list[Record]], max_width: int) -> None:
    for title, records in sections.items():
        with formatter.section(title):
            formatter.write_dl(records, col_max=max_width)
