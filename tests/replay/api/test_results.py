"""What a log says is in the tables, and a log that is not whole, foreign or of a newer format is named."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import replay
from replay.api.logs import PastCampaign
from replay.campaign.campaign import Campaign
from replay.processes.pool import Machine
from replay.runlog import token_log_probs
from replay.runlog.run_file import RUN_FILE
from replay.runlog.token_log_probs import TokenPlaces
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.findings import Finding, FindingStatus
from replay.verdict.outcomes import Coverage, Outcome, PassVerdict
from replay.verdict.recorded_pass import WeightComparison
from tests.helpers.machine import lack_package
from tests.helpers.made_captures import damage, write_pass, write_passes
from tests.helpers.made_logs import VERDICT, passed, write_log
from tests.helpers.made_records import record
from tests.helpers.schemas import assert_valid

LOSS = Finding(
    name="loss", status=FindingStatus.DIFFERS, recorded=2.0, replayed=3.0, difference=0.5, bound=0.1, where="row 1"
)
NORM = Finding(name="gradient norm", status=FindingStatus.AGREES, recorded=4.0, replayed=4.0, difference=0.0, bound=0.1)
CAUSE = Cause(
    name=CauseName.OBJECTIVE,
    sureness=Sureness.IS,
    sentence="the loss is another one",
    explains=[],
    entails=[],
    try_next="--loss sft",
)
WRONG = replace(
    VERDICT,
    outcome=Outcome.DIFFERS,
    first=PassVerdict(index=0, source="x.pkl", rank=0, outcome=Outcome.DIFFERS, reason=None, findings=[LOSS]),
    passes=[
        PassVerdict(index=0, source="x.pkl", rank=0, outcome=Outcome.DIFFERS, reason=None, findings=[LOSS]),
        PassVerdict(index=1, source="y.pkl", rank=0, outcome=Outcome.REPRODUCED, reason=None, findings=[]),
    ],
    windows=[
        PassVerdict(
            index=1,
            source="y.pkl",
            rank=0,
            outcome=Outcome.REPRODUCED,
            reason=None,
            findings=[NORM],
            first_index=0,
            optimizer_step=4,
        )
    ],
    causes=[CAUSE],
    coverage=Coverage(num_passes=2, num_judged=2),
    weights=WeightComparison(compared=("a", "b"), differing=("b",), num_parameters=2),
)


def open_run(folder: Path) -> replay.ReplayedRun:
    run = replay.open(folder)
    assert isinstance(run, replay.ReplayedRun)
    return run


def test_the_verdict_says_itself(tmp_path: Path) -> None:
    verdict = open_run(write_log(tmp_path / "log", [passed(0, "x")], verdict=WRONG)).verdict
    assert (verdict.outcome, verdict.reproduced, verdict.try_next) == (Outcome.DIFFERS, False, "--loss sft")
    assert verdict.cause == CAUSE
    assert verdict.coverage.is_whole
    lines = verdict.explain().splitlines()
    assert lines[0].startswith("verdict    DIFFERS: loss (row 1) of pass 1, x.pkl")
    assert lines[1:3] == ["cause      the loss is another one", "try        --loss sft"]


def test_a_run_without_a_verdict_says_why(tmp_path: Path) -> None:
    run = open_run(write_log(tmp_path / "log", [passed(0, "x")], exit_code=None))
    assert not run.has_verdict
    assert run.problems == ["run.json has no end: the run goes on, or was killed"]
    with pytest.raises(replay.UsageError, match="has no verdict: run"):
        run.verdict  # noqa: B018


def test_tables_have_what_the_log_has(tmp_path: Path) -> None:
    records = [passed(0, "x", warmup=True), passed(1, "y", 2.5)]
    run = open_run(write_log(tmp_path / "log", records, verdict=WRONG))

    passes = run.passes()
    assert list(passes.number) == [1, 2]
    assert list(passes.outcome) == ["DIFFERS", "REPRODUCED"]
    assert list(passes.loss) == [2.0, 2.5]
    assert passes.query("not warmup").groupby("rank").forward_seconds.median().to_dict() == {0: 0.25}
    assert list(passes.backward_peak_bytes) == [
        record.cost.phases["backward"].peak_allocated_bytes for record in records
    ]

    [loss] = run.findings().to_dict("records")
    assert (loss["number"], loss["quantity"], loss["status"], loss["recorded"]) == (1, "loss", "differs", 2.0)
    [norm] = run.gradients().to_dict("records")
    assert (norm["number"], norm["optimizer_step"], norm["quantity"]) == (2, 5, "gradient norm")
    assert list(run.weights().query("differs").name) == ["b"]


def test_tokens_are_those_that_a_trace_kept(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "log", [passed(0, "x"), passed(1, "y")])
    with pytest.raises(replay.UsageError, match="kept no tokens"):
        open_run(folder).tokens()
    places = TokenPlaces(num_rows=2, first_column=5, recorded={(0, 5): -1.5, (1, 6): -2.25})
    for index in range(2):
        token_log_probs.write_token_log_probs(folder, index, 0, [-1.0, None, -3.0, -2.0], places)
    tokens = open_run(folder).tokens()
    assert list(tokens.number) == [1, 1, 1, 2, 2, 2]
    assert list(zip(tokens.row, tokens.column, tokens.log_prob, strict=True))[:3] == [
        (0, 5, -1.0),
        (1, 5, -3.0),
        (1, 6, -2.0),
    ]
    assert open_run(folder).tokens(worst=1).to_dict("records") == [
        {"number": 1, "rank": 0, "row": 0, "column": 5, "log_prob": -1.0, "recorded": -1.5, "difference": 0.5}
    ]


def test_a_run_without_weights_has_an_empty_table_of_them(tmp_path: Path) -> None:
    run = open_run(write_log(tmp_path / "log", [passed(0, "x")], verdict=VERDICT))
    assert list(run.weights().columns) == ["name", "differs"]
    assert run.weights().query("differs").empty


def test_without_pandas_a_table_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lack_package("pandas", monkeypatch)
    run = open_run(write_log(tmp_path / "log", [passed(0, "x")]))
    with pytest.raises(replay.UsageError, match="Try: pip install pandas"):
        run.passes()


def test_a_notebook_shows_the_page_of_the_report(tmp_path: Path) -> None:
    page = open_run(write_log(tmp_path / "log", [passed(0, "x")], verdict=WRONG))._repr_html_()
    assert page.startswith('<iframe srcdoc="&lt;!doctype html')
    assert "the loss is another one" in page


class Logged:
    def __init__(self) -> None:
        self.calls: list[dict[str, float]] = []

    def log(self, metrics: dict[str, float]) -> None:
        self.calls.append(metrics)


def test_metrics_go_to_anything_that_logs_a_dictionary(tmp_path: Path) -> None:
    failed = record(1, source="y.pkl", phases={}, loss=None, grad_norm=None)
    records = [passed(0, "x"), passed(0, "x", rank=1), failed, passed(1, "y", rank=1)]
    logged = Logged()
    open_run(write_log(tmp_path / "log", records, verdict=WRONG)).log_to(logged, prefix="r/")
    first, second, last = logged.calls
    assert first == {
        "r/forward_seconds": 0.25,
        "r/forward_peak_bytes": first["r/forward_peak_bytes"],
        "r/backward_seconds": 0.5,
        "r/backward_peak_bytes": first["r/backward_peak_bytes"],
        "r/loss": 2.0,
        "r/grad_norm": 4.0,
    }
    assert second == {}
    assert (last["r/num_passes"], last["r/reproduced"]) == (2, 0)


class MetricsLogged:
    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, float], int]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append((metrics, step))


def test_metrics_go_to_loggers_that_count_steps(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("tensorboardX")
    run = open_run(write_log(tmp_path / "log", [passed(0, "x"), passed(1, "y", 2.5)]))
    logged = MetricsLogged()
    run.log_to(logged)
    assert [step for _, step in logged.calls] == [1, 2, 2]
    assert logged.calls[1][0]["replay/loss"] == 2.5
    with tensorboard.SummaryWriter(str(tmp_path / "board")) as writer:
        run.log_to(writer)
    assert b"replay/forward_seconds" in next((tmp_path / "board").iterdir()).read_bytes()
    with pytest.raises(replay.UsageError, match="a list has neither log, log_metrics nor add_scalar"):
        run.log_to([])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"format": 99, "versions": {"micro-replay": "9.0"}}', "was written in format 99, by micro-replay 9.0"),
        ('{"format": 1, "sta', "cannot be read"),
        ("[]", "holds a list, not a run"),
    ],
)
def test_a_log_of_another_kind_is_refused_by_name(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text(content)
    with pytest.raises(replay.UsageError, match=says):
        replay.open(tmp_path)


def test_a_folder_that_no_run_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(replay.UsageError, match="holds no run"):
        replay.open(tmp_path)
    with pytest.raises(replay.UsageError, match="does not exist"):
        replay.open(tmp_path / "nowhere")


def test_a_log_that_is_cut_short_is_read_as_far_as_it_came(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "log", [passed(0, "x"), passed(1, "y")], verdict=VERDICT)
    path = folder / "rank0.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    run = open_run(folder)
    assert [record.index for record in run.records] == [0]
    assert run.problems == ["rank0.jsonl is cut short in line 2"]


def test_a_log_that_lacks_whole_lines_is_not_called_whole(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "log", [passed(0, "x"), passed(1, "y")], verdict=VERDICT)
    lines = (folder / "rank0.jsonl").read_text().splitlines(keepends=True)
    (folder / "rank0.jsonl").write_text(lines[0])
    assert open_run(folder).problems == ["rank0.jsonl is cut short: it has 1 of 2 passes"]


@pytest.mark.parametrize(
    ("typed", "problems"), [("", ["rank1.jsonl is cut short: it has 1 of 2 passes"]), ("--uneven yes", [])]
)
def test_of_several_ranks_one_may_have_fewer_passes_where_they_are_uneven(
    typed: str, problems: list[str], tmp_path: Path
) -> None:
    """A run's problems and what a comparison refuses come from one rule."""
    records = [passed(0, "a"), passed(0, "b", rank=1), passed(1, "c"), passed(1, "d", rank=1)]
    folder = write_log(tmp_path / "log", records, typed=typed, verdict=VERDICT)
    lines = (folder / "rank1.jsonl").read_text().splitlines(keepends=True)
    (folder / "rank1.jsonl").write_text(lines[0])
    run = open_run(folder)
    assert run.problems == problems
    if problems:
        with pytest.raises(replay.UsageError, match=problems[0]):
            replay.compare(run, run)
    else:
        assert replay.compare(run, run).exit_code == 0


