"""Run `replay scan`: replay a folder in groups of inputs, each in its own processes."""

from pathlib import Path

from actor_init.spec import UsageError
from replay.campaign.campaign import Campaign, until_interrupted
from replay.campaign.executor import Executor, executor
from replay.commands.scan.console import ScanConsole
from replay.commands.scan.plan import ScanPlan, State
from replay.options.option_parsing import command_line
from replay.options.ray_options import RayOptions
from replay.options.spec import ReplaySpec
from replay.output.text import counted, damaged_files
from replay.processes.limits import RunLimits
from replay.resolution.selection import select
from replay.runlog.writer import INTERRUPTED
from replay.verdict.judge import Outcome


def begin(spec: ReplaySpec, size: int, limits: RunLimits, ray: RayOptions | None) -> int:
    """Scan the inputs of `spec` in groups of `size`, and return the exit code.

    Raises UsageError before anything has run if there is nothing to replay, or too few devices.
    """
    num_processes = spec.actor.parallel.tp * spec.actor.parallel.ring
    selection = select(spec.inputs, 0, 1, loss=spec.measure.loss, grad_accumulation=spec.actor.grad_accumulation)
    if not selection.inputs:
        raise UsageError("every input is damaged. Try: replay inspect, with that folder")
    plan = ScanPlan.of(
        spec,
        size,
        num_inputs=len(selection.inputs),
        window=selection.grad_accumulation,
        damaged=[text for _, text in damaged_files(selection.damaged)],
    )
    with executor(ray) as where:
        machine = where.machine(None, "--processes")
        if machine.has_gpus and ray is None and num_processes > machine.num_devices:
            raise UsageError(
                f"tp x ring needs {counted(num_processes, 'GPU')}, and there are {machine.num_devices}. "
                "Try: a smaller --tp or --ring"
            )
        campaign = Campaign.begin(
            "scan",
            spec.measure.log_folder,
            plan,
            words=["--group", str(plan.size), *command_line(spec)],
            machine=machine,
        )
        return _run(campaign, where, limits)


def go_on(folder: Path, limits: RunLimits, ray: RayOptions | None) -> int:
    """Run the groups of a scan that have not run yet, and report all of them.

    Raises UsageError if there is no such scan, or if it was made on another machine.
    """
    campaign = Campaign.read("scan", folder, ScanPlan)
    with executor(ray) as where:
        campaign.refuse_elsewhere(where, campaign.plan.jobs)
        return _run(campaign, where, limits)


def _run(campaign: Campaign[ScanPlan], where: Executor, limits: RunLimits) -> int:
    campaign.open(where, limits)
    groups = campaign.plan.groups
    console = ScanConsole(campaign, groups)
    with until_interrupted() as interruption:
        for settled in campaign.settle(campaign.plan.jobs):
            groups[settled.place] = groups[settled.place].after(settled.child, campaign.folder)
            console.ended(settled.place, groups[settled.place], is_new=settled.is_new)
    campaign.result = {"groups": groups}
    campaign.write()
    console.finish()
    if interruption.happened:
        return INTERRUPTED
    bad = (Outcome.DIFFERS, Outcome.UNSETTLED)
    is_clean = all(group.state is State.DONE and group.outcome not in bad for group in groups)
    return 0 if is_clean and not campaign.plan.damaged else 1
