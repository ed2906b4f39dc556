"""`replay parity` as it is typed: what is run in which order, what is left when something fails, how it goes on."""

import json
import re
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import replay
from actor_init.inputs.packing import prepare_inputs
from replay.agreement.noise_floor import CellResult, MatrixJudge
from replay.agreement.rows import ParityLog, RowState
from replay.api.logs import PastCampaign
from replay.command_line import cli
from replay.commands.parity import runs as parting
from replay.commands.parity.text import list_commands
from replay.options.spec import ReplaySpec
from replay.processes.pool import ProcessResult, Task
from replay.runlog import gradient_sketches, token_log_probs
from replay.runlog.reader import PastRun
from replay.runner.run import run_in
from tests.helpers.children import end_each_task
from tests.helpers.machine import lack_package
from tests.helpers.made_captures import write_pass
from tests.helpers.made_logs import passed, write_log
from tests.helpers.schemas import assert_valid
from tests.helpers.sharded import SIZES

MATRIX = """
[[cells]]
dtype = "fp32"
backend = ["deepspeed", "fsdp2"]
packing = [true, false]
"""
REFERENCE = "fsdp2 fp32 padded sdpa"
RUNS = [  # in the order in which they are run
    REFERENCE,
    f"{REFERENCE}, again",
    f"{REFERENCE}, rows reversed",
    "fsdp2 fp32 padded eager gradient-checkpointing",
    "fsdp2 fp32 packed sdpa",
    "deepspeed fp32 packed auto",
    "deepspeed fp32 padded auto",
]
Captured = pytest.CaptureFixture[str]


class Alone:
    """A world of one process."""

    rank = 0

    def gather(self, value: Any) -> list[Any]:
        return [value]


ALONE: Any = Alone()


class Runs:
    """In the place of a run of tasks: writes a log with one input's known loss, or fails as it is told."""

    def __init__(self, **by_place: Any) -> None:
        self.names: list[str] = []
        self.told: dict[int, Any] = {}  # of the run as started: a factor on the loss, an exit code's words, an error
        self.limits: list[float] = []

    def __call__(self, task: Task) -> ProcessResult:
        spec = task.job.spec
        place = self.place_of(spec)
        self.names.append(RUNS[place])
        self.limits.append(task.limit)
        told = self.told.get(place, 1.0)
        if isinstance(told, BaseException):
            del self.told[place]
            raise told
        task.output.parent.mkdir(parents=True)
        task.output.write_text(f"replay: {told}\n")
        if isinstance(told, float):
            records = [passed(index, name, told * (2.0 + index)) for index, name in enumerate("xy")]
            config = {"config": {"num_hidden_layers": 4, "hidden_size": 64}}
            folder = write_log(task.logs / "run", records, spec=spec, work=config)
            for record in records:
                gradient_sketches.write(folder, record.index, [("norm", torch.ones(8))], ALONE)
                token_log_probs.write_token_log_probs(folder, record.index, record.rank, [-1.0, -2.0])
        code = 0 if isinstance(told, float) else {"refused": 2, "late": None}.get(told.partition(":")[0], -9)
        return ProcessResult(exit_code=code, seconds=1.5, output=task.output, logs=task.logs)

    def place_of(self, spec: ReplaySpec) -> int:
        actor = spec.actor
        if actor.backend == "deepspeed":
            return 5 if actor.packing else 6
        if spec.inputs.reverse_rows:
            return 2
        if spec.measure.trace and actor.attention == "sdpa" and not actor.packing:
            return 0
        if actor.packing or actor.attention == "eager":
            return 4 if actor.packing else 3
        return 1 if REFERENCE in self.names else 0


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    runs = Runs()
    end_each_task(runs, monkeypatch)
    return runs


def typed(tmp_path: Path, *more: str, matrix: str = MATRIX) -> int:
    file = tmp_path / "matrix.toml"
    file.write_text(matrix)
    common = ["--matrix", str(file), "--processes", "1", "--log-folder", str(tmp_path / "logs")]
    return cli.main(["parity", *common, *more])