def test_tables_without_rows_have_their_columns(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "log", [passed(0, "x")], verdict=VERDICT)
    whole = open_run(folder).passes()
    (folder / "rank0.jsonl").write_text("")
    run = open_run(folder)
    assert run.passes().query("not warmup").empty
    assert {*run.passes().columns} == {name for name in whole.columns if not name.startswith(("forward_", "backward_"))}
    assert run.gradients().sort_values("difference").empty
    assert run.findings().query("status == 'differs'").empty


def test_a_run_is_found_again_from_another_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_log(tmp_path / "log", [passed(0, "x")])
    monkeypatch.chdir(tmp_path)
    run = replay.open("log")
    monkeypatch.chdir("/")
    assert isinstance(run, replay.ReplayedRun)
    assert run.folder == tmp_path / "log"
    assert replay.compare(run, run).exit_code == 0
    assert repr(run) == f"ReplayedRun('{tmp_path / 'log'}', 1 records of passes, no verdict)"


def test_a_log_prob_that_is_no_number_is_the_worst(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "log", [passed(0, "x")])
    places = TokenPlaces(num_rows=1, first_column=0, recorded={(0, column): -1.0 for column in range(4)})
    token_log_probs.write_token_log_probs(folder, 0, 0, [-1.0, math.nan, -3.0, -2.0], places)
    assert list(open_run(folder).tokens(worst=3).column) == [1, 2, 3]
    with pytest.raises(replay.UsageError, match="worst=-1 is not allowed"):
        open_run(folder).tokens(worst=-1)


