"""Parse the command line, run the replay or subcommand it asks for, and turn errors into exit codes.

The subcommands are declared in `subcommands.py`.
"""

import gc
import os
import re
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import typer
import typer.main

from actor_init.spec import UsageError
from replay.command_line.help_text import CommandHelp, GroupHelp, add_help_all, add_target
from replay.command_line.subcommands import COMMANDS
from replay.on_ray.ranks import run_here_or_on_ray
from replay.options.option_parsing import (
    CommandAction,
    add_options,
    format_error_with_flags,
    job_option,
    join_optional_values,
    json_option,
)
from replay.options.ray_options import RayOptions, with_ray_options
from replay.output.text import join_lines
from replay.processes.child_job import ChildJob, leave_refusal
from replay.processes.error_reports import read_own_rank, run_to_exit_code, say
from replay.processes.launch import start_missing

# Of an unknown option and the one that is meant, as difflib measures it. Its own 0.6 finds --ring for --version.
LEAST_LIKENESS = 0.75
# The base class of typer's own errors. It is click's, which newer versions of typer vendor and older ones import.
CommandLineError: type[Any] = typer.BadParameter.__mro__[2]


app = typer.Typer(
    cls=GroupHelp,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from capture.cli import find_product_version

        print(f"replay {find_product_version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
@add_help_all
@add_options
@partial(with_ray_options, of_one_replay=True)
def replay(
    context: typer.Context,
    traceback: bool = typer.Option(False, "--traceback", help="Show the traceback of an error."),
    explain: bool = typer.Option(False, "--explain", help="Print each setting and why, and end."),
    json: bool = json_option(),
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and end."
    ),
    local_rank: int | None = typer.Option(None, "--local_rank", "--local-rank", hidden=True),
    job: Path | None = job_option(),  # noqa: B008
    ray: RayOptions | None = None,
    **given: Any,
) -> CommandAction | None:
    """Replay captured micro-batches in a standalone actor, and judge them.

    Without options, it replays the sample that ships with the project.
    """
    if context.invoked_subcommand is not None:
        if typed := [
            f"--{name.replace('_', '-')}"
            for name, value in {
                **given,
                "explain": explain or None,
                "json": json or None,
                "job": job,
                "launcher": ray,
            }.items()
            if value is not None
        ]:
            raise UsageError(
                f"{typed[0]} belongs to a replay, not to `{context.invoked_subcommand}`. "
                f"Try: replay {context.invoked_subcommand} --help"
            )
        return None
    child_job = ChildJob.from_options(given, job)
    action = partial(_replay, typed=context.obj, show_traceback=traceback, explains=explain, as_json=json)
    action = partial(run_here_or_on_ray, child_job, action, ray, show_traceback=traceback)
    return action if job is None else partial(leave_refusal, action, job.parent)


def _replay(job: ChildJob, *, typed: Sequence[str], show_traceback: bool, explains: bool, as_json: bool) -> int:
    """Run a replay. `typed` is the command line, which each rank of a launch gets."""
    spec = job.spec
    if (exit_code := start_missing(spec, typed)) is not None:
        return exit_code
    # Going through what is imported takes the collector a fifth of the time of importing it. The runner enables it
    # again once the actor is open.
    gc.disable()
    try:
        if explains:
            from replay.runner.run import explain

            return explain(spec)
        from replay.api.here import run_here

        _freeze_imported()
        return run_here(spec, show_traceback=show_traceback, as_json=as_json).exit_code
    finally:
        gc.enable()


@cache
def _freeze_imported() -> None:
    """Keep what was imported, which stays, out of all collections: each would take a third of a second.

    Once in a process: what a later run begins with may be garbage.
    """
    gc.freeze()


for group, commands in COMMANDS.items():
    for command in commands:
        app.command(cls=CommandHelp, rich_help_panel=group)(add_help_all(add_target(command)))


@cache
def build_commands() -> Any:
    """Build the program with its commands, as typer has them once all are declared."""
    return typer.main.get_command(app)


def parse_command_line(typed: Sequence[str]) -> Any:
    """Return what is to be done for a command line: an action, or an exit code where --help has been printed.

    Raises UsageError, or the error of typer, where it is wrong.
    """
    return build_commands()(join_optional_values(typed), prog_name="replay", standalone_mode=False, obj=tuple(typed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: success; 1: a pass or a file failed, or runs differ; 2: wrong usage; 130: interrupted.

    A usage error is one line on stderr:

        replay: unknown option --max-input. Did you mean --max-inputs? Try: replay --help
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = "--traceback" in typed
    try:
        action = parse_command_line(typed)
    except (UsageError, CommandLineError) as error:
        # Every rank of a launch sees the same command line, so one of them refuses it.
        return _refuse(error, typed, show_traceback) if read_own_rank() == 0 else 2
    # After --help, typer returns an exit code instead.
    if not callable(action):
        return int(action or 0)
    return run_to_exit_code(action, show_traceback=show_traceback)


def run_and_leave() -> NoReturn:
    """Run `main` and end the process with its exit code."""
    leave(main())


def leave(exit_code: int) -> NoReturn:
    """End the process without the interpreter's cleanup.

    gloo's threads may release their last tensors during that cleanup; taking the GIL then aborts a process that has
    succeeded: https://github.com/pytorch/pytorch/issues/190489.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _refuse(error: Any, typed: Sequence[str], show_traceback: bool) -> int:
    if show_traceback:
        traceback.print_exception(error)
    say(format_error_with_flags(error) if isinstance(error, UsageError) else _explain(error, typed))
    return 2


def _explain(error: Any, typed: Sequence[str]) -> str:
    """Turn typer's message into one line that says what was given and what to type next."""
    option = getattr(error, "option_name", None)
    # Some errors of a subcommand do not name it: then it is the first word.
    command = [word for word in typed[:1] if not word.startswith("-")]
    advice = f"Try: {error.ctx.command_path if error.ctx else ' '.join(['replay', *command])} --help"
    message = join_lines(error.format_message()).rstrip(".")
    if from_environment := re.search(r"\(env var: '(\w+)'\)", message):
        message += f", not {os.environ[from_environment[1]]!r}"
    elif value := _find_value(getattr(getattr(error, "param", None), "opts", ()), typed):
        message += f", not {value!r}"
    if option and message.startswith("No such option"):
        message = f"unknown option {option}"
        # Without the dashes, which every option shares.
        names = {name.strip("-"): name for name in error.possibilities or ()}
        if close := get_close_matches(option.strip("-"), names, n=1, cutoff=LEAST_LIKENESS):
            return f"{message}. Did you mean {names[close[0]]}? {advice}"
    end = "" if message.endswith("?") else "."
    return f"{message[0].lower()}{message[1:]}{end} {advice}"


def _find_value(option_names: Sequence[str], typed: Sequence[str]) -> str | None:
    """Return what was typed as the value of the option with these names."""
    for word, following in zip(typed, [*typed[1:], None], strict=True):
        name, is_joined, value = word.partition("=")
        if name in option_names:
            return value if is_joined else following
    return None
