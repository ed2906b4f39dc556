"""A child gets its job as JSON; what this version cannot run is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actor_init.spec import ActorSpec, Dtype, ParallelSpec, UsageError
from replay.command_line.cli import main, parse_command_line
from replay.options.spec import MeasureSpec, ReplaySpec
from replay.processes.child_job import ChildJob
from tests.helpers.repeated import repeated_by

SPEC = ReplaySpec(
    actor=ActorSpec(dtype=Dtype.BF16, parallel=ParallelSpec(tp=2)), measure=MeasureSpec(log_folder=Path("logs/a"))
)


def test_a_job_holds_what_was_set_and_nothing_else() -> None:
    assert json.loads(ChildJob(spec=SPEC).text) == {
        "format": 1,
        "spec": {"actor": {"dtype": "bf16", "parallel": {"tp": 2}}, "measure": {"log_folder": "logs/a"}},
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "job.json is no job of a replay: Expecting property name"),
        ("[]", "job.json is no job of a replay: 'list' object has no attribute 'get'"),
        ('{"spec": {}}', "job.json is a job of format None; this version runs 1 alone"),
        ('{"format": 2, "spec": {}}', "job.json is a job of format 2; this version runs 1 alone"),
        ('{"format": 1, "spec": {}, "seed": 3}', "job.json: seed is unknown; allowed are format, spec"),
        ('{"format": 1, "spec": {"actor": {"magic": 1}}}', "job.json: actor.magic is unknown; allowed are backend, "),
        ('{"format": 1, "spec": {"actor": {"dtype": "fp4"}}}', 'job.json: actor.dtype is "fp4"; allowed is '),
        ('{"format": 1, "spec": {"measure": {"warmup": -1}}}', "job.json: --warmup -1 is not allowed. Give a whole "),
        ('{"format": 1, "spec": {"measure": {"step": "on", "backward": false}}}', "job.json: --step needs the gradie"),
    ],
)
def test_a_job_of_another_version_or_a_damaged_one_is_refused_by_name(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.json"
    path.write_text(text)
    assert main(["--job", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"replay: {tmp_path}/{says}")


@pytest.mark.parametrize(
    ("inputs", "measure", "num_processes", "python", "line"),
    [
        ({}, {}, 1, "", "replay --dtype bf16 --tp 2 --log-folder logs/a"),
        ({}, {"name": "a b"}, 2, "", "torchrun --nproc-per-node 2 -m replay {} --name 'a b'"),
        ({}, {}, 1, "/old/python", "/old/python -m replay {}"),
        ({}, {}, 4, "/old/python", "/old/python -m torch.distributed.run --nproc-per-node 4 -m replay {}"),
        ({}, {"details": True}, 1, "", "replay {}  # and what no option sets: details=True"),
        ({"reverse_rows": True}, {}, 1, "", "replay {}  # and what no option sets: reverse_rows=True"),
    ],
)
def test_what_people_are_shown_gives_the_job_again_and_says_what_no_option_sets(
    inputs: dict[str, Any], measure: dict[str, Any], num_processes: int, python: str, line: str
) -> None:
    spec = replace(SPEC, inputs=replace(SPEC.inputs, **inputs), measure=replace(SPEC.measure, **measure))
    shown = ChildJob(spec=spec).repeat_line(num_processes=num_processes, python=python)
    assert shown == line.format("--dtype bf16 --tp 2 --log-folder logs/a")
    assert repeated_by(shown) == (spec, num_processes, python)


def test_a_job_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--job", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"replay: {tmp_path / 'none'} cannot be read: No such file or directory\n"


def test_the_program_runs_the_job_of_a_file_and_takes_no_options_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ChildJob(spec=replace(SPEC, measure=MeasureSpec(log_folder=tmp_path))).write()
    assert path == tmp_path / "job.json"
    assert parse_command_line(["--local_rank=1", "--job", str(path)]).args[0].args[0].spec.actor == SPEC.actor
    with pytest.raises(UsageError, match=r"job=\S+ has all options. Leave out tp"):
        parse_command_line(["--job", str(path), "--tp", "2"])
    assert main(["--job", str(path), "inspect", "x"]) == 2
    assert "--job belongs to a replay, not to `inspect`" in capsys.readouterr().err
