"""Declare the options of `replay scan`: its own, and those of a replay that it does not set itself."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import typer

from capture.progress_bar import ProgressBar
from replay.campaign.campaign import Campaign, going_on
from replay.commands.scan.runs import Group, ScanPlan, State
from replay.options.option_parsing import Action, Toggle, replay_spec, with_options
from replay.options.ray_options import AddressOption, LauncherOption, ray_options
from replay.options.spec import check_inputs
from replay.output.printing import open_console, print_line, print_pairs
from replay.output.text import counted
from replay.processes.launch import refuse_launcher
from replay.processes.pool import RunLimits

# Print the progress and the answer of `replay scan`: a line per group as it ends, then what failed or differs.
#
# groups     4 of 8 inputs, in processes of their own
# 1 of 4, inputs 1 to 8: REPRODUCED, 8 REPRODUCED, 9.3 s


class ScanConsole:
    def __init__(self, campaign: Campaign[ScanPlan], groups: Sequence[Group], file: IO[str] | None = None) -> None:
        """Print the header. `groups` are all of them, as they stand whenever something is printed."""
        self._out = open_console(file)
        self._campaign = campaign
        self._groups = groups
        sizes = f"{counted(len(groups), 'group')} of at most {counted(groups[0].size, 'input')}"
        device = campaign.machine.text
        print_pairs(self._out, [("command", campaign.command), ("device", device), ("groups", sizes), *self._damaged()])
        print_line(self._out)
        self._bar = ProgressBar(self._out.file)
        self._num_new = 0
        self._num_known = 0  # that an earlier invocation ran

    def ended(self, number: int, group: Group, *, is_new: bool) -> None:
        """Print a group's line, unless an earlier invocation did."""
        self._num_new += is_new
        self._num_known += not is_new
        if not is_new:
            return
        self._bar.clear()
        seconds = f", {group.seconds:.1f} s" if group.seconds is not None else ""
        total = len(self._groups)
        print_line(self._out, f"{number + 1} of {total}, {_inputs(group)}: {_said(group)}{seconds}")
        num_failed = sum(group.state is State.FAILED for group in self._groups)
        note = f"{self._campaign.num_running} running, {num_failed} failed"
        self._bar.show(self._num_new, total - self._num_known, note)

    def finish(self) -> None:
        """Print what failed or differs, how many groups came out how, and how to go on."""
        self._bar.clear()
        print_line(self._out)
        groups = self._groups
        failed = [("failed", f"{_inputs(group)}: {group.said}") for group in groups if group.state is State.FAILED]
        counts = Counter(group.outcome or group.state.value for group in groups)
        is_open = any(group.state is State.PENDING for group in groups)
        print_pairs(
            self._out,
            [
                *self._damaged(),
                *failed,
                ("written", str(self._campaign.path)),
                ("result", ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())),
                *([("go on", f"replay scan --continue {self._campaign.folder}")] if is_open else []),
            ],
        )

    def _damaged(self) -> list[tuple[str, str]]:
        return [("damaged", text) for text in self._campaign.plan.damaged]


def _inputs(group: Group) -> str:
    return f"inputs {group.first + 1} to {group.first + group.size}"


def _said(group: Group) -> str:
    return f"{group.outcome}, {group.said}" if group.outcome else f"failed: {group.said}"


GROUP_SIZE = 8  # inputs


def _serves_scan(toggle: Toggle) -> bool:
    """Does the option apply to scan? Each group begins from the same weights, so nothing is trained or saved."""
    return toggle.part != "state" and toggle.field not in (
        *("input_file", "uneven", "shuffle_inputs", "random_seed", "epochs", "learning_rate", "step"),
        *("full_names", "quiet", "name"),
    )


@partial(with_options, serves=_serves_scan)
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
    launcher: LauncherOption = None,
    address: AddressOption = None,
    **given: Any,
) -> Action:
    """Replay a folder in groups of inputs, each in its own processes: one that fails or hangs ends no other.

    Exit code 0: every pass was replayed, and none differs from the job; 1: one failed or differs.
    """
    ray = ray_options(launcher, address)
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
