"""Declare the options of `replay diagnose`: its own, and those of a replay that it does not set itself."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer

from actor_init.spec import UsageError
from replay.on_ray.ranks import run_here_or_on_ray
from replay.options.option_parsing import CommandAction, DeclaredOption, add_options, build_replay_spec
from replay.options.path_checks import check_paths
from replay.options.ray_options import RayOptions, with_ray_options
from replay.options.spec import is_objective
from replay.processes.child_job import ChildJob
from replay.processes.launch import count_missing_processes, relaunch


def _serves_diagnose(option: DeclaredOption) -> bool:
    """Tell whether the option applies to diagnose. Those that diagnose sets itself do not."""
    if option.part == "measure":
        return option.field in ("loss", "timeout", "log_folder")
    return option.part not in ("state", "objective") and option.field not in (
        "learning_rate",
        "grad_accumulation",
        "uneven",
    )


@partial(add_options, serves=_serves_diagnose)
@partial(with_ray_options, of_one_replay=True)
def diagnose(
    context: typer.Context,
    steps: int = typer.Option(
        120, min=1, metavar="N", show_default=False, help="At most N steps for each thing to learn. (default: 120)"
    ),
    learning_rate: float | None = typer.Option(
        None, min=0, metavar="X", help="Of those steps. Default: 0.2 divided by the model's hidden size."
    ),
    json: Path | None = typer.Option(None, metavar="FILE", help="Write the checks into this file too."),  # noqa: B008
    traceback: bool = typer.Option(False, "--traceback", help="Show the traceback of an error."),
    ray: RayOptions | None = None,
    **given: Any,
) -> CommandAction:
    """Check whether the model can learn these inputs here.

    Losses, gradients, accumulation, ranks, overfitting. Takes 4 inputs on each data rank unless --max-inputs says
    otherwise. Exit code 0 if no check fails, else 1.
    """
    run = build_replay_spec(given)
    if is_objective(run.measure.loss):
        raise UsageError(
            f"diagnose learns its inputs, so --loss {run.measure.loss} is not for it. Try: --loss stand-in, or sft; "
            f"replay --loss {run.measure.loss} judges the objective"
        )
    action = partial(
        _diagnose, typed=context.obj, steps=steps, learning_rate=learning_rate, json=json, show_traceback=traceback
    )
    return partial(run_here_or_on_ray, ChildJob(spec=run), action, ray, show_traceback=traceback)


def _diagnose(
    job: ChildJob,
    *,
    typed: Sequence[str],
    steps: int,
    learning_rate: float | None,
    json: Path | None,
    show_traceback: bool,
) -> int:
    run = job.spec
    check_paths(run)
    if num_processes := count_missing_processes(run.actor.parallel):
        return relaunch(num_processes, typed)
    from replay.commands.diagnose.report import diagnose

    return diagnose(run, num_steps=steps, learning_rate=learning_rate, json_file=json, show_traceback=show_traceback)
