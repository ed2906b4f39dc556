"""Run `replay scan`: replay a folder in groups of inputs, each in its own processes.

`scan.json` (campaign.py) has the groups in its result:

    {"groups": [{"first": 0, "size": 8, "state": "done", "outcome": "REPRODUCED", "said": "8 REPRODUCED",
                 "seconds": 8.1, "log": "groups/0001/0/20261121-185921-replay"}]}
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from actor_init.as_json import to_json
from actor_init.spec import UsageError
from capture.facts import Setting
from capture.progress_bar import ProgressBar
from replay.campaign.campaign import Campaign, PlannedRun, catch_interruption
from replay.campaign.campaign_options import list_words
from replay.campaign.executor import Executor, open_executor
from replay.campaign.result import CampaignResult
from replay.options.option_parsing import format_command_line
from replay.options.ray_options import RayOptions
from replay.options.spec import ReplaySpec
from replay.output.printing import open_console, print_line, print_pairs
from replay.output.text import describe_damaged_files, pluralise
from replay.processes.pool import ProcessResult, RunLimits
from replay.resolution.selection import select
from replay.runlog.reader import read_run_below
from replay.runlog.run_file import read_section
from replay.verdict.outcomes import Outcome, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanPlan:
    """How the inputs of a folder are dealt into groups.

    spec        of every group, but for its inputs
    size        inputs of a group
    num_inputs  of all groups
    damaged     files that cannot be read, in words
    """

    spec: ReplaySpec
    size: int
    num_inputs: int
    damaged: list[str]

    @classmethod
    def from_inputs(
        cls, spec: ReplaySpec, size: int, *, num_inputs: int, window: int, damaged: Sequence[str]
    ) -> "ScanPlan":
        """Round `size` up to whole accumulation windows, of `window` inputs: a gradient is never split."""
        return cls(spec=spec, size=math.ceil(size / window) * window, num_inputs=num_inputs, damaged=list(damaged))

    @property
    def groups(self) -> list["ScanGroup"]:
        return [
            ScanGroup(first=self.spec.inputs.skip_inputs + first, size=min(self.size, self.num_inputs - first))
            for first in range(0, self.num_inputs, self.size)
        ]

    @property
    def planned_runs(self) -> list[PlannedRun]:
        """Return the planned run of each group."""
        return [
            PlannedRun(
                home=f"groups/{number:04d}",
                spec=replace(
                    self.spec,
                    inputs=replace(self.spec.inputs, skip_inputs=group.first, max_inputs=group.size),
                ),
                num_processes=self.spec.actor.parallel.tp * self.spec.actor.parallel.ring,
            )
            for number, group in enumerate(self.groups, start=1)
        ]


class GroupState(StrEnum):
    # The group has not been run, or was interrupted.
    PENDING = "pending"
    # Every pass was replayed.
    DONE = "done"
    # A pass failed, or the run ended before its last pass.
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanGroup:
    """Inputs of one run: `size` of them, behind the `first` ones of the folder."""

    first: int
    size: int
    state: GroupState = GroupState.PENDING
    # Outcome of the run's verdict.
    outcome: str = ""
    # The verdict in words, or the error.
    said: str = ""
    # The first tensor with a nan or an inf, and its pass; empty: none is known.
    not_finite: str = ""
    seconds: float | None = None
    # Folder of the run's log, relative to the folder of scan.json.
    log: str | None = None

    def with_result(self, child: ProcessResult, folder: Path) -> "ScanGroup":
        """Return what became of it. A damaged file is no fault of the groups that come upon it."""
        log, run, records = read_run_below(child.logs)
        ended = replace(self, seconds=child.seconds, log=None if log is None else str(log.relative_to(folder)))
        if failed := [record for record in records if record.error is not None]:
            first = failed[0]
            more = f", and {pluralise(len(failed) - 1, 'more pass')}" if failed[1:] else ""
            message = f"pass {first.index + 1}, {first.source}: {first.error_type}: {first.error}{more}"
            return replace(ended, state=GroupState.FAILED, said=message)
        end = None if run is None else run.end
        verdict = read_section(Verdict, None if end is None else end.verdict, source=f"{log}: verdict")
        # With a verdict, the exit code 1 means that a file before the group's inputs is damaged.
        if end is None or verdict is None or child.exit_code not in (0, 1):
            return replace(ended, state=GroupState.FAILED, said=child.error)
        tensor = end.first_non_finite
        return replace(
            ended,
            state=GroupState.DONE,
            outcome=verdict.outcome,
            said=_describe_verdict(verdict),
            not_finite="" if tensor is None else f"pass {tensor.index + 1}, {tensor.source}: {tensor.what}",
        )


def _describe_verdict(verdict: Verdict) -> str:
    counts = ", ".join(f"{number} {outcome}" for outcome, number in verdict.counts.items())
    return f"{counts}; {verdict.reason}" if verdict.reason else counts


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanOutcome:
    """The `result` of scan.json: what became of each group, and the files that cannot be read, in words."""

    groups: Sequence[ScanGroup]
    damaged: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanResult(CampaignResult):
    """What became of each group, and the files that cannot be read, in words."""

    groups: Sequence[ScanGroup]
    damaged: Sequence[str]

    def _list_rows(self) -> Iterable[dict[str, Any]]:
        return map(to_json, self.groups)


def begin(spec: ReplaySpec, size: int, limits: RunLimits, ray: RayOptions | None, *, screen: IO[str]) -> ScanResult:
    """Scan the inputs of `spec` in groups of `size`.

    Raises UsageError before anything has run if there is nothing to replay, or too few devices.
    """
    num_processes = spec.actor.parallel.tp * spec.actor.parallel.ring
    selection = select(spec.inputs, 0, 1, loss=spec.measure.loss, grad_accumulation=spec.actor.grad_accumulation)
    if not selection.inputs:
        raise UsageError("every input is damaged. Try: replay inspect, with that folder")
    plan = ScanPlan.from_inputs(
        spec,
        size,
        num_inputs=len(selection.inputs),
        window=selection.grad_accumulation,
        damaged=[text for _, text in describe_damaged_files(selection.damaged)],
    )
    with open_executor(ray) as executor:
        machine = executor.choose_machine(None)
        if machine.has_gpus and ray is None and num_processes > machine.num_devices:
            raise UsageError(
                f"tp x ring needs {pluralise(num_processes, 'GPU')}, and there are {machine.num_devices}. "
                f"Try: a smaller {Setting('tp')} or {Setting('ring')}"
            )
        campaign = Campaign.begin(
            "scan",
            spec.measure.log_folder,
            plan,
            arguments=[*list_words({"group": plan.size}), *format_command_line(spec)],
            machine=machine,
        )
        return _run(campaign, executor, limits, screen)


def resume(folder: Path, limits: RunLimits, ray: RayOptions | None, *, screen: IO[str]) -> ScanResult:
    """Run the groups of a scan that have not run yet, and report all of them.

    Raises UsageError if there is no such scan, or if it was made on another machine.
    """
    campaign = Campaign.read("scan", folder, ScanPlan)
    with open_executor(ray) as executor:
        campaign.check_can_continue(executor, campaign.plan.planned_runs)
        return _run(campaign, executor, limits, screen)


def _run(campaign: Campaign[ScanPlan], executor: Executor, limits: RunLimits, screen: IO[str]) -> ScanResult:
    campaign.open(executor, limits)
    groups = campaign.plan.groups
    console = ScanConsole(campaign, groups, screen)
    with catch_interruption() as interruption:
        for finished in campaign.run_all(campaign.plan.planned_runs):
            groups[finished.position] = groups[finished.position].with_result(finished.process_result, campaign.folder)
            console.show_group(finished.position, groups[finished.position], is_new=finished.is_new)
    campaign.result = ScanOutcome(groups=groups, damaged=campaign.plan.damaged)
    campaign.write()
    console.finish()
    interruption.reraise(campaign.folder)
    bad = (Outcome.DIFFERS, Outcome.UNSETTLED)
    is_clean = all(
        group.state is GroupState.DONE and group.outcome not in bad and not group.not_finite for group in groups
    )
    exit_code = 0 if is_clean and not campaign.plan.damaged else 1
    return ScanResult.from_campaign(campaign, exit_code=exit_code, groups=groups, damaged=campaign.plan.damaged)


class ScanConsole:
    """Prints a line per group as it ends, then what failed or differs.

    groups     4 of 8 inputs, in processes of their own
    1 of 4, inputs 1 to 8: REPRODUCED, 8 REPRODUCED, 9.3 s
    """

    def __init__(self, campaign: Campaign[ScanPlan], groups: Sequence[ScanGroup], file: IO[str]) -> None:
        """Print the header. `groups` are all of them, as they stand whenever something is printed."""
        self._out = open_console(file)
        self._campaign = campaign
        self._groups = groups
        sizes = f"{pluralise(len(groups), 'group')} of at most {pluralise(groups[0].size, 'input')}"
        device = campaign.machine.text
        print_pairs(
            self._out,
            [("command", campaign.command_line), ("device", device), ("groups", sizes), *self._list_damaged()],
        )
        print_line(self._out)
        self._bar = ProgressBar(self._out.file)
        self._num_new = 0
        # Groups that an earlier command has run.
        self._num_known = 0

    def show_group(self, number: int, group: ScanGroup, *, is_new: bool) -> None:
        """Print a group's line, unless an earlier invocation did."""
        self._num_new += is_new
        self._num_known += not is_new
        if not is_new:
            return
        self._bar.clear()
        seconds = f", {group.seconds:.1f} s" if group.seconds is not None else ""
        total = len(self._groups)
        print_line(self._out, f"{number + 1} of {total}, {_describe_inputs(group)}: {_describe_group(group)}{seconds}")
        num_failed = sum(group.state is GroupState.FAILED for group in self._groups)
        note = f"{self._campaign.num_running} running, {num_failed} failed"
        self._bar.show(self._num_new, total - self._num_known, note)

    def finish(self) -> None:
        """Print what failed or differs, how many groups came out how, and how to go on."""
        self._bar.clear()
        print_line(self._out)
        groups = self._groups
        failed = [
            ("failed", f"{_describe_inputs(group)}: {group.said}")
            for group in groups
            if group.state is GroupState.FAILED
        ]
        failed += [
            ("not finite", f"{_describe_inputs(group)}: {group.not_finite}") for group in groups if group.not_finite
        ]
        counts = Counter(group.outcome or group.state.value for group in groups)
        is_open = any(group.state is GroupState.PENDING for group in groups)
        print_pairs(
            self._out,
            [
                *self._list_damaged(),
                *failed,
                ("written", str(self._campaign.path)),
                ("result", ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())),
                *([("go on", self._campaign.continue_command)] if is_open else []),
            ],
        )

    def _list_damaged(self) -> list[tuple[str, str]]:
        return [("damaged", text) for text in self._campaign.plan.damaged]


def _describe_inputs(group: ScanGroup) -> str:
    return f"inputs {group.first + 1} to {group.first + group.size}"


def _describe_group(group: ScanGroup) -> str:
    return f"{group.outcome}, {group.said}" if group.outcome else f"failed: {group.said}"
