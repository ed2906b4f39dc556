"""The command line: `replay` replays, `replay inspect` looks at inputs, `compare` at logs, `doctor` at the machine."""

import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from actor_init.spec import UsageError
from replay.launch import num_processes_missing, relaunch
from replay.options import command_line, run_spec, with_options
from replay.spec import RunSpec

Action = Callable[[], int]  # returns the exit code

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
    from replay.session import run

    return run(spec, show_traceback=show_traceback)


@app.command()
def inspect(folder: Path = typer.Argument(help="Folder of captures.")) -> Action:  # noqa: B008
    """Say what a folder holds: passes, ranks, shapes, damaged files."""
    return partial(_inspect, folder)


def _inspect(folder: Path) -> int:
    from replay.console import print_inspection
    from replay.inspection import inspect_folder

    facts = inspect_folder(folder)
    print_inspection(facts)
    return 1 if facts.damaged else 0


@app.command()
def doctor(
    log_folder: Path = typer.Option(  # noqa: B008
        Path("logs"), metavar="PATH", show_default=False, help="Where runs would be logged. (default: logs)"
    ),
    json: Path | None = typer.Option(None, metavar="PATH", help="Write the checks into this file too."),  # noqa: B008
    timeout: float = typer.Option(
        60.0, min=10.0, metavar="X", show_default=False, help="Seconds for all checks together. (default: 60)"
    ),
) -> Action:
    """Say what works on this machine, what does not, and what to type. Needs no GPU and no captures.

    Exit code 0 if all works that `replay` without options needs here, else 1.
    """
    return partial(_doctor, log_folder, json, timeout)


def _doctor(log_folder: Path, json: Path | None, timeout: float) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("doctor starts its own processes. Try: replay doctor, without a launcher and its WORLD_SIZE")
    from replay.doctor import examine

    return examine(log_folder, json, timeout)


@app.command()
def compare(
    logs: list[Path] = typer.Argument(  # noqa: B008
        help="Folders that runs left in logs/, or that hold one run each. The first is the reference.",
        metavar="LOG LOG...",
    ),
    threshold: float = typer.Option(
        0.05,
        help="Exit with 1 if a loss, a row's log-probs or a gradient norm differs by more than this share of the "
        "reference's. Time and memory are shown, and decide nothing.",
    ),
    plot: Path | None = typer.Option(None, help="Draw losses and differences, as out.png (needs matplotlib)."),  # noqa: B008
    json: Path | None = typer.Option(None, help="Write every number, as out.json."),  # noqa: B008
) -> Action:
    """Compare runs input by input: losses, log-probs, gradient norms, time, memory.

    Runs of the same work alone: the same model, weights and inputs, the same loss. Exit code 0: within the threshold;
    1: beyond it; 2: not comparable, and why.
    """
    return partial(_compare, logs, threshold, plot, json)


def _compare(logs: list[Path], threshold: float, plot: Path | None, json: Path | None) -> int:
    from replay.compare import compare_logs

    return compare_logs(logs, threshold, plot, json)


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
        return _refuse(error, show_traceback) if _rank() == 0 else 2
    if not callable(action):  # --help has been printed
        return int(action or 0)
    try:
        return int(action())
    except UsageError as error:
        if _rank() > 0:  # rank 0 speaks for an error that all ranks share, and the launcher then ends the others
            time.sleep(HEAD_START_SECONDS)
        return _refuse(error, show_traceback)
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


def _refuse(error: Any, show_traceback: bool) -> int:
    if show_traceback:
        traceback.print_exception(error)
    _say(str(error) if isinstance(error, UsageError) else _explain(error))
    return 2


def _explain(error: Any) -> str:
    """typer's message as one line that ends in what to type next."""
    option = getattr(error, "option_name", None)
    message = _one_line(error.format_message()).rstrip(".")
    if option and message.startswith("No such option"):
        message = f"unknown option {option}"
        if error.possibilities:
            return f"{message}. Did you mean {error.possibilities[0]}? Try: replay --help"
    return f"{message[0].lower()}{message[1:]}. Try: replay --help"


def _one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text).strip()


def _say(message: str) -> None:
    where = f"rank {_rank()}: " if _rank() > 0 else ""
    print(f"replay: {where}{message}", file=sys.stderr, flush=True)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
