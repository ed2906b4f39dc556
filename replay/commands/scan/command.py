"""Declare the options of `replay scan`: its own, and those of a replay that it does not set itself."""

from functools import partial
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
from replay.options.option_parsing import CommandAction, DeclaredOption, add_options, build_replay_spec, json_option
from replay.options.ray_options import RayOptions, with_ray_options
from replay.processes.pool import RunLimits

GROUP_SIZE = 8  # inputs


def _applies_to_scan(option: DeclaredOption) -> bool:
    """Does the option apply to scan? Each group begins from the same weights, so nothing is trained or saved."""
    return option.part != "state" and option.field not in (
        *("input_file", "uneven", "shuffle_inputs", "random_seed", "epochs", "learning_rate", "step"),
        *("full_names", "quiet", "name"),
    )


@partial(add_options, serves=_applies_to_scan)
@with_ray_options
def scan(
    group: int | None = typer.Option(None, min=1, metavar="N", help=f"Inputs of one run. (default: {GROUP_SIZE})"),
    continue_: Path | None = continue_option("scan"),  # noqa: B008
    run_limit: float = run_limit_option("one group"),
    time_limit: float | None = time_limit_option("group"),
    at_once: int | None = at_once_option(
        "Groups at the same time on each GPU; on a CPU, N groups. (default: one group)"
    ),
    json: bool = json_option(),
    ray: RayOptions | None = None,
    **given: Any,
) -> CommandAction:
    """Find the inputs that fail or hang, in groups of their own.

    Each group has its own processes, so one that fails or hangs ends no other. Exit code 0: every pass was
    replayed, and none differs from the job or is not finite; 1: one failed, differs or is not finite.
    """
    limits = RunLimits(run_limit_seconds=run_limit, total_seconds=time_limit, at_once=at_once)
    if continue_ is not None:
        return make_continue_action("scan", continue_, {"group": group, **given}, limits, ray, as_json=json)
    spec = build_replay_spec(given)
    # The nodes of a cluster may have inputs that this machine lacks.
    paths = spec if ray is None else None
    return make_begin_action("scan", paths, spec, group or GROUP_SIZE, limits, ray, as_json=json)
