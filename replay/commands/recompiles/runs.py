"""Run `replay recompiles`: the inputs twice under each policy, and what that took.

`recompiles.json` (campaign.py) has what each policy took in its result:

    {"policies": [{"policy": "dynamic", "options": "--compile", "num_graphs": 1, "recompilations": {}, ...,
                   "net_seconds": 120.3}]}
"""

import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from actor_init.spec import ActorSpec, UsageError
from capture.facts import Setting
from replay.campaign.campaign import Campaign, PlannedRun, catch_interruption
from replay.campaign.executor import ThisMachine
from replay.campaign.feedable_inputs import FeedableInputs
from replay.campaign.result import CampaignResult
from replay.commands.recompiles.policies import (
    Policy,
    PolicyResult,
    RecompilesPlan,
    apply_policy,
    choose_lengths,
    find_best,
    find_break_even,
    find_policy_options,
)
from replay.options.option_parsing import format_command_line, format_error_with_flags
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import describe_damaged_files, format_milliseconds, pluralise
from replay.processes.pool import Machine, ProcessResult, RunLimits
from replay.profiling.prediction import InputShape, RowLayout, infer_row_layout
from replay.runlog.reader import read_run_below
from replay.runlog.records import PassRecord

# The most reasons that are listed for a policy.
MOST_REASONS = 3


class RecompilesConsole:
    """Prints what each policy of compiling took, and which to use.

    policy     graphs  recompiled  compiling s  padding  ms a pass  s for 1,000
    off             0           0          0.0     0.0%      120.1        121.0
    dynamic         1           0         11.2     0.0%       98.3        109.8

    recompiled automatic, 1 time: forward: N: tensor 'hidden_states' size mismatch at index 1. expected N, actual N
    use        dynamic: --compile; off takes less for fewer than 513 passes
    """

    def __init__(self, command: str, num_inputs: int, damaged: Sequence[tuple[Path, str]], file: IO[str]) -> None:
        self._out = open_console(file)
        inputs = f"{pluralise(num_inputs, 'input')}, twice under each policy"
        print_pairs(self._out, [("command", command), ("inputs", inputs), *describe_damaged_files(damaged)])

    def show_policy(self, policy: Policy) -> None:
        print_pairs(self._out, [("runs", policy.value)])

    def show_result(self, result: PolicyResult) -> None:
        if result.error:
            print_pairs(self._out, [("failed", f"{result.policy}: {result.error}")])

    def finish(self, results: Sequence[PolicyResult], num_passes: int, path: Path) -> None:
        """Print the table, the guards that failed, and which policy to use."""
        print_line(self._out)
        plain = next((result.fed_tokens for result in results if result.policy is Policy.OFF), 0)
        nets = [result.net_seconds for result in results]
        print_table(
            self._out,
            {
                "setting": [result.policy.value for result in results],
                "graphs": [str(result.num_graphs) for result in results],
                "recompiled": [str(sum(result.recompilations.values())) for result in results],
                "compiling s": [f"{result.compile_seconds:,.1f}" for result in results],
                "padding": [_format_padding(result, plain) for result in results],
                "ms a pass": [format_milliseconds(result.pass_seconds) for result in results],
                f"s for {num_passes:,}": ["-" if net is None else f"{net:,.1f}" for net in nets],
            },
        )
        print_line(self._out)
        for result in results:
            reasons = list(result.recompilations.items())
            pairs = [
                ("recompiled", f"{result.policy}, {number} x {reason}") for reason, number in reasons[:MOST_REASONS]
            ]
            num_unlisted = len(reasons) - MOST_REASONS
            unlisted = (
                [("", f"{result.policy}: {pluralise(num_unlisted, 'other guard')}, see {path.name}")]
                if num_unlisted > 0
                else []
            )
            print_pairs(self._out, [*pairs, *unlisted])
        print_pairs(self._out, [*_advise(results, num_passes), ("written", str(path))])


def _format_padding(result: PolicyResult, plain: int) -> str:
    is_known = plain and result.pass_seconds is not None
    return f"{max(0.0, result.fed_tokens / plain - 1):.1%}" if is_known else "-"


