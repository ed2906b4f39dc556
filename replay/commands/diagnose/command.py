"""Declare the options of `replay diagnose`: its own, and those of a replay that it does not set itself."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer

from actor_init.spec import UsageError
from capture.facts import Setting
from replay.campaign.campaign_options import CampaignAction
from replay.on_ray.ranks import run_here_or_on_ray
from replay.options.option_parsing import CommandAction, DeclaredOption, add_options, job_option, json_option
from replay.options.ray_options import RayOptions, with_ray_options
from replay.options.spec import ReplaySpec, is_objective
from replay.processes.child_job import ChildJob, leave_refusal
from replay.processes.launch import start_missing


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
    json: bool = json_option(),
    job: Path | None = job_option(),  # noqa: B008
    traceback: bool = typer.Option(False, "--traceback", help="Show the traceback of an error."),
    ray: RayOptions | None = None,
    **given: Any,
) -> CommandAction:
    """Check whether the model can learn these inputs here.

    Losses, gradients, accumulation, ranks, overfitting. Takes 4 inputs on each data rank unless --max-inputs says
    otherwise. Exit code 0 if no check fails, else 1.
    """
    child_job = ChildJob.from_options(given, job)
    refuse_objective(child_job.spec)
    checking = {"num_steps": steps, "learning_rate": learning_rate, "show_traceback": traceback}
    action = partial(_diagnose, typed=context.obj, checking=checking, as_json=json)
    action = partial(run_here_or_on_ray, child_job, action, ray, show_traceback=traceback)
    return action if job is None else partial(leave_refusal, action, job.parent)


def refuse_objective(spec: ReplaySpec) -> None:
    """Raise UsageError for an objective, which says nothing about whether inputs can be learned."""
    loss = Setting("loss", spec.measure.loss)
    if is_objective(spec.measure.loss):
        advice = f"Try: {loss.with_value('stand-in')}, or sft; replay {loss} judges the objective"
        raise UsageError(f"diagnose learns its inputs, so {loss} is not for it", advice=advice)


def _diagnose(job: ChildJob, *, typed: Sequence[str], checking: Mapping[str, Any], as_json: bool) -> int:
    if (exit_code := start_missing(job.spec, typed)) is not None:
        return exit_code
    from replay.commands.diagnose.report import diagnose

    return CampaignAction(run=partial(diagnose, job.spec, **checking), as_json=as_json)()
