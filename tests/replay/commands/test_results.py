"""What commands come to is objects, which hold all that is printed and written."""

import json
import math
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest

from actor_init.as_json import from_json
from actor_init.world import World
from replay.command_line.cli import main, parse_command_line
from replay.commands.diagnose.report import DiagnoseResult
from replay.commands.inspect.inspection import Inspection, inspect_folder
from replay.commands.mismatch.report import MismatchResult
from replay.comparison.comparison import Comparison
from replay.runlog.run_file import RunFile
from replay.runner.result import Run
from replay.runner.run import run_in
from replay.verdict.findings import Finding, FindingStatus
from replay.verdict.outcomes import Outcome, PassVerdict, Verdict
from replay.watch.blame import report_failed_rank
from replay.watch.progress import RankPhase, RankPosition
from replay.watch.shutdown import claim_failure
from tests.helpers.made_captures import damage, write_config, write_pass
from tests.helpers.made_logs import VERDICT, passed, write_log

ROWS = Path(__file__).parents[3] / "inputs" / "edges" / "rows"


def strict_json(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())


def test_a_replay_returns_all_that_its_log_holds(tmp_path: Path, world: World, one_world: None) -> None:
    typed = ["--inputs", str(ROWS), "--max-inputs", "2", "--quiet", "--log-folder", str(tmp_path / "logs")]
    run = run_in(world, parse_command_line(typed).args[0].spec)
    assert run.to_dict()["run"] == strict_json(run.folder)
    read = Run.read(tmp_path / "logs")
    assert (read.to_dict(), list(read.records), read.statistics) == (run.to_dict(), list(run.records), run.statistics)
    verdict = run.verdict
    assert verdict is not None
    assert (verdict, verdict.to_dict()) == (read.verdict, run.to_dict()["run"]["verdict"])
    assert (run.exit_code, verdict.outcome, len(run.records)) == (0, Outcome.CANNOT_TELL, 2)
    assert (run.profile, run.memory, run.out_of_memory) == (None, None, None)


@pytest.mark.parametrize("exit_code", [0, 1, 130, None])
def test_run_json_is_read_as_it_was_written(tmp_path: Path, exit_code: int | None) -> None:
    folder = write_log(tmp_path / "log", [passed(0, "a"), passed(1, "b")], exit_code=exit_code)
    run = RunFile.read(folder)
    assert run.to_dict() == strict_json(folder)
    assert (run.exit_code, run.end is None) == (exit_code, exit_code is None)
    position = RankPosition(index=1, phase=RankPhase.FORWARD, source="b.pkl")
    assert claim_failure(folder, report_failed_rank(0, position, "broken"), "rank 0 failed")
    assert RunFile.read(folder).to_dict() == strict_json(folder)
    kept = {name: value for name, value in run.to_dict().items() if name not in ("status", "exit_code")}
    assert {name: strict_json(folder)[name] for name in kept} == kept, "the failure comes to what was there"


def test_a_rank_that_fails_before_the_run_has_begun_is_in_run_json(tmp_path: Path) -> None:
    (tmp_path / "rank0.position.json").write_text("{}")
    assert claim_failure(tmp_path, report_failed_rank(1, RankPosition(), "no memory"), "rank 1 failed")
    run = RunFile.read(tmp_path)
    assert (run.start, run.end, run.status, run.exit_code) == (None, None, "failed", 1)
    assert run.failure is not None
    assert (run.failure.phase, run.failure.error) == (RankPhase.OPENING, "no memory")
    assert run.describe_failed_rank() == " on rank 1"


def test_a_verdict_on_numbers_that_are_not_finite_is_read_as_it_was_written() -> None:
    wrong = Finding(
        name="loss", status=FindingStatus.DIFFERS, recorded=2.0, replayed=math.nan, difference=math.inf, bound=0.1
    )
    first = PassVerdict(index=0, source="a.pkl", rank=0, outcome=Outcome.DIFFERS, reason=None, findings=[wrong])
    values = replace(VERDICT, outcome=Outcome.DIFFERS, first=first).to_dict()
    assert values["first"]["findings"][0]["replayed"] == "nan"
    read = from_json(Verdict, values, source="here")
    assert read.to_dict() == values


def test_a_comparison_holds_what_json_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_log(tmp_path / "a", [passed(0, "x", 2.0), passed(1, "y", float("nan"))])
    b = write_log(tmp_path / "b", [passed(0, "x", 2.5), passed(1, "y", 2.0)], typed="--zero-stage 2")
    assert main(["compare", str(a), str(b), "--json"]) == 1
    comparison = Comparison.read([a, b], threshold=0.05)
    assert comparison.to_dict() == json.loads(capsys.readouterr().out)
    assert (comparison.names, comparison.is_within) == (["A", "B"], False)
    assert Comparison.read([a, a], threshold=0.0).is_within


def test_an_inspection_is_plain_json(tmp_path: Path) -> None:
    write_pass(tmp_path, rank=0, step=0)
    damage(write_pass(tmp_path, rank=0, step=1))
    write_config(tmp_path)
    inspection = inspect_folder(tmp_path)
    values = inspection.to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert set(values) == {field.name for field in fields(inspection)}
    [(path, reason)] = inspection.damaged
    assert (values["damaged"], values["kinds"][0]["num_passes"]) == ([{"path": str(path), "error": reason}], 1)


@pytest.mark.parametrize("kind", [Run, RunFile, Verdict, Comparison, Inspection, MismatchResult, DiagnoseResult])
def test_a_result_is_frozen_and_has_named_fields_alone(kind: Any) -> None:
    made: Any = object.__new__(kind)
    with pytest.raises(FrozenInstanceError):
        setattr(made, fields(kind)[0].name, None)
    assert not hasattr(made, "__dict__"), "slots"
    assert all(field.kw_only for field in fields(kind))
    assert callable(made.to_dict)