def begin_campaign(folder: Path, **content: Any) -> Path:
    campaign = Campaign.begin(
        "parity", folder, {"cells": 2}, arguments=["--tp", "2"], machine=Machine(num_devices=1, has_gpus=False)
    )
    (campaign.folder / "journal.jsonl").touch()
    path = campaign.path
    path.write_text(json.dumps(json.loads(path.read_text()) | content))
    return campaign.folder


def test_a_command_of_many_replays_opens_as_a_mapping_of_them(tmp_path: Path) -> None:
    folder = begin_campaign(tmp_path, result={"verdict": "DIFFERS"})
    for attempt, loss in ((0, 1.0), (1, 2.0)):
        write_log(folder / f"runs/fsdp2/{attempt}/20260101-000000-replay", [passed(0, "x", loss)])
    write_log(folder / "runs/ddp/0/20260101-000000-replay", [passed(0, "x", 3.0)])

    past = replay.open(folder)

    assert isinstance(past, PastCampaign)
    assert (past.name, past.command, past.result) == ("parity", "replay parity --tp 2", {"verdict": "DIFFERS"})
    assert list(past) == ["ddp", "fsdp2"]
    # The last attempt counts.
    assert past["fsdp2"].records[0].result.loss == 2.0
    assert replay.compare(past["fsdp2"], past["ddp"]).exit_code == 1
    with pytest.raises(KeyError, match=r"tp2: .* has ddp, fsdp2"):
        past["tp2"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"format": 99}', "is of format 99; this version reads format 2"),
        ('{"format": 2, "comm', "is damaged: Unterminated string"),
        ("[1]", r"is damaged: it is \[1\]"),
        ('{"format": 2, "result": {}}', "is damaged: command is missing"),
        ('{"format": 2, "command": "replay parity", "result": [1]}', r"is damaged: result is \[1\]"),
        ('{"format": 2, "command": "replay parity", "result": {"runs": 3}}', "is damaged: result: runs is 3"),
        ('{"format": 2, "command": "replay parity", "result": {"runs": [3]}}', "is damaged: result: runs.0 is 3"),
    ],
)
def test_a_command_s_file_of_another_shape_is_named(content: str, says: str, tmp_path: Path) -> None:
    folder = begin_campaign(tmp_path)
    (folder / "parity.json").write_text(content)
    with pytest.raises(replay.UsageError, match=f"parity.json {says}"):
        replay.open(folder)


