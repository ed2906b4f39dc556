"""What `replay` can do beside replaying: each command's options, and the room that does the work.

A command is read before anything heavy is imported, and returns what is left to do.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer

from actor_init.spec import UsageError
from replay.launch import num_processes_missing, relaunch
from replay.options import Toggle, command_line, run_spec, with_options
from replay.spec import RunSpec

Action = Callable[[], int]  # returns the exit code


def inspect(folder: Path = typer.Argument(help="Folder of captures.")) -> Action:  # noqa: B008
    """Say what a folder holds: passes, ranks, shapes, damaged files."""
    return partial(_inspect, folder)


def _inspect(folder: Path) -> int:
    from replay.console import print_inspection
    from replay.inspection import inspect_folder

    facts = inspect_folder(folder)
    print_inspection(facts)
    return 1 if facts.damaged else 0


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


def _serves_diagnose(toggle: Toggle) -> bool:
    """What diagnose decides for itself is left out."""
    if toggle.part == "measure":
        return toggle.field in ("loss", "timeout", "log_folder")
    return toggle.part != "state" and toggle.field not in ("learning_rate", "grad_accumulation", "uneven")


@partial(with_options, serves=_serves_diagnose)
def diagnose(
    steps: int = typer.Option(
        120, min=1, metavar="N", show_default=False, help="At most N steps for each thing to learn. (default: 120)"
    ),
    learning_rate: float | None = typer.Option(
        None, min=0, metavar="X", help="Of those steps. Default: 0.2 divided by the model's hidden size."
    ),
    json: Path | None = typer.Option(None, metavar="PATH", help="Write the checks into this file too."),  # noqa: B008
    traceback: bool = typer.Option(False, "--traceback", help="Show the traceback of what went wrong."),
    **given: Any,
) -> Action:
    """Say whether the model can learn these inputs here: losses, gradients, accumulation, ranks, overfitting.

    Takes 4 inputs on each data rank unless --max-inputs says otherwise. Exit code 0 if no check fails, else 1.
    """
    run = run_spec(given)
    own = ["--steps", str(steps), *(["--json", str(json)] if json else []), *["--traceback"] * traceback]
    own += ["--learning-rate", str(learning_rate)] if learning_rate is not None else []
    return partial(_diagnose, run, steps, learning_rate, json, traceback, ["diagnose", *own, *command_line(run)])


def _diagnose(
    run: RunSpec, steps: int, learning_rate: float | None, json: Path | None, traceback: bool, command: list[str]
) -> int:
    if num_processes := num_processes_missing(run.actor.parallel):
        return relaunch(num_processes, command)
    from replay.diagnose import diagnose

    return diagnose(run, num_steps=steps, learning_rate=learning_rate, json_file=json, show_traceback=traceback)


COMMANDS: tuple[Callable[..., Action], ...] = (inspect, compare, doctor, diagnose)
