"""What a run leaves on disk: strict JSON, there from the start, a line a pass as it happens."""

import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest

from actor_init.spec import UsageError
from replay.options.option_parsing import spec_from_dict
from replay.options.spec import InputsSpec, MeasureSpec, ReplaySpec
from replay.resolution.selection import Selection
from replay.runlog.run_file import RunEnd, RunWork
from replay.runlog.summary import summarize
from replay.runlog.writer import Logbook, create_folder, list_versions
from replay.watch.blame import report_failed_rank
from replay.watch.progress import RankPhase, RankPosition
from replay.watch.shutdown import claim_failure
from tests.helpers.made_records import cost, record
from tests.helpers.made_replays import MadeReplay
from tests.helpers.read_logs import read_log

SPEC = ReplaySpec(inputs=InputsSpec(max_inputs=5, inputs=Path("a folder")), measure=MeasureSpec(warmup=2))
SELECTION = Selection(
    inputs=[Path("a.pkl")],
    num_left_out_passes=4,
    num_left_over=1,
    damaged=[(Path("b.pkl"), "truncated")],
    dealing="in recorded order",
)


def strictly(text: str) -> Any:
    """JSON as every reader understands it: no NaN, no Infinity."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def run_json(folder: Path) -> Any:
    return strictly((folder / "run.json").read_text())


@pytest.fixture
def logbook(tmp_path: Path) -> Logbook:
    book = Logbook(create_folder(tmp_path / "logs", "night"), rank=0)
    facts = {"zero_stage": 1}
    work = RunWork(weights="random, seed 0", config={"vocab_size": 264})
    book.begin(
        MadeReplay.of(SPEC),
        facts=facts,
        work=work,
        inputs=SELECTION.describe(),
        memory_kind="cuda allocator",
        devices=["H200", "H200"],
    )
    return book


def test_a_run_is_described_before_its_first_pass(logbook: Logbook) -> None:
    run = run_json(logbook.folder)
    assert run["status"] == "running"
    assert run["command"] == "replay --inputs 'a folder' --max-inputs 5 --warmup 2"
    assert spec_from_dict(run["spec"]) == SPEC
    assert run["facts"] == {"zero_stage": 1}
    assert run["work"] == {"weights": "random, seed 0", "config": {"vocab_size": 264}}
    assert run["format"] == 1
    assert run["world_size"] == 2
    assert run["devices"] == ["H200", "H200"]
    assert run["inputs"]["damaged"] == [{"path": "b.pkl", "error": "truncated"}]
    assert run["versions"] == list_versions()
    assert run["versions"]["torch"]
    assert "exit_code" not in run


def test_a_line_can_be_read_before_the_run_has_ended(logbook: Logbook) -> None:
    for index in range(2):
        logbook.write(record(index))
        lines = (logbook.folder / "rank0.jsonl").read_text().splitlines()
        assert len(lines) == index + 1
        line = strictly(lines[-1])
        assert line["phases"]["forward"]["seconds"] == 0.1
        assert line["phases"]["backward"]["peak_allocated_bytes"] == 2 * 2**30
        assert (line["loss"], line["error"], line["row_tokens"]) == (1.5, None, [30, 50])


def test_the_end_adds_statistics_and_exit_code(logbook: Logbook) -> None:
    logbook.finish(RunEnd(statistics=summarize([record(0), record(1)])), exit_code=0)
    run = run_json(logbook.folder)
    assert (run["status"], run["exit_code"]) == ("finished", 0)
    assert run["statistics"]["phases"]["forward"]["median_seconds"] == 0.1
    assert run["statistics"]["slowest"]["source"] == "input_0.pkl"
    assert run["seconds"] >= 0
    assert [path.name for path in logbook.folder.iterdir() if path.suffix == ".tmp"] == []


def test_a_run_with_a_failed_pass_has_failed(logbook: Logbook) -> None:
    failed_pass = record(0, error="broken", error_type="RuntimeError")
    logbook.finish(RunEnd(statistics=summarize([failed_pass])), exit_code=1)
    assert (run_json(logbook.folder)["status"], run_json(logbook.folder)["exit_code"]) == ("failed", 1)


def test_any_rank_can_say_that_it_ended_the_run(logbook: Logbook) -> None:
    position = RankPosition(index=3, phase=RankPhase.BACKWARD, source="input_3.pkl")
    first = report_failed_rank(1, position, "broken")
    second = report_failed_rank(0, position, "connection closed by peer")
    assert claim_failure(logbook.folder, first, "rank 1 failed")
    assert not claim_failure(logbook.folder, second, "rank 0 failed")
    assert (logbook.folder / "failure.txt").read_text() == "rank 1 failed\n"
    run = run_json(logbook.folder)
    assert (run["status"], run["exit_code"]) == ("failed", 1)
    assert (run["failure"]["rank"], run["failure"]["source"], run["failure"]["error"]) == (1, "input_3.pkl", "broken")
    assert run["world_size"] == 2


@pytest.mark.parametrize(("loss", "written"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_loss_that_json_cannot_say_is_text_and_comes_back(logbook: Logbook, loss: float, written: str) -> None:
    logbook.write(record(0, loss=loss, grad_norm=loss, row_log_probs=[loss, 1.0]))
    [line] = (logbook.folder / "rank0.jsonl").read_text().splitlines()
    assert strictly(line)["loss"] == written
    [back] = read_log(logbook.folder)[1]
    assert back.result.loss is not None
    assert str(back.result.loss) == str(back.result.grad_norm) == str(back.result.row_log_probs[0]) == written


def test_a_log_can_be_read_back_whole(logbook: Logbook) -> None:
    other = Logbook(logbook.folder, rank=1)
    written = [
        record(0, phases={"forward": cost(0.5)}, wait_seconds=0.25),
        record(1, error='two\nlines and "quotes"', error_type="RuntimeError", loss=None, trains=None),
        record(0, rank=1, new_graphs=2, warmup=True),
    ]
    for pass_record in written:
        (logbook if pass_record.rank == 0 else other).write(pass_record)
    logbook.finish(RunEnd(statistics=summarize(written)), exit_code=1)
    run, records = read_log(logbook.folder)
    assert run["status"] == "failed"
    assert records == [written[0], written[2], written[1]]


def test_a_line_has_the_fields_of_all_sections_side_by_side(logbook: Logbook) -> None:
    logbook.write(record(3, loss=1.25, new_graphs=2, seconds_again=0.5))
    line = strictly((logbook.folder / "rank0.jsonl").read_text())
    parts = [line[name] for name in ("index", "real_tokens", "seconds_again", "loss", "new_graphs", "first_uses")]
    assert parts == [3, 80, 0.5, 1.25, 2, []]
    assert [name for name, value in line.items() if isinstance(value, dict)] == ["phases", "flips_by_router"]


def test_a_line_that_a_killed_run_left_unfinished_is_passed_over(logbook: Logbook) -> None:
    logbook.write(record(0))
    with (logbook.folder / "rank0.jsonl").open("a") as file:
        file.write('{"index": 1, "sou')
    assert read_log(logbook.folder)[1] == [record(0)]


def test_two_runs_that_start_in_one_second_have_two_folders(tmp_path: Path) -> None:
    folders = [create_folder(tmp_path / "logs", "night") for _ in range(5)]
    assert len(set(folders)) == 5
    assert all(folder.is_dir() and "-night" in folder.name for folder in folders)


@pytest.mark.parametrize("name", ["", "a/b", "/"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"^name"):
        create_folder(tmp_path, name)


@pytest.mark.parametrize("logs", ["a_file", "a_file/below"])
def test_logs_that_are_no_folder_are_refused(tmp_path: Path, logs: str) -> None:
    (tmp_path / "a_file").touch()
    with pytest.raises(UsageError, match=r"^log_folder="):
        create_folder(tmp_path / logs, "night")


def test_a_package_that_is_not_installed_is_said_to_be_none() -> None:
    assert list_versions(["torch", "no-such-package-anywhere"])["no-such-package-anywhere"] is None


def test_the_page_of_the_log_finds_what_a_run_without_options_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    measure = MeasureSpec()
    Logbook(create_folder(measure.log_folder, measure.name), rank=0).write(record(0))
    page = (Path(__file__).parents[3] / "docs" / "formats.md").read_text()
    (pattern,) = re.findall(r'glob\("(.+?)"\)', page)
    assert [path.name for path in tmp_path.glob(pattern)] == ["rank0.jsonl"]