@pytest.mark.parametrize("log", [3, None, ["logs/x"], b"logs/x", object()], ids=lambda log: type(log).__name__)
def test_what_is_no_log_is_refused_with_what_came(log: Any, tmp_path: Path) -> None:
    run = replay.open(write_log(tmp_path / "log", [passed(0, "x")]))
    for function in (replay.compare, replay.report):
        with pytest.raises(replay.UsageError, match=r" is no log\. Give a run, or the folder of one, such as logs/"):
            function(run, log)  # type: ignore[arg-type]


def test_a_folder_of_another_kind_is_no_run(tmp_path: Path) -> None:
    log, captures = write_log(tmp_path / "log", [passed(0, "x")]), tmp_path / "captures"
    write_pass(captures)
    campaign = begin_campaign(tmp_path)
    for other in (captures, campaign, replay.open(campaign)):
        with pytest.raises(replay.UsageError, match=r"holds no run \(no run.json\)\. Give a folder that a run left"):
            replay.compare(log, other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"threshold": "much"}, "threshold 'much' is not allowed. Give a finite number of at least 0"),
        ({"threshold": math.nan}, "threshold=nan is not allowed. Give a finite number of at least 0"),
        ({"variants": "stock"}, "variants='stock' is not allowed. Give a list, such as ['attention=eager']"),
        ({"variants": 3}, "variants=3 is not allowed. Give a list"),
        ({"variants": [3]}, "variants=[3] is not allowed"),
    ],
)
def test_a_wrong_option_of_compare_is_refused(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    run = replay.open(write_log(tmp_path / "log", [passed(0, "x")]))
    assert isinstance(run, replay.ReplayedRun)
    with pytest.raises(replay.UsageError) as refusal:
        replay.compare(run, run, **options)
    assert str(refusal.value).startswith(says)


@pytest.mark.parametrize("function", [replay.open, replay.captures, replay.inspect, replay.hang])
def test_a_folder_is_a_path(function: Callable[..., Any], tmp_path: Path) -> None:
    for wrong in (3, None, ["x"], b"x", ""):
        with pytest.raises(replay.UsageError, match=r" is not allowed\. Give a path"):
            function(wrong)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        *((function, ("logs/x",)) for function in (replay.open, replay.captures, replay.inspect, replay.hang)),
        (replay.compare, ("logs/x", "logs/y")),
        (replay.report, ("logs/x",)),
        *((function, ()) for function in (replay.run, replay.scan, replay.suite, replay.doctor)),
    ],
)
def test_a_working_folder_that_is_gone_is_named(
    function: Callable[..., Any], arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(replay.UsageError, match=r"this process's working folder is gone: .* Change to one that is"):
        function(*arguments)


def test_a_log_is_read_from_a_working_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_log(tmp_path / "log", [passed(0, "x")])
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    run = replay.open(folder)
    assert isinstance(run, replay.ReplayedRun)
    assert replay.compare(run, run).exit_code == 0


def test_captures_are_read_one_by_one(tmp_path: Path) -> None:
    write_passes(tmp_path, {0: "ttr", 1: "ttr"})
    assert [(capture.rank, capture.forward) for capture in replay.captures(tmp_path, passes="train")] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    [first, *_] = replay.captures(tmp_path, passes="rollout")
    assert not first.trains
    assert first != next(replay.captures(tmp_path, passes="train"))
    assert "sequences [2, 10]" in repr(first)
    assert first.tensors["sequences"].shape == (2, 10)
    assert json.loads(json.dumps(first.to_dict()))["tensors"]["sequences"] == {"shape": [2, 10], "dtype": "int64"}
    assert len(list(replay.captures(tmp_path))) == 6
    assert_valid("capture", first.to_dict())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"passes": "trains"}, "passes 'trains' is not allowed"), ({"recording": 2}, "recording=2 is not allowed")],
)
def test_a_wrong_argument_is_refused_before_the_first_pass(
    arguments: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write_pass(tmp_path)
    with pytest.raises(replay.UsageError, match=says):
        replay.captures(tmp_path, **arguments)


def test_a_folder_without_captures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(replay.UsageError, match="holds no captures"):
        replay.captures(tmp_path)


def test_a_folder_that_changes_while_it_is_read_ends_with_the_file_s_name(tmp_path: Path) -> None:
    _, second, third = (write_pass(tmp_path, step=step) for step in range(3))
    captures = replay.captures(tmp_path)
    next(captures)
    second.unlink()
    with pytest.raises(replay.CaptureError, match=second.name):
        next(captures)
    assert third.exists()


def test_a_damaged_capture_is_named(tmp_path: Path) -> None:
    path = write_pass(tmp_path)
    damage(path)
    with pytest.raises(replay.CaptureError, match=path.name):
        list(replay.captures(tmp_path))


def test_who_hung_is_told_as_on_the_screen(tmp_path: Path) -> None:
    write_passes(tmp_path, {0: "tt", 1: "tt"})
    report = replay.hang(tmp_path)
    assert (report.rank, report.ranks, report.exit_code) == (None, (), 0)
    assert json.loads(json.dumps(report.to_dict()))["schedules"][0]["differences"] == []


def test_an_inspection_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from replay.command_line.cli import main

    write_pass(tmp_path)
    assert main(["inspect", str(tmp_path), "--json"]) == replay.inspect(tmp_path).exit_code == 0
    assert json.loads(capsys.readouterr().out) == replay.inspect(tmp_path).to_dict()
