"""A campaign runs each job once, whatever ends the command that asked for it."""

import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from actor_init.spec import UsageError
from replay.campaign.campaign import JOURNAL, Campaign, PlannedRun, catch_interruption
from replay.campaign.executor import ThisMachine
from replay.options.spec import ReplaySpec
from replay.processes.pool import Machine, ProcessResult, RunLimits, Task

LIMITS = RunLimits(run_limit_seconds=9.0, total_seconds=None, at_once=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyPlan:
    """Ask for as many jobs, which differ in the input that they replay."""

    spec: ReplaySpec
    num_jobs: int

    @property
    def planned_runs(self) -> list[PlannedRun]:
        return [
            PlannedRun(
                home=f"runs/{number}",
                spec=replace(self.spec, inputs=replace(self.spec.inputs, skip_inputs=number, max_inputs=1)),
            )
            for number in range(self.num_jobs)
        ]


@dataclass
class FakeMachine(ThisMachine):
    """Ends each job with the exit code for its position, without processes, or raises KeyboardInterrupt before it."""

    codes: dict[int, int | None] = field(default_factory=dict)
    breaks_at: int | None = None
    is_alone: bool = True
    ran: list[str] = field(default_factory=list)

    def make_runner(self, root: Path, machine: Machine, at_once: int | None) -> Any:
        return self

    def gives_whole_machine(self, machine: Machine, at_once: int | None) -> bool:
        return self.is_alone

    num_running = 0

    def __call__(self, tasks: Any, *, start_deadline: float = math.inf) -> Iterator[tuple[int, ProcessResult]]:
        for position, task in tasks:
            if position == self.breaks_at:
                raise KeyboardInterrupt
            assert isinstance(task, Task)
            task.output.parent.mkdir(parents=True, exist_ok=True)
            task.output.write_text("replay: out of memory\n")
            self.ran.append(str(task.job.spec.inputs.skip_inputs))
            yield (
                position,
                ProcessResult(exit_code=self.codes.get(position, 0), seconds=1.5, output=task.output, logs=task.logs),
            )


def begin_campaign(tmp_path: Path, num_jobs: int = 4) -> Campaign[ToyPlan]:
    plan = ToyPlan(spec=ReplaySpec(), num_jobs=num_jobs)
    machine = Machine(num_devices=2, has_gpus=False)
    return Campaign.begin("scan", tmp_path, plan, arguments=[], machine=machine)


def settle_all(
    campaign: Campaign[ToyPlan], machine: FakeMachine, jobs: Sequence[PlannedRun] | None = None
) -> dict[int, tuple[Any, ...]]:
    campaign.open(machine, LIMITS)
    results = {}
    with catch_interruption():
        for finished in campaign.run_all(campaign.plan.planned_runs if jobs is None else jobs):
            results[finished.position] = (
                finished.process_result.exit_code,
                finished.process_result.seconds,
                finished.process_result.logs,
                finished.process_result.error,
            )
    return results


@pytest.mark.parametrize("breaks_at", range(4))
def test_a_campaign_that_was_broken_off_goes_on_and_runs_no_job_twice(breaks_at: int, tmp_path: Path) -> None:
    whole = settle_all(begin_campaign(tmp_path / "whole"), FakeMachine(codes={1: 1, 2: -9}))
    campaign = begin_campaign(tmp_path / "logs")
    first, second = FakeMachine(codes={1: 1, 2: -9}, breaks_at=breaks_at), FakeMachine(codes={1: 1, 2: -9})
    before = settle_all(campaign, first)
    again = settle_all(Campaign.read("scan", campaign.folder, ToyPlan), second)
    assert len(first.ran) == len(before) == breaks_at
    assert first.ran + second.ran == ["0", "1", "2", "3"]
    in_place = {
        place: (*told[:2], campaign.folder / told[2].relative_to(next((tmp_path / "whole").iterdir())))
        for place, told in whole.items()
    }
    assert {place: told[:3] for place, told in again.items()} == in_place
    assert settle_all(Campaign.read("scan", campaign.folder, ToyPlan), third := FakeMachine()) == again
    assert third.ran == []


def test_a_line_that_was_cut_short_is_as_if_it_had_not_run_and_spoils_no_other(tmp_path: Path) -> None:
    campaign = begin_campaign(tmp_path)
    settle_all(campaign, FakeMachine())
    journal = campaign.folder / JOURNAL
    journal.write_text(journal.read_text()[:-9])
    again = FakeMachine()
    assert len(settle_all(Campaign.read("scan", campaign.folder, ToyPlan), again)) == 4
    assert again.ran == ["3"]
    assert len([json.loads(line) for line in journal.read_text().splitlines()]) == 4


def test_a_job_is_known_by_what_it_runs_and_not_by_where_its_files_lie(tmp_path: Path) -> None:
    campaign = begin_campaign(tmp_path)
    settle_all(campaign, FakeMachine())
    job = campaign.plan.planned_runs[2]
    elsewhere = replace(job.spec, measure=replace(job.spec.measure, log_folder=Path("elsewhere")))
    known = [replace(job, home="other", spec=elsewhere)]
    others = [
        replace(job, num_processes=2),
        replace(job, python="/opt/python"),
        replace(job, spec=replace(job.spec, actor=replace(job.spec.actor, num_layers=1))),
    ]
    assert [campaign.find_ended(job) is not None for job in [*known, *others]] == [True, False, False, False]


@pytest.mark.parametrize(
    ("exit_code", "is_alone", "runs_again"),
    [(0, False, False), (2, False, False), (-9, False, True), (None, False, True), (-9, True, False)],
)
def test_what_failed_beside_others_runs_again(
    exit_code: int | None, is_alone: bool, runs_again: bool, tmp_path: Path
) -> None:
    campaign = begin_campaign(tmp_path, num_jobs=1)
    settle_all(campaign, FakeMachine(codes={0: exit_code}, is_alone=is_alone))
    again = FakeMachine()
    settle_all(Campaign.read("scan", campaign.folder, ToyPlan), again)
    assert bool(again.ran) is runs_again


def test_of_a_run_that_ran_again_the_last_result_counts(tmp_path: Path) -> None:
    campaign = begin_campaign(tmp_path, num_jobs=2)
    settle_all(campaign, FakeMachine(codes={0: -9, 1: -9}, is_alone=False))
    settle_all(Campaign.read("scan", campaign.folder, ToyPlan), FakeMachine(codes={0: 0, 1: 1}))
    assert len((campaign.folder / JOURNAL).read_text().splitlines()) == 4
    read, again = Campaign.read("scan", campaign.folder, ToyPlan), FakeMachine()
    results = settle_all(read, again)
    assert {place: told[:3] for place, told in results.items()} == {
        place: (code, 1.5, campaign.folder / f"runs/{place}/1") for place, code in enumerate((0, 1))
    }
    assert (again.ran, read.num_ended) == ([], 2)
    forgotten = read.plan.planned_runs[1]
    read.forget(forgotten)
    assert read.find_ended(forgotten) is None
    assert settle_all(read, again)[1][0] == 0
    assert again.ran == ["1"]


def test_what_is_typed_to_go_on_names_a_folder_with_a_space(tmp_path: Path) -> None:
    campaign = begin_campaign(tmp_path / "my logs")
    assert shlex.split(campaign.continue_command) == ["replay", "scan", "--continue", str(campaign.folder)]


@pytest.mark.parametrize(
    ("num_gpus", "at_once", "is_alone"),
    [(0, None, True), (0, 1, True), (0, 2, False), (2, None, True), (2, 1, False), (1, 1, True), (1, 2, False)],
)
def test_a_run_is_alone_unless_others_run_on_the_machine_or_on_another_gpu_of_it(
    num_gpus: int, at_once: int | None, is_alone: bool
) -> None:
    """--at-once is a number of processes on each GPU, and without it one run has all of them."""
    machine = Machine(num_devices=num_gpus or 2, has_gpus=num_gpus > 0)
    assert ThisMachine().gives_whole_machine(machine, at_once) is is_alone


def damage(folder: Path) -> None:
    (folder / "scan.json").write_text("{")


def change_format(folder: Path) -> None:
    path = folder / "scan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 7}))


def change_plan(folder: Path) -> None:
    path = folder / "scan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "plan": {"num_jobs": "4"}}))


def change_journal(folder: Path) -> None:
    (folder / JOURNAL).write_text('{"job": 3}\n')


def damage_journal(folder: Path) -> None:
    (folder / JOURNAL).write_bytes(b'{"job": "\xff"}\n')


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (damage, "is damaged: Expecting property name"),
        (
            change_format,
            "is of format 7; this version can only continue format 2. Try: replay scan, from the beginning",
        ),
        (change_plan, "is damaged: plan: "),
        (change_journal, "journal.jsonl is damaged in line 1: job is 3"),
        (damage_journal, "journal.jsonl is damaged in line 1: no JSON: invalid unicode code point"),
    ],
)
def test_what_cannot_go_on_is_refused(change: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    campaign = begin_campaign(tmp_path)
    settle_all(campaign, FakeMachine())
    change(campaign.folder)
    with pytest.raises(UsageError) as refused:
        Campaign.read("scan", campaign.folder, ToyPlan)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("machine", "torch", "says"),
    [
        (Machine(num_devices=2, has_gpus=True), None, " was begun on 2 GPUs, and here is a CPU. Go on there"),
        (Machine(num_devices=2, has_gpus=False), "2.0", " has runs of torch 2.0 there, "),
    ],
)
def test_what_is_left_runs_where_the_rest_ran_and_a_whole_campaign_is_read_anywhere(
    machine: Machine, torch: str | None, says: str, tmp_path: Path
) -> None:
    campaign = begin_campaign(tmp_path)
    settle_all(campaign, FakeMachine(breaks_at=3))
    campaign.machine, campaign.versions = machine, {**campaign.versions, **({"torch": torch} if torch else {})}
    campaign.write()
    again = Campaign.read("scan", campaign.folder, ToyPlan)
    again.check_can_continue(ThisMachine(), again.plan.planned_runs[:3])
    with pytest.raises(UsageError) as refused:
        again.check_can_continue(ThisMachine(), again.plan.planned_runs)
    assert says in str(refused.value)