def _advise(results: Sequence[PolicyResult], num_passes: int) -> list[tuple[str, str]]:
    """Say which policy to use for so many passes, and from how many on it pays."""
    best_result = find_best(results, num_passes)
    if best_result is None:
        return [("use", "not known: no policy replayed all inputs twice")]
    if best_result.policy is Policy.OFF:
        compiled = [
            (first, result) for result in results if (first := find_break_even(result, best_result)) is not None
        ]
        first, later_result = min(compiled, key=lambda pair: pair[0], default=(0, best_result))
        later = (
            f"; {later_result.policy} takes less from {first:,} passes on"
            if compiled
            else "; none of the others is faster"
        )
        return [("use", f"off, no compiling, for {num_passes:,} passes{later}")]
    off = next(result for result in results if result.policy is Policy.OFF)
    first_pass = find_break_even(best_result, off)
    than = "" if first_pass is None else f"; off takes less for fewer than {first_pass:,} passes"
    return [("use", f"{best_result.policy}: {best_result.options}{than}")]


CACHES = "TORCHINDUCTOR_CACHE_DIR"
_NUMBER = re.compile(r"\b\d+(/\d+)?\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecompilesOutcome:
    """The `result` of recompiles.json: what each policy took, and the files that cannot be read, in words."""

    policies: Sequence[PolicyResult]
    damaged: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RecompilesResult(CampaignResult):
    """What each policy took; `off` is the first."""

    policies: Sequence[PolicyResult]

    def _list_rows(self) -> Iterable[dict[str, Any]]:
        for policy in self.result["policies"]:
            yield {**policy, "recompilations": sum(policy["recompilations"].values())}


def begin(plan: RecompilesPlan, words: Sequence[str], limits: RunLimits, *, screen: IO[str]) -> RecompilesResult:
    """Run each policy in processes of its own. The exit code is 0 if all of them finished.

    `off` always runs, first: what the others are compared with. Raises UsageError before anything has run if there is
    nothing to replay, or options contradict each other.
    """
    inputs = _read_inputs(plan)
    for policy in plan.policies:
        # This refuses options that a policy cannot have.
        apply_policy(policy, plan.spec.actor, multiple=plan.multiple, sizes=[1])
    campaign = Campaign.begin(
        "recompiles",
        plan.spec.measure.log_folder,
        plan,
        arguments=[*words, *format_command_line(plan.spec)],
        machine=Machine.detect(),
    )
    return _run(campaign, inputs, limits, screen)


def resume(folder: Path, limits: RunLimits, *, screen: IO[str]) -> RecompilesResult:
    """Run the policies that have not run yet, and report all of them. Raises UsageError if there is no such folder."""
    campaign = Campaign.read("recompiles", folder, RecompilesPlan)
    campaign.check_can_continue(ThisMachine())
    return _run(campaign, _read_inputs(campaign.plan), limits, screen)


def _read_inputs(plan: RecompilesPlan) -> FeedableInputs:
    return FeedableInputs.read(plan.spec.inputs, loss=plan.spec.measure.loss, grad_accumulation=1)


def _run(
    campaign: Campaign[RecompilesPlan], inputs: FeedableInputs, limits: RunLimits, screen: IO[str]
) -> RecompilesResult:
    plan = campaign.plan
    campaign.open(ThisMachine(), limits)
    console = RecompilesConsole(campaign.command_line, len(inputs.shapes), inputs.unfeedable, screen)
    work = _PolicyRuns(campaign=campaign, shapes=inputs.shapes, console=console)
    results: list[PolicyResult] = []
    damaged = [text for _, text in describe_damaged_files(inputs.unfeedable)]
    with catch_interruption() as interruption:
        for policy in plan.policies:
            result = work.run(policy)
            results.append(replace(result, net_seconds=result.estimate_seconds(plan.num_passes)))
            console.show_result(results[-1])
            campaign.result = RecompilesOutcome(policies=results, damaged=damaged)
            campaign.write()
    console.finish(results, plan.num_passes, campaign.path)
    interruption.reraise(campaign.folder)
    exit_code = 1 if inputs.unfeedable or any(result.error for result in results) else 0
    return RecompilesResult.from_campaign(campaign, exit_code=exit_code, policies=results)


@dataclass(kw_only=True, slots=True)
class _PolicyRuns:
    campaign: Campaign[RecompilesPlan]
    shapes: Sequence[InputShape]
    console: RecompilesConsole
    # How rows are fed, which the run without compiling tells.
    rows: RowLayout | None = None

    def run(self, policy: Policy) -> PolicyResult:
        """Replay all inputs twice under `policy`. Where lengths are too short, or the like, the result says so."""
        plan = self.campaign.plan
        try:
            sizes = self._choose_lengths() if policy is Policy.BUCKETS else [1]
        except UsageError as error:
            return PolicyResult(policy=policy, error=format_error_with_flags(error))
        actor = apply_policy(policy, plan.spec.actor, multiple=plan.multiple, sizes=sizes)
        numbers = [str(shape.number) for shape in self.shapes]
        planned_run = PlannedRun(
            home=f"runs/{policy}",
            spec=replace(
                plan.spec,
                actor=replace(actor, grad_accumulation=1),
                inputs=replace(plan.spec.inputs, pick_inputs=",".join(numbers + numbers)),
                measure=replace(plan.spec.measure, noise_floor=False),
            ),
            num_processes=actor.parallel.tp * actor.parallel.ring,
        )
        self.console.show_policy(policy)
        with _use_empty_cache(self.campaign.folder / "cache"):
            child = self.campaign.run(planned_run)
        folder, _, records = read_run_below(child.logs)
        if self.rows is None and policy is Policy.OFF:
            first = [record for record in records if record.error is None and record.index < len(self.shapes)]
            fed = ((self.shapes[record.index], record.input.fed_tokens) for record in first)
            self.rows = infer_row_layout(fed) if first else None
        return summarize_run(policy, actor, records, child, len(self.shapes), str(folder) if folder is not None else "")

    def _choose_lengths(self) -> list[int]:
        """Return the lengths of buckets. Raises UsageError if a row is longer than all that were asked for."""
        if self.rows is None:
            raise UsageError("no pass could be run without compiling, so the lengths of rows are not known")
        lengths = {shape.find_longest_row(self.rows): shape for shape in self.shapes}
        if isinstance(self.campaign.plan.sizes, int):
            return choose_lengths(
                [shape.find_longest_row(self.rows) for shape in self.shapes], self.campaign.plan.sizes
            )
        longest = max(lengths)
        if longest > max(self.campaign.plan.sizes):
            typed_sizes = ",".join(map(str, self.campaign.plan.sizes))
            raise UsageError(
                Setting("buckets", typed_sizes),
                f"holds no row of {longest} tokens, as {lengths[longest].source} has",
                f"Try: {Setting('buckets', f'{typed_sizes},{longest}')}",
            )
        return list(self.campaign.plan.sizes)


def summarize_run(
    policy: Policy, actor: ActorSpec, records: Sequence[PassRecord], child: ProcessResult, num_inputs: int, log: str
) -> PolicyResult:
    """Sum up what a run wrote, however far it came; of several ranks the slowest counts."""
    passes: dict[int, list[PassRecord]] = {}
    for record in records:
        passes.setdefault(record.index, []).append(record)
    failed = next((record for record in records if record.error is not None), None)
    error = "" if failed is None else f"{failed.source}: {failed.error_type}: {failed.error}"
    complete_passes = {index: ranks for index, ranks in passes.items() if all(record.error is None for record in ranks)}
    seconds = {index: max(record.cost.seconds or 0.0 for record in ranks) for index, ranks in complete_passes.items()}
    again = {index - num_inputs: seconds[index] for index in seconds if index >= num_inputs}
    both = [index for index in again if index in seconds]
    reasons = Counter(
        _NUMBER.sub("N", reason)
        for ranks in complete_passes.values()
        for record in ranks[:1]
        for reason in record.compilation.recompilations
    )
    is_whole = len(again) == num_inputs
    return PolicyResult(
        policy=policy,
        options=shlex.join(find_policy_options(actor)),
        num_passes=len(complete_passes),
        num_graphs=sum(max(record.compilation.new_graphs for record in ranks) for ranks in complete_passes.values()),
        recompilations=dict(reasons.most_common()),
        compile_seconds=sum(
            max(record.compilation.compile_seconds for record in ranks) for ranks in complete_passes.values()
        ),
        extra_seconds=sum(seconds[index] - again[index] for index in both),
        pass_seconds=sum(again.values()) / num_inputs if is_whole else None,
        fed_tokens=sum(ranks[0].input.fed_tokens for index, ranks in complete_passes.items() if index < num_inputs),
        error=error or child.error or ("" if is_whole else f"{len(complete_passes)} of {2 * num_inputs} passes"),
        log=log,
    )


@contextmanager
def _use_empty_cache(folder: Path) -> Iterator[None]:
    """Have processes that start now compile into an empty folder, which is removed at the end."""
    before = os.environ.get(CACHES)
    os.environ[CACHES] = str(folder.absolute())
    try:
        yield
    finally:
        if before is None:
            del os.environ[CACHES]
        else:
            os.environ[CACHES] = before
        shutil.rmtree(folder, ignore_errors=True)