def folder_in(tmp_path: Path) -> Path:
    [folder] = (tmp_path / "logs").iterdir()
    return folder


def states(folder: Path) -> dict[str, str]:
    return {row.cell.name: row.state for row in ParityLog.read(folder).rows}


def said(capsys: Captured, word: str) -> list[str]:
    """The lines that begin with `word`, and what they say."""
    lines = capsys.readouterr().out.splitlines()
    return [line.removeprefix(word).strip() for line in lines if line.startswith(f"{word} ")]


def test_runs_that_agree_leave_a_table_a_json_and_a_report(tmp_path: Path, runs: Runs, capsys: Captured) -> None:
    runs.told = {3: 1 + 3e-7, 6: 1 + 6e-7}
    assert typed(tmp_path) == 0
    assert runs.names == RUNS
    folder = folder_in(tmp_path)
    whole = json.loads((folder / "parity.json").read_text())
    assert whole["result"]["finished"]
    assert {run["name"]: run["state"] for run in whole["result"]["runs"]} == states(folder)
    assert set(states(folder).values()) == {"done"}
    loss = next(noise for noise in whole["result"]["noises"] if noise["quantity"] == "loss")
    assert loss["floor"] == pytest.approx(3e-7)
    assert loss["equivalent"] == RUNS[3]
    assert whole["result"]["cells"][RUNS[6]]["result"] == "WITHIN NOISE"
    out = capsys.readouterr().out
    assert re.search(r"^fp32 +loss +3e-07 ", out, re.MULTILINE)
    assert "result     4 EQUAL, 2 WITHIN NOISE" in out
    assert out.index("\nresult  ") < out.index("\nrun  "), "the answer comes before the table"

    assert cli.main(["parity", "--continue", str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    result = replay.parity(continue_=folder)
    assert capsys.readouterr().out == ""
    assert (
        result.to_dict()
        == printed
        == {"folder": str(folder), "exit_code": 0} | {name: whole[name] for name in ("command", "result")}
    )
    assert_valid("parity", printed)
    assert result.matrix.cells[RUNS[6]].result is CellResult.WITHIN_NOISE
    table = result.to_frame().set_index("name")
    assert table.loc[RUNS[6], "result"] == "WITHIN NOISE"
    assert table.loc[RUNS[6], "loss"] == pytest.approx(6e-7, rel=1e-3)
    past = replay.open(folder)
    assert isinstance(past, PastCampaign)
    assert (set(past), past.result) == (set(RUNS), whole["result"])
    assert past[RUNS[6]].records[0].result.loss == 2.0 * (1 + 6e-7)

    again = replay.parity(matrix=tmp_path / "matrix.toml", processes=1, log_folder=tmp_path / "again")
    assert (again.exit_code, again.result["cells"]) == (0, whole["result"]["cells"])


def test_times_of_runs_beside_others_are_left_out(tmp_path: Path, runs: Runs, capsys: Captured) -> None:
    for more, is_shown in (([], True), (["--at-once", "2"], False)):
        assert typed(tmp_path, *more) == 0
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{RUNS[5]}  "))
        assert (re.split(r"  +", row)[3] != "-") is is_shown


def test_a_cell_beyond_the_bound_differs_and_is_named_with_its_input(
    tmp_path: Path, runs: Runs, capsys: Captured
) -> None:
    runs.told = {5: 1.001}
    assert typed(tmp_path) == 1
    [line] = said(capsys, "DIFFERS")
    assert re.fullmatch(rf"{RUNS[5]}: loss by 0.001 at y.pkl \(bound [\d.e-]+\)", line)  # 0.003 of 3.0


def test_a_run_that_dies_or_hangs_is_a_row_and_the_others_run(tmp_path: Path, runs: Runs, capsys: Captured) -> None:
    runs.told = {4: "CUDA out of memory", 5: "late"}
    assert typed(tmp_path, "--run-limit", "77") == 1
    assert runs.names == RUNS
    assert runs.limits == [77.0] * 7
    assert said(capsys, "FAILED") == [
        f"{RUNS[4]}: CUDA out of memory",
        f"{RUNS[5]}: not finished within 2 s, see " + str(next(folder_in(tmp_path).glob("cells/006*/0/output.txt"))),
    ]


def test_what_a_run_itself_refuses_fails_nothing(tmp_path: Path, runs: Runs, capsys: Captured) -> None:
    runs.told = {5: "refused: AutoTP cannot. Try: --tp 1"}
    assert typed(tmp_path) == 0
    assert f"{RUNS[5]}: refused: AutoTP cannot. Try: --tp 1" in said(capsys, "refused")


def test_without_its_reference_no_run_is_started(tmp_path: Path, runs: Runs, capsys: Captured) -> None:
    runs.told = {0: "CUDA out of memory"}
    assert typed(tmp_path) == 1
    assert runs.names == [REFERENCE]
    assert said(capsys, "FAILED")[1] == f"{RUNS[1]}: not run because its reference was not: {REFERENCE}"


def begin_with_other_versions(folder: Path) -> None:
    """Have parity.json say that its runs were begun with another torch."""
    file = folder / "parity.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps(state | {"versions": state["versions"] | {"torch": "1.0"}}))


def test_after_ctrl_c_it_says_how_to_go_on_and_runs_what_is_missing_alone(
    tmp_path: Path, runs: Runs, capsys: Captured
) -> None:
    runs.told = {3: KeyboardInterrupt(), 5: "died"}
    assert typed(tmp_path) == 130
    folder = folder_in(tmp_path)
    assert list(states(folder).values()) == ["done"] * 3 + ["pending"] * 4
    out = capsys.readouterr().out
    assert f"\ngo on      replay parity --continue {folder}\n" in out
    assert "\nresult     2 EQUAL, 4 not run\n" in out
    assert RUNS[3] not in out  # the table is of what was run
    # What did not run is no success, though all that ran agrees.
    assert cli.main(["parity", "--continue", str(folder), "--time-limit", "0"]) == 1
    assert list(states(folder).values()) == ["done"] * 3 + ["pending"] * 4
    runs.names = [REFERENCE]  # how the stand-in tells it from the same again
    assert cli.main(["parity", "--continue", str(folder)]) == 1
    assert runs.names[1:] == RUNS[3:]
    assert list(states(folder).values()) == ["done"] * 5 + ["failed", "done"]
    assert cli.main(["parity", "--continue", str(folder)]) == 1
    assert runs.names[1:] == RUNS[3:]  # nothing is left
    begin_with_other_versions(folder)
    assert cli.main(["parity", "--continue", str(folder)]) == 1  # so its report is made anywhere
    assert MatrixJudge().judge(ParityLog.read(folder).rows).cells[RUNS[6]].result is CellResult.EQUAL
    # A traced run is compared with others, so it is made with their versions.
    assert cli.main(["parity", "--continue", str(folder), "--first-difference"]) == 2
    assert " has runs of " in capsys.readouterr().err


def test_what_failed_beside_others_is_run_again_and_what_failed_alone_is_not(
    tmp_path: Path, runs: Runs, capsys: Captured
) -> None:
    runs.told = {0: "CUDA out of memory"}
    assert typed(tmp_path, "--at-once", "2") == 1
    folder = folder_in(tmp_path)
    assert said(capsys, "go on") == [f"replay parity --continue {folder}"]
    runs.names, runs.told = [], {5: "CUDA out of memory"}
    assert cli.main(["parity", "--continue", str(folder)]) == 1
    assert runs.names == RUNS
    assert list(states(folder).values()) == ["done"] * 5 + ["failed", "done"]
    assert said(capsys, "go on") == []
    runs.names = []
    assert cli.main(["parity", "--continue", str(folder)]) == 1
    assert runs.names == []


def test_after_the_time_limit_no_run_is_started(tmp_path: Path, runs: Runs, capsys: Captured) -> None:
    assert typed(tmp_path, "--time-limit", "0") == 1
    assert runs.names == []
    assert set(states(folder_in(tmp_path)).values()) == {"pending"}
    assert said(capsys, "go on") == [f"replay parity --continue {folder_in(tmp_path)}"]


def test_what_differs_is_traced_beside_its_reference_and_the_equivalents_that_can_be_trusted(
    tmp_path: Path, runs: Runs, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.told = {4: 1.01, 5: 1.001}  # of the equivalents one is wrong itself
    asked: list[list[str]] = []

    windows: set[tuple[bool, int, int | None]] = set()

    def first_difference(reference: Path, other: Path, equivalents: Sequence[Path]) -> None:
        specs = [PastRun.read(folder) for folder in (reference, other, *equivalents)]
        windows.update((spec.measure.trace, spec.inputs.skip_inputs, spec.inputs.max_inputs) for spec in specs)
        asked.append([f"{spec.actor.backend} {spec.actor.attention}" for spec in specs])

    monkeypatch.setattr(parting, "find_first_difference", first_difference)
    assert typed(tmp_path, "--first-difference") == 1
    assert asked == [["fsdp2 sdpa", "fsdp2 sdpa", "fsdp2 eager"], ["fsdp2 sdpa", "deepspeed auto", "fsdp2 eager"]]
    assert windows == {(True, 1, 1)}  # y, where they are farthest apart
    assert len(runs.names) == len(RUNS) + 4  # the reference and the equivalent serve both
    assert said(capsys, "first") == [f"{name}: no traced tensor leaves its bound" for name in (RUNS[4], RUNS[5])]


def test_the_report_needs_no_network_and_no_script(tmp_path: Path, runs: Runs) -> None:
    runs.told = {5: 1.001, 6: "died of <script>"}
    typed(tmp_path)
    text = (folder_in(tmp_path) / "parity.html").read_text()
    assert "<svg" in text
    assert not re.search(r"<(script|link|img|iframe)", text)
    assert {value[:1] for value in re.findall(r"(?:src|href)=[\"']?([^\"'> ]*)", text)} == {"#"}
    assert "url(http" not in text
    assert "died of &lt;script&gt;" in text
    assert all(name in text for name in RUNS)


def test_without_matplotlib_there_is_a_report_and_a_line(
    tmp_path: Path, runs: Runs, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    lack_package("matplotlib", monkeypatch)
    assert typed(tmp_path) == 0
    assert said(capsys, "note") == ["no picture: it needs matplotlib. Try: pip install 'micro-replay[plot]'"]
    assert "<svg" not in (folder_in(tmp_path) / "parity.html").read_text()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--matrix", "quik"], "--matrix quik is neither one of quick, pairs, full nor a file"),
        (["--continue", "nowhere"], "--continue takes its options from that folder. Leave out --matrix"),
        (["--save-model", "there"], "--save-model cannot be given to parity, which starts many runs. Leave it out"),
        (["--inputs", "nowhere"], "--inputs nowhere: no such folder."),
        (["--backend", "zero"], "--backend 'zero' is not allowed. Give one of deepspeed, fsdp2"),
        (["--dtype", "fp16"], "no cell of the matrix can run here: the options leave no cell"),
        (["--model", "nothing"], "--model nothing: "),
    ],
)
def test_wrong_usage_is_one_line_before_anything_runs(
    tmp_path: Path, runs: Runs, capsys: Captured, more: list[str], says: str
) -> None:
    assert typed(tmp_path, *more) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), runs.names) == ("", 1, [])
    assert err.startswith(f"replay: {says}")
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "holds no parity.json"), ("{}", "is damaged: format is missing"), ('{"format": 7}', "is of format 7")],
)
def test_a_folder_that_parity_cannot_go_on_with_is_refused(
    tmp_path: Path, capsys: Captured, text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / "parity.json").write_text(text)
    assert cli.main(["parity", "--continue", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("machine", "other", "says"),
    [
        (
            {"has_gpus": True, "num_devices": 4},
            {},
            "was begun on 4 GPUs, and here is a CPU. Go on there",
        ),
        (
            {},
            {"torch": "1.0"},
            f"has runs of torch 1.0 there, {version('torch')} here. Go on with those",
        ),
    ],
)
def test_runs_of_another_machine_are_not_gone_on_with(
    tmp_path: Path, runs: Runs, capsys: Captured, machine: dict[str, Any], other: dict[str, str], says: str
) -> None:
    runs.told = {3: KeyboardInterrupt()}
    typed(tmp_path)
    folder = folder_in(tmp_path)
    state = json.loads((folder / "parity.json").read_text())
    changed = {"machine": state["machine"] | machine, "versions": state["versions"] | other}
    (folder / "parity.json").write_text(json.dumps(state | changed))
    runs.names = []
    capsys.readouterr()
    assert cli.main(["parity", "--continue", str(folder)]) == 2
    assert capsys.readouterr().err == f"replay: --continue {folder} {says}\n"
    assert runs.names == []


@pytest.fixture
def in_process(one_world: None, monkeypatch: pytest.MonkeyPatch, world: Any) -> None:
    def run(task: Task) -> ProcessResult:
        return ProcessResult(
            exit_code=run_in(world, task.job.spec).exit_code, seconds=0.0, output=task.output, logs=task.logs
        )

    end_each_task(run, monkeypatch)


def small_model(tmp_path: Path) -> list[str]:
    for step, length in enumerate((24, 40, 31, 52)):
        write_pass(tmp_path / "in", step=step, length=length, num_real=length - 4, num_actions=12, vocabulary=264)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    return ["--inputs", str(tmp_path / "in"), "--model", str(tmp_path / "config.json")]


@pytest.mark.slow
def test_real_runs_agree(tmp_path: Path, in_process: None, capsys: Captured) -> None:
    assert typed(tmp_path, *small_model(tmp_path)) == 0, capsys.readouterr().out
    log = ParityLog.read(folder_in(tmp_path))
    verdicts = MatrixJudge().judge(log.rows).cells
    assert {cell.result for cell in verdicts.values()} <= {CellResult.EQUAL, CellResult.WITHIN_NOISE}
    assert [*verdicts] == RUNS[1:]
    for number, (line, row) in enumerate(zip(list_commands(log), log.rows, strict=True)):
        assert row.log is not None
        program, *words = shlex.split(line, comments=True)
        assert program == "replay"
        assert cli.main([*words, "--log-folder", str(tmp_path / str(number))]) == 0
        again, first = PastRun.read(tmp_path / str(number)).records, PastRun.read(row.log).records
        assert [record.source for record in again] == [record.source for record in first]
        assert [record.result.loss for record in again] == pytest.approx([record.result.loss for record in first])


def positions_go_on(*args: Any, **kwargs: Any) -> Any:
    """Packed documents whose positions do not begin again: each sees those before it."""
    from dataclasses import replace

    import torch

    inputs = prepare_inputs(*args, **kwargs)
    if inputs.cu_seq_lens is None:
        return inputs
    return replace(inputs, position_ids=torch.arange(inputs.input_ids.shape[1]).unsqueeze(0))


def test_a_fault_in_packing_is_found_though_packing_is_an_equivalent(
    tmp_path: Path, in_process: None, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.runner.run_pass.prepare_inputs", positions_go_on)
    assert typed(tmp_path, "--first-difference", *small_model(tmp_path)) == 1
    log = ParityLog.read(folder_in(tmp_path))
    assert {row.state for row in log.rows} == {RowState.DONE}
    verdicts = MatrixJudge().judge(log.rows).cells
    assert [name for name, cell in verdicts.items() if cell.result is CellResult.DIFFERS] == [RUNS[4], RUNS[5]]
    lines = capsys.readouterr().out.splitlines()
    assert any("fsdp2 fp32 packed sdpa" in line for line in lines if line.startswith("WRONG"))
    firsts = [line for line in lines if line.startswith("first")]
    assert len(firsts) == 2
    assert all("input, position_ids fed at actor_inputs_" in line for line in firsts)
