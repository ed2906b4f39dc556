"""Declare the options of `replay parity`: its own, and those of a replay."""

from pathlib import Path
from typing import Any

import typer

from replay.campaign.going_on import going_on
from replay.options.option_parsing import Action, replay_spec, with_options
from replay.options.ray_options import RayOptions, with_ray_options
from replay.options.spec import check_inputs
from replay.processes.launch import refuse_launcher
from replay.processes.pool import RunLimits


@with_options
@with_ray_options
def parity(
    matrix: str | None = typer.Option(
        None,
        metavar="NAME",
        help="quick: one process, and one tp, ring and data rank; pairs: every two values of any options together; "
        "full: the whole product, pairs first; or a TOML file, see docs/parity.md. (default: quick)",
    ),
    processes: int | None = typer.Option(
        None, min=1, metavar="N", help="Processes of one run at most. (default: the GPUs, or 2 on a CPU)"
    ),
    go_on: Path | None = typer.Option(  # noqa: B008
        None, "--continue", metavar="PATH", help="Run what a folder of parity's lacks, and report all of it."
    ),
    run_limit: float = typer.Option(
        600.0, min=1.0, metavar="X", show_default=False, help="Seconds for one run. (default: 600)"
    ),
    time_limit: float | None = typer.Option(
        None, min=0.0, metavar="X", help="Start no run after X seconds; --continue goes on."
    ),
    at_once: int | None = typer.Option(
        None,
        min=1,
        metavar="N",
        help="Runs at the same time, with N processes on each GPU, as many as it has memory for; on a CPU, N runs. "
        "(default: one run, whose passes are timed)",
    ),
    first_difference: bool = typer.Option(
        False, "--first-difference", help="Run what differs again, traced, and name the first layer and tensor."
    ),
    python: list[str] | None = typer.Option(  # noqa: B008
        None,
        "--python",
        metavar="PATH",
        help="Interpreter of an environment to run the matrix in; given several times, the first one's runs are the "
        "references. (default: this environment)",
    ),
    ray: RayOptions | None = None,
    **given: Any,
) -> Action:
    """Replay one folder under many configurations, and say which agree within measured noise.

    A replay's own options apply to every run; given for an option that the matrix varies, they select runs with that
    value. Exit code 0: all equal or within noise; 1: one differs or failed; 2: nothing can run, with the reason.
    """
    limits = RunLimits(each=run_limit, total=time_limit, at_once=at_once)
    if go_on is not None:
        own = {"matrix": matrix, "processes": processes, "python": python}
        return going_on("parity", go_on, {**own, **given}, limits, trace=first_difference, ray=ray)

    def begin() -> int:
        refuse_launcher("parity")
        if ray is None:  # else the nodes may have what this machine lacks
            check_inputs(replay_spec({name: given.get(name) for name in ("inputs", "input_file")}).inputs)
        from replay.commands.parity import runs

        return runs.begin(
            matrix or "quick", given, processes, limits, trace=first_difference, ray=ray, pythons=python or ()
        )

    return begin
