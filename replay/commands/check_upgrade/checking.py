"""Replay the same inputs in two environments, and judge whether they compute the same numbers.

The two replays differ in the environment alone, so nothing measures how far rounding may take them apart. The bound is
what rounding explains in this dtype and depth: parity's ceiling (`replay/tolerances/run_bounds.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from actor_init.spec import Dtype, Head, UsageError
from capture.facts import Setting
from replay.agreement.noise_floor import measure_parity_distances
from replay.agreement.rows import judge_child
from replay.campaign.campaign import Campaign, PlannedRun
from replay.campaign.campaign_options import list_words
from replay.campaign.executor import ThisMachine
from replay.commands.check_upgrade.result import (
    NAMES,
    ComparedCost,
    ComparedQuantity,
    EnvironmentRun,
    UpgradeCheck,
)
from replay.comparison.differences import Quantity, compare
from replay.comparison.text import describe_first_difference
from replay.options.option_parsing import format_command_line, format_error_with_flags
from replay.options.spec import ReplaySpec
from replay.output.printing import open_console, print_pairs
from replay.processes.interpreter import Environment, probe
from replay.processes.pool import Machine, RunLimits
from replay.resolution.resolve import set_loss_of_job
from replay.resolution.selection import select
from replay.runlog.reader import PastRun
from replay.runlog.run_file import RunFile
from replay.runner.result import Run
from replay.tolerances.difference import estimate_rounding_ceiling, roundoff
from replay.tolerances.run_bounds import CEILINGS
from replay.tracing.first_difference import find_first_difference
from replay.verdict.text import format_verdict

NUM_INPUTS = 8
RUN_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UpgradePlan:
    environments: Sequence[Environment]
    spec: ReplaySpec


def check(spec: ReplaySpec, pythons: Sequence[str], *, run_limit: float = RUN_SECONDS, screen: IO[str]) -> UpgradeCheck:
    """Replay in both environments, compare, and if the numbers differ trace both.

    pythons    the interpreters of the old environment and of the new one
    run_limit  seconds that one replay may take
    screen     gets the progress

    Raises UsageError for anything but two environments that can replay.
    """
    if len(pythons) != len(NAMES):
        raise UsageError(
            f"two environments are compared, and {len(pythons)} given. "
            f"Give both interpreters: {Setting('python', 'old/bin/python')} {Setting('python', 'new/bin/python')}"
        )
    environments = [probe(python) for python in pythons]
    spec = replace(spec, inputs=replace(spec.inputs, max_inputs=spec.inputs.max_inputs or NUM_INPUTS))
    words = [*list_words({"python": [environment.python for environment in environments]}), *format_command_line(spec)]
    selection = select(spec.inputs, 0, 1, loss=spec.measure.loss, grad_accumulation=spec.actor.grad_accumulation)
    # A replay that keeps details, as both do, would choose a mean of log-probs. Both verdicts are on the job.
    spec = set_loss_of_job(spec, selection)
    spec = replace(spec, measure=replace(spec.measure, details=True))
    campaign = Campaign.begin(
        "check-upgrade",
        spec.measure.log_folder,
        UpgradePlan(environments=environments, spec=spec),
        arguments=words,
        machine=Machine.detect(),
    )
    campaign.open(ThisMachine(), RunLimits(run_limit_seconds=run_limit, total_seconds=None, at_once=None))
    runs = [_replay(campaign, name, environment, screen) for name, environment in zip(NAMES, environments, strict=True)]
    result = _compare(UpgradeCheck(command=campaign.command_line, folder=campaign.folder.absolute(), runs=runs))
    if not all(quantity.agrees for quantity in result.quantities):
        result = replace(result, first_difference=_find_first_difference(campaign, environments, screen))
    campaign.result = result.to_dict()
    campaign.write()
    return result


def _replay(campaign: Campaign[UpgradePlan], name: str, environment: Environment, screen: IO[str]) -> EnvironmentRun:
    """Replay in one environment."""
    print_pairs(open_console(screen), [(name, environment.text)])
    planned_run = _plan_run(campaign.plan.spec, f"runs/{name}", name, environment)
    _, error, folder = judge_child(campaign.run(planned_run))
    if folder is None:
        return EnvironmentRun(environment=environment, folder=None, error=error or "it left no log")
    try:
        verdict = Run.read(folder).verdict
    except UsageError as refusal:
        # Another version of micro-replay may have other verdicts.
        return EnvironmentRun(
            environment=environment, folder=folder, error=error, verdict=format_error_with_flags(refusal)
        )
    if verdict is None:
        return EnvironmentRun(environment=environment, folder=folder, error=error)
    lines = [text for label, text in format_verdict(verdict) if label in ("verdict", "cause")]
    return EnvironmentRun(
        environment=environment, folder=folder, error=error, outcome=verdict.outcome, verdict="; ".join(lines)
    )


def _plan_run(spec: ReplaySpec, home: str, name: str, environment: Environment) -> PlannedRun:
    return PlannedRun(
        home=home,
        spec=spec,
        num_processes=spec.actor.parallel.tp * spec.actor.parallel.ring,
        python=environment.python,
        # One interpreter may be given twice. The journal would take its two replays for one.
        repeat=NAMES.index(name),
    )


def _compare(result: UpgradeCheck) -> UpgradeCheck:
    """Add how far apart the two replays are."""
    folders = [run.folder for run in result.runs if run.folder is not None]
    if len(folders) < len(NAMES):
        return result
    try:
        old, new = (PastRun.read(folder) for folder in folders)
        differences = compare(old, new)
    except UsageError as error:
        return replace(result, notes=[format_error_with_flags(error)])
    dtype = max((_find_dtype(run) for run in (old, new)), key=roundoff)
    ceiling = estimate_rounding_ceiling(dtype, old.config, max(record.input.real_tokens for record in old.records))
    quantities = [
        ComparedQuantity(name=name, distance=point.value, bound=ceiling * CEILINGS.get(name, 1.0), where=point.where)
        for name, point in measure_parity_distances(differences).items()
    ]
    return replace(
        result,
        quantities=quantities,
        costs=[_take_cost(quantity) for quantity in differences.costs],
        notes=differences.notes,
    )


def _take_cost(quantity: Quantity) -> ComparedCost:
    return ComparedCost(name=quantity.name, unit=quantity.unit, old=quantity.mean_reference, new=quantity.mean_other)


def _find_dtype(run: PastRun) -> Dtype:
    """Return the typed dtype, or of `auto` what the run chose."""
    start = RunFile.read(run.folder).start
    if run.actor.dtype is not Dtype.AUTO or start is None:
        return run.actor.dtype
    return Dtype(next(str(choice["value"]) for choice in start.resolved if choice["setting"] == "actor.dtype"))


def _find_first_difference(
    campaign: Campaign[UpgradePlan], environments: Sequence[Environment], screen: IO[str]
) -> str:
    """Replay both again, traced, and say where they part."""
    spec = campaign.plan.spec
    traced = replace(
        spec,
        # The trace needs whole logits, whatever was typed.
        actor=replace(spec.actor, head=Head.AUTO),
        measure=replace(spec.measure, trace=True, noise_floor=False, trials=False, warmup=0),
    )
    folders: list[Path] = []
    for name, environment in zip(NAMES, environments, strict=True):
        print_pairs(open_console(screen), [(name, "again, traced")])
        planned_run = _plan_run(traced, f"traces/{name}", name, environment)
        _, error, folder = judge_child(campaign.run(planned_run))
        if folder is None:
            return f"not found: the traced replay in the {name} environment failed: {error}"
        folders.append(folder)
    try:
        return describe_first_difference(find_first_difference(folders[0], folders[1]))
    except UsageError as error:
        return f"not found: {format_error_with_flags(error)}"
