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
from replay.options import with_options

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


@with_options
def parity(
    matrix: str | None = typer.Option(
        None,
        metavar="NAME",
        help="quick: one process, and one tp, ring and data rank; pairs: every two values of any options together; "
        "full: the whole product, pairs first; or a TOML file, see docs/parity.md. (default: quick)",
    ),
    num_devices: int | None = typer.Option(
        None, min=1, metavar="N", help="Processes of one run at most. (default: the GPUs, or 2 on a CPU)"
    ),
    go_on: Path | None = typer.Option(  # noqa: B008
        None, "--continue", metavar="PATH", help="Run what a folder of parity's lacks, and report all of it."
    ),
    cell_timeout: float = typer.Option(
        600.0, min=1.0, metavar="X", show_default=False, help="Seconds for one run. (default: 600)"
    ),
    time_limit: float | None = typer.Option(
        None, min=0.0, metavar="X", help="Start no run after X seconds; --continue goes on."
    ),
    first_difference: bool = typer.Option(
        False, "--first-difference", help="Run what differs again, traced, and name the first layer and tensor."
    ),
    **given: Any,
) -> Action:
    """Replay one folder under many configurations, and say which agree within measured noise.

    A replay's own options hold for every run; what they say of an option that the matrix varies chooses among its
    runs. Exit code 0: all equal or within noise; 1: one differs or failed; 2: nothing can run, and why.
    """
    return partial(_parity, matrix, num_devices, go_on, cell_timeout, time_limit, first_difference, given)


def _parity(
    matrix: str | None,
    num_devices: int | None,
    go_on: Path | None,
    cell_timeout: float,
    time_limit: float | None,
    first_difference: bool,
    given: dict[str, Any],
) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("parity starts its own processes. Try: replay parity, without a launcher and its WORLD_SIZE")
    own = {"matrix": matrix, "num_devices": num_devices}
    typed = [name for name, value in {**own, **given}.items() if value is not None]
    if go_on is not None and typed:
        raise UsageError(f"--continue goes on with what that folder says. Leave out --{typed[0].replace('_', '-')}")
    from replay import parity as work

    limits = work.Limits(cell=cell_timeout, total=time_limit)
    if go_on is not None:
        return work.go_on(go_on, limits, trace=first_difference)
    return work.begin(matrix or "quick", given, num_devices, limits, trace=first_difference)


COMMANDS: tuple[Callable[..., Action], ...] = (inspect, compare, parity, doctor)
