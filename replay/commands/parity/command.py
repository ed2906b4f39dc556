"""Declare the options of `replay parity`: its own, and those of a replay."""

from pathlib import Path
from typing import Any

import typer

from replay.campaign.campaign_options import (
    at_once_option,
    continue_option,
    make_begin_action,
    make_continue_action,
    run_limit_option,
    time_limit_option,
)
from replay.options.option_parsing import CommandAction, add_options, build_replay_spec, json_option
from replay.options.ray_options import RayOptions, with_ray_options
from replay.processes.pool import RunLimits


@add_options
@with_ray_options
def parity(
    matrix: str | None = typer.Option(
        None,
        metavar="NAME|FILE",
        help="quick: each backend and kernel on one process, and tp, ring and data ranks on two; pairs: every two "
        "values of any options together; full: the whole product, pairs first; or a TOML file, see docs/parity.md. "
        "(default: quick)",
    ),
    processes: int | None = typer.Option(
        None, min=1, metavar="N", help="Processes of one run at most. (default: the GPUs, or 2 on a CPU)"
    ),
    continue_: Path | None = continue_option("parity"),  # noqa: B008
    run_limit: float = run_limit_option("one run"),
    time_limit: float | None = time_limit_option("run"),
    at_once: int | None = at_once_option(
        "Runs at the same time, with N processes on each GPU, as many as it has memory for; on a CPU, N runs. "
        "(default: one run, whose passes are timed)"
    ),
    first_difference: bool = typer.Option(
        False, "--first-difference", help="Run what differs again, traced, and name the first layer and tensor."
    ),
    python: list[str] | None = typer.Option(  # noqa: B008
        None,
        "--python",
        metavar="FILE",
        help="Interpreter of an environment to run the matrix in; given several times, the first one's runs are the "
        "references. (default: this environment)",
    ),
    json: bool = json_option(),
    ray: RayOptions | None = None,
    **given: Any,
) -> CommandAction:
    """Say which of many configurations agree on the same inputs.

    Each replays the folder, and agrees within measured noise. A replay's own options apply to every run; given for
    an option that the matrix varies, they select runs with that value. Exit code 0: all equal or within noise; 1:
    one differs or failed; 2: nothing can run, with the reason.
    """
    limits = RunLimits(run_limit_seconds=run_limit, total_seconds=time_limit, at_once=at_once)
    if continue_ is not None:
        typed = {"matrix": matrix, "processes": processes, "python": python, **given}
        return make_continue_action("parity", continue_, typed, limits, trace=first_difference, ray=ray, as_json=json)
    # The others may contradict each other, as long as no run of the matrix has both.
    paths = build_replay_spec({name: given.get(name) for name in ("inputs", "input_file", "model", "adapter", "loss")})
    return make_begin_action(
        "parity",
        # The nodes of a cluster may have inputs that this machine lacks.
        paths if ray is None else None,
        matrix or "quick",
        given,
        processes,
        limits,
        trace=first_difference,
        ray=ray,
        pythons=python or [],
        as_json=json,
    )
