"""The command line: `replay` replays; what else it can do is in `subcommands.py`."""

import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from actor_init.spec import UsageError
from replay.options import Action, command_line, run_spec, with_options
from replay.processes.launch import num_processes_missing, relaunch
from replay.spec import RunSpec
from replay.subcommands import COMMANDS

# the base of typer's own errors; newer typers carry click inside, older ones import it
CommandLineError: type[Any] = typer.BadParameter.__mro__[2]
HEAD_START_SECONDS = 3.0


class PanelledHelp(TyperGroup):
    """Plain help, two columns, one section a panel: option names are never cut, and rich stays out of `--help`."""

    def format_options(self, context: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            if record := parameter.get_help_record(context):
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=38)
        self.format_commands(context, formatter)


app = typer.Typer(
    cls=PanelledHelp,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 110},
)


@app.callback(invoke_without_command=True)
@with_options
def replay(
    context: typer.Context,
    traceback: bool = typer.Option(False, "--traceback", help="Show the traceback of what went wrong."),
    local_rank: int | None = typer.Option(None, "--local_rank", "--local-rank", hidden=True),
    **given: Any,
) -> Action | None:
    """Replay captured micro-batches through a standalone actor and say what each pass cost.

    Without options: the sample inputs that ship with the project. `replay inspect FOLDER` says what a folder holds,
    `replay compare LOG LOG` how far two runs are apart.
    """
    if context.invoked_subcommand is not None:
        if typed := [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]:
            raise UsageError(
                f"{typed[0]} belongs to a replay, not to `{context.invoked_subcommand}`. "
                f"Try: replay {context.invoked_subcommand} --help"
            )
        return None
    return partial(_replay, run_spec(given), show_traceback=traceback)


def _replay(spec: RunSpec, *, show_traceback: bool) -> int:
    if num_processes := num_processes_missing(spec.actor.parallel):
        return relaunch(num_processes, command_line(spec) + ["--traceback"] * show_traceback)
    from replay.runner.session import run

    return run(spec, show_traceback=show_traceback)


for command in COMMANDS:
    app.command()(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was typed and return its exit code.

    0 all well, 1 a pass or a file failed, or runs differ, 2 wrong usage, 130 interrupted.

    A usage error is one line on stderr:

        replay: unknown option --max-input. Did you mean --max-inputs? Try: replay --help
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = "--traceback" in typed
    try:
        action = app(typed, prog_name="replay", standalone_mode=False)
    except (UsageError, CommandLineError) as error:  # every rank of a launch sees the same command line
        return _refuse(error, typed, show_traceback) if _rank() == 0 else 2
    if not callable(action):  # --help has been printed
        return int(action or 0)
    try:
        return int(action())
    except UsageError as error:
        if _rank() > 0:  # rank 0 speaks for an error that all ranks share, and the launcher then ends the others
            time.sleep(HEAD_START_SECONDS)
        return _refuse(error, typed, show_traceback)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
        else:
            _say(f"{type(error).__name__}: {_one_line(str(error))}. --traceback shows where")
        return 1


def run_and_leave() -> NoReturn:
    """`main` as a process of its own."""
    leave(main())


def leave(exit_code: int) -> NoReturn:
    """End the process without the interpreter's cleanup.

    gloo's threads may let go of their last tensors during that cleanup, and taking the GIL then aborts the process
    after all was well: https://github.com/pytorch/pytorch/issues/190489.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _refuse(error: Any, typed: Sequence[str], show_traceback: bool) -> int:
    if show_traceback:
        traceback.print_exception(error)
    _say(str(error) if isinstance(error, UsageError) else _explain(error, typed))
    return 2


def _explain(error: Any, typed: Sequence[str]) -> str:
    """typer's message as one line that says what came and ends in what to type next."""
    option = getattr(error, "option_name", None)
    command = [word for word in typed[:1] if not word.startswith("-")]  # some errors of a command's come without it
    advice = f"Try: {error.ctx.command_path if error.ctx else ' '.join(['replay', *command])} --help"
    message = _one_line(error.format_message()).rstrip(".")
    if from_environment := re.search(r"\(env var: '(\w+)'\)", message):
        message += f", not {os.environ[from_environment[1]]!r}"
    elif value := _value_of(getattr(getattr(error, "param", None), "opts", ()), typed):
        message += f", not {value!r}"
    if option and message.startswith("No such option"):
        message = f"unknown option {option}"
        if error.possibilities:
            return f"{message}. Did you mean {error.possibilities[0]}? {advice}"
    if (found := re.fullmatch(r"No such command '(.+)'", message)) and Path(found[1]).exists():
        advice = f"Try: replay --{'inputs' if Path(found[1]).is_dir() else 'input-file'} {found[1]}"
    return f"{message[0].lower()}{message[1:]}. {advice}"


def _value_of(option_names: Sequence[str], typed: Sequence[str]) -> str | None:
    """What was typed as the value of the option that has these names."""
    for word, following in zip(typed, [*typed[1:], None], strict=True):
        name, is_joined, value = word.partition("=")
        if name in option_names:
            return value if is_joined else following
    return None


def _one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text).strip()


def _say(message: str) -> None:
    where = f"rank {_rank()}: " if _rank() > 0 else ""
    print(f"replay: {where}{message}", file=sys.stderr, flush=True)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
