"""Declare the options of `replay scan`: its own, and those of a replay that it does not set itself."""

from functools import partial
from pathlib import Path
from typing import Any

import typer

from replay.campaign.going_on import going_on
from replay.options.option_parsing import Action, Toggle, replay_spec, with_options
from replay.options.ray_options import RayOptions, with_ray_options
from replay.options.spec import check_inputs
from replay.processes.launch import refuse_launcher
from replay.processes.pool import RunLimits

GROUP_SIZE = 8  # inputs


def _serves_scan(toggle: Toggle) -> bool:
    """Does the option apply to scan? Each group begins from the same weights, so nothing is trained or saved."""
    return toggle.part != "state" and toggle.field not in (
        *("input_file", "uneven", "shuffle_inputs", "random_seed", "epochs", "learning_rate", "step"),
        *("full_names", "quiet", "name"),
    )


@partial(with_options, serves=_serves_scan)
@with_ray_options
def scan(
    group: int | None = typer.Option(None, min=1, metavar="N", help=f"Inputs of one run. (default: {GROUP_SIZE})"),
    go_on: Path | None = typer.Option(  # noqa: B008
        None, "--continue", metavar="PATH", help="Run what a folder of scan's lacks, and report all of it."
    ),
    run_limit: float = typer.Option(
        600.0, min=1.0, metavar="X", show_default=False, help="Seconds for one group. (default: 600)"
    ),
    time_limit: float | None = typer.Option(
        None, min=0.0, metavar="X", help="Start no group after X seconds; --continue goes on."
    ),
    at_once: int | None = typer.Option(
        None, min=1, metavar="N", help="Groups at the same time on each GPU; on a CPU, N groups. (default: one group)"
    ),
    ray: RayOptions | None = None,
    **given: Any,
) -> Action:
    """Replay a folder in groups of inputs, each in its own processes: one that fails or hangs ends no other.

    Exit code 0: every pass was replayed, and none differs from the job; 1: one failed or differs.
    """
    limits = RunLimits(each=run_limit, total=time_limit, at_once=at_once)
    if go_on is not None:
        return going_on("scan", go_on, {"group": group, **given}, limits, ray)
    spec = replay_spec(given)

    def begin() -> int:
        refuse_launcher("scan")
        if ray is None:  # else the nodes may have what this machine lacks
            check_inputs(spec.inputs)
        from replay.commands.scan import runs

        return runs.begin(spec, group or GROUP_SIZE, limits, ray)

    return begin
