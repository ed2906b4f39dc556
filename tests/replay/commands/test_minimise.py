"""`replay minimise` as it is typed: what counts as the same failure, going on, the folder, and bad input."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import replay
from actor_init.as_json import from_json
from capture import capture_files, recording
from capture.file_format.actor_config import write_actor_config
from capture.file_format.capture_file import read_call
from replay.api.logs import PastCampaign
from replay.command_line.cli import main
from replay.commands.minimise import folder as folder_module
from replay.commands.minimise.cutting import Candidate
from replay.commands.minimise.folder import format_run_script
from replay.commands.minimise.standalone import Standalone
from replay.commands.minimise.trials import MinimiseTrial, ParityCell
from replay.processes.pool import ProcessResult, Task
from replay.runlog.records import PassRecord
from tests.helpers.children import end_each_task
from tests.helpers.commands import LIMIT
from tests.helpers.failing_inputs import CONFIG as GPT2
from tests.helpers.made_captures import write_pass
from tests.helpers.made_logs import passed, write_log
from tests.helpers.planted_failures import LOSSES, usual_inputs
from tests.helpers.planted_losses import TOKEN
from tests.helpers.repeated import repeated_by
from tests.helpers.schemas import assert_valid
from tests.helpers.typed import spec_of
from tests.replay.commands.test_minimise_failure import child_of, fail
from tests.trainers.common import make_model
from tests.warm import warm_bin

Captured = pytest.CaptureFixture[str]
Event = Callable[[Path], list[PassRecord]]


def cell_of(**changes: Any) -> ParityCell:
    values: dict[str, Any] = {
        "name": "fsdp2 fp32 padded compiled",
        "spec": spec_of(["--backend", "fsdp2", "--tp", "2", "--dtype", "fp32", "--model", "a.json", "--compile"]),
        "reference": spec_of(["--backend", "fsdp2", "--dtype", "fp32", "--model", "a.json"]),
        "num_processes": 1,
        "bounds": {"loss": 1e-6, "log-probs": 1e-6},
    }
    return ParityCell(**(values | changes))


def test_a_parity_cell_and_its_reference_get_smaller_together() -> None:
    cell = cell_of()
    assert sorted(cell.shared_flags) == ["--backend", "--dtype", "--model"]
    whole = Candidate.from_spec([], cell.spec, 4)  # two data ranks
    spec = cell.build_reference(whole)
    assert (spec.actor.grad_accumulation, spec.actor.parallel.tp, spec.actor.compile) == (2, 1, "off")
    smaller = replace(whole.with_option("--num-layers", 1).with_option("--model", "b.json"), num_processes=2)
    spec = cell.build_reference(smaller)
    assert (spec.actor.num_layers, spec.actor.model, spec.actor.dtype) == (1, "b.json", "fp32")
    assert spec.actor.resolved_grad_accumulation == 1


def test_a_parity_cell_fails_where_it_is_beyond_the_noise(tmp_path: Path) -> None:
    def run(name: str, *losses: float) -> ProcessResult:
        return child_of(tmp_path / name, 0, [passed(n, "abc"[n], loss=loss) for n, loss in enumerate(losses)])

    found = cell_of().compare_runs(run("reference", 2.0, 2.0, 2.0), run("other", 2.0, 2.1, 2.0))
    assert found is not None
    assert (found.kind, found.quantities, found.index, found.source) == ("parity", ("loss",), 1, "b.pkl")
    # Of several quantities the one that is farthest beyond its own bound is said, wherever it is.
    reference = child_of(tmp_path / "exact", 0, [passed(n, "ab"[n]) for n in range(2)])
    log_probs: dict[str, Any] = {"row_log_probs": [-10.0, -20.2]}
    other = child_of(tmp_path / "off", 0, [passed(0, "a", **log_probs), passed(1, "b", loss=2.1)])
    for bounds, quantity, index in (
        ({"loss": 1e-6, "log-probs": 1e-3}, "loss", 1),
        ({"loss": 1e-2, "log-probs": 1e-6}, "log-probs", 0),
    ):
        found = cell_of(bounds=bounds).compare_runs(reference, other)
        assert found is not None
        assert found.quantities == ("loss", "log-probs")
        assert found.said.startswith(f"{quantity} of ")
        assert found.index == index
    assert cell_of().compare_runs(run("same", 2.0, 2.0), run("as that", 2.0, 2.0 + 1e-9)) is None


@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_script_of_a_parity_cell_runs_both_and_says_what_no_option_sets(is_reversed: bool) -> None:
    cell = cell_of()
    spec = replace(
        cell.spec,
        inputs=replace(cell.spec.inputs, reverse_rows=is_reversed),
        measure=replace(cell.spec.measure, details=True),
    )
    lines = format_run_script(Candidate.from_spec([], spec, 2), cell).splitlines()
    there = replace(spec.inputs, inputs=Path("inputs"))
    traced = replace(spec.measure, details=False, trace=True)
    assert [line for line in lines if line.startswith("# ")] == (
        ["# and what no option sets: reverse_rows=True, details=True"] if is_reversed else []
    )
    reference, own = [line.partition(" --log-folder ")[0] for line in lines if "--log-folder" in line]
    assert repeated_by(reference).spec == replace(
        cell.build_reference(Candidate.from_spec([], spec, 2)),
        inputs=replace(there, reverse_rows=False),
        measure=traced,
    )
    if is_reversed:
        own += f"  {lines[2]}"
    expected = replace(spec, inputs=there, measure=spec.measure if is_reversed else traced)
    assert repeated_by(own) == (expected, 2, "")


def test_a_cell_that_is_not_there_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    for typed, says in (
        (["--parity", str(tmp_path)], "--parity and --cell go together. Try: --parity logs/TIME-parity --cell NAME"),
        (["--parity", str(tmp_path), "--cell", "x"], f"--parity {tmp_path} holds no parity.json. Give a folder"),
        (["--parity", str(tmp_path), "--cell", "x", "--tp", "2"], "--cell x has its options from"),
    ):
        assert main(["minimise", *typed]) == 2
        assert capsys.readouterr().err.startswith(f"replay: {says}")


class Runs:
    """In the place of the processes: a replay that fails for a token, as its log and exit code have it."""

    def __init__(self) -> None:
        self.happens: dict[int, BaseException] = {}
        self.num_made = 0
        self.fails = fails_for_the_token
        # That of this process, and that of the replay, of each run.
        self.working_folders: list[tuple[Path, Path]] = []
        # The replay fails only where the file of its loss is.
        self.needs_loss_file = False

    def __call__(self, task: Task) -> ProcessResult:
        self.num_made += 1
        self.working_folders.append((Path.cwd(), task.folder))
        if (event := self.happens.pop(self.num_made, None)) is not None:
            raise event
        spec = task.job.spec
        is_complete = not self.needs_loss_file or (task.folder / spec.measure.loss.partition(":")[0]).exists()
        records = self.fails(task.folder / (spec.inputs.inputs or Path())) if is_complete else [passed(0, "a")]
        write_log(task.logs / "run", records, spec=spec, exit_code=int(records[-1].error is not None))
        task.output.write_text("as it was printed\n")
        code = 1 if records[-1].error else 0
        return ProcessResult(exit_code=code, seconds=1.0, output=task.output, logs=task.logs)


def fails_for_the_token(inputs: Path) -> list[PassRecord]:
    records: list[PassRecord] = []
    for index, path in enumerate(capture_files(inputs)):
        ids = read_call(path).tensors["sequences"]
        if (ids == TOKEN).any():
            failed = PassRecord(
                index=index, source=path.name, rank=0, error=f"{ids.numel()} tokens", error_type="IndexError"
            )
            return [*records, failed]
        records.append(passed(index, path.stem))
    return records


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    end_each_task(made, monkeypatch)
    none = Standalone(shows=False, why="not asked for")
    monkeypatch.setattr(folder_module, "write_standalone", lambda *_, **__: none)
    return made


def minimise(*typed: str, logs: Path) -> int:
    return main(["minimise", *typed, "--log-folder", str(logs)])


def written(logs: Path) -> Path:
    (path,) = logs.glob("*-minimise/minimise.json")
    return path.parent


def trials_of(folder: Path) -> list[MinimiseTrial]:
    whole = json.loads((folder / "minimise.json").read_text())
    return [from_json(MinimiseTrial, trial, source="a trial") for trial in whole["result"]["trials"]]


def test_the_folder_holds_what_is_left_and_how_to_run_it(tmp_path: Path, runs: Runs, capsys: Captured) -> None:
    inputs = usual_inputs(tmp_path)
    typed = ["--inputs", str(inputs), "--loss", f"{LOSSES}:raises", "--max-norm", "1"]
    assert minimise(*typed, logs=tmp_path / "logs") == 0
    smallest = written(tmp_path / "logs") / "smallest"
    assert {path.name for path in smallest.iterdir()} == {
        *("inputs", "run.sh", "output.txt", "versions.json", "README.md"),
    }
    (path,) = capture_files(smallest / "inputs")
    ids = read_call(path).tensors["sequences"]
    assert ids.shape == (1, 2)
    assert TOKEN in ids
    assert (smallest / "inputs" / "actor.json").is_file()
    command = (smallest / "run.sh").read_text().splitlines()[-1].removeprefix("exec ")
    assert repeated_by(command).spec.inputs.inputs == Path("inputs")
    assert "--max-norm" not in command
    assert (smallest / "output.txt").read_text() == "as it was printed\n"
    assert "IndexError" in (smallest / "README.md").read_text()
    printed = capsys.readouterr().out
    assert "1 of 8 files, 1 row, 2 tokens, 1 layer, 1 process" in printed
    assert f"written    {smallest}" in printed

    # The last run begins in the folder, and the process that asks for it stays where it is.
    assert {here for here, _ in runs.working_folders} == {Path.cwd()}
    assert [there.name for _, there in runs.working_folders if there != Path()] == [".smallest"]

    num_made = runs.num_made
    assert main(["minimise", "--continue", str(smallest.parent), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    result = replay.minimise(continue_=smallest.parent)
    assert_valid("minimise", result.to_dict())
    assert (capsys.readouterr().out, runs.num_made) == ("", num_made)
    assert result.to_dict() == shown
    assert shown["result"] == json.loads((smallest.parent / "minimise.json").read_text())["result"]
    assert result.failure is not None
    assert result.smallest is not None
    assert (result.failure.error_type, result.smallest.folder, result.smallest.num_tokens) == (
        "IndexError",
        smallest,
        2,
    )
    assert (shown["result"]["smallest"]["folder"], shown["result"]["smallest"]["num_tokens"]) == (str(smallest), 2)
    assert list(result.to_frame().what) == [trial.what for trial in trials_of(smallest.parent)]
    past = replay.open(smallest.parent)
    assert isinstance(past, PastCampaign)
    assert past["0001/runs"].problems == past["smallest/runs"].problems == ["1 pass failed"]


def test_paths_may_be_relative(tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    usual_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert replay.minimise("inputs", max_runs=3, log_folder="logs").exit_code == 0
    (folder,) = Path("logs").glob("*-minimise")
    assert main(["minimise", "--continue", str(folder), "--max-runs", "40"]) == 0
    (path,) = capture_files(folder / "smallest" / "inputs")
    assert read_call(path).tensors["sequences"].shape == (1, 2)
    assert {path.name for path in folder.iterdir()} == {"minimise.json", "journal.jsonl", "smallest", "trials"}
    assert not (folder / "smallest" / "logs").exists()


def test_a_loss_file_comes_along(tmp_path: Path, runs: Runs) -> None:
    """It is needed: without the option the replay does not fail."""
    inputs = usual_inputs(tmp_path)
    runs.needs_loss_file = True
    assert minimise("--inputs", str(inputs), "--loss", f"{LOSSES}:raises", logs=tmp_path / "logs") == 0
    smallest = written(tmp_path / "logs") / "smallest"
    assert "--loss planted_losses.py:raises" in (smallest / "run.sh").read_text()
    assert (smallest / LOSSES.name).read_bytes() == LOSSES.read_bytes()


def test_nothing_is_run_twice_and_what_ended_goes_on(tmp_path: Path, runs: Runs, capsys: Captured) -> None:
    inputs = usual_inputs(tmp_path)
    assert minimise("--inputs", str(inputs), logs=tmp_path / "whole") == 0
    num_whole = runs.num_made
    runs.num_made, runs.happens = 0, {1: KeyboardInterrupt(), 6: KeyboardInterrupt()}
    assert minimise("--inputs", str(inputs), logs=tmp_path / "logs") == 130
    folder = written(tmp_path / "logs")
    assert f"go on      replay minimise --continue {folder}" in capsys.readouterr().out.splitlines()
    assert main(["minimise", "--continue", str(folder)]) == 130
    assert main(["minimise", "--continue", str(folder), "--max-runs", "7"]) == 0
    said = capsys.readouterr().out
    assert f"replay minimise --continue {folder} --max-runs 14" in said
    readme = (folder / "smallest" / "README.md").read_text()
    assert "The search ended after" in readme
    assert f"Go on: `replay minimise --continue {folder} --max-runs N`. `replay minimise --inputs" in readme
    assert main(["minimise", "--continue", str(folder), "--max-runs", "40"]) == 0
    assert runs.num_made - 3 == num_whole  # two were broken off; the folder of what there was after 7 took one
    trials = [(trial.candidate, trial.said) for trial in trials_of(folder) if trial.candidate.cuts]
    assert trials == [
        (trial.candidate, trial.said) for trial in trials_of(written(tmp_path / "whole")) if trial.candidate.cuts
    ]

    moved, num_made, smallest = (
        folder.rename(tmp_path / "moved"),
        runs.num_made,
        folder.parent.parent / "moved" / "smallest",
    )
    before = (smallest / "README.md").read_text()
    assert main(["minimise", "--continue", str(moved)]) == 0
    assert runs.num_made == num_made
    assert (smallest / "README.md").read_text() == before


def test_what_does_not_fail_is_said_in_a_line(tmp_path: Path, runs: Runs, capsys: Captured) -> None:
    inputs = usual_inputs(tmp_path, {})
    assert minimise("--inputs", str(inputs), "--tries", "2", logs=tmp_path / "logs") == 1
    assert runs.num_made == 2
    assert "failed     not reproducible in 2 tries: the replay did not fail" in capsys.readouterr().out.splitlines()


def test_a_failure_that_comes_at_times_gets_as_many_runs_as_it_took(tmp_path: Path, runs: Runs) -> None:
    inputs, usual = usual_inputs(tmp_path), runs.fails
    runs.fails = lambda inputs: usual(inputs) if runs.num_made % 2 == 0 else [passed(0, "a")]
    assert minimise("--inputs", str(inputs), "--max-runs", "100", logs=tmp_path / "logs") == 0
    folder = written(tmp_path / "logs")
    assert [trial.said == "no failure" for trial in trials_of(folder)[:2]] == [True, False]
    assert {trial.num_runs for trial in trials_of(folder) if trial.candidate.cuts} <= {1, 2}
    (path,) = capture_files(folder / "smallest" / "inputs")
    assert read_call(path).tensors["sequences"].shape == (1, 2)


def test_another_failure_is_not_taken_for_the_one_that_is_looked_for(tmp_path: Path, runs: Runs) -> None:
    """Single rows fail too, but otherwise."""
    inputs, usual = usual_inputs(tmp_path), runs.fails

    def fails(inputs: Path) -> list[PassRecord]:
        records = usual(inputs)
        small = len(capture_files(inputs)) == 1 and len(read_call(capture_files(inputs)[0]).tensors["sequences"]) == 1
        return [fail(0, "KeyError", "rows")] if small else records

    runs.fails = fails
    assert minimise("--inputs", str(inputs), "--max-runs", "100", logs=tmp_path / "logs") == 0
    folder = written(tmp_path / "logs")
    assert any(trial.said.startswith("another failure: KeyError") for trial in trials_of(folder))
    (path,) = capture_files(folder / "smallest" / "inputs")
    assert read_call(path).tensors["sequences"].shape == (2, 2)


def test_redacted_inputs_are_written_where_they_still_fail(
    tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.randbits", lambda _: 1)  # a permutation in which no other token becomes TOKEN
    inputs = usual_inputs(tmp_path)
    assert minimise("--inputs", str(inputs), "--redact", logs=tmp_path / "text") == 0
    kept = written(tmp_path / "text") / "smallest"
    assert "NOT redacted" in (kept / "README.md").read_text()
    assert TOKEN in read_call(capture_files(kept / "inputs")[0]).tensors["sequences"]
    runs.fails = lambda inputs: [fail(0, "ValueError", f"{len(capture_files(inputs))} files")]
    assert minimise("--inputs", str(inputs), "--redact", logs=tmp_path / "any") == 0
    redacted = written(tmp_path / "any") / "smallest"
    assert "redacted as capture redact --tokens zero does" in (redacted / "README.md").read_text()
    assert not read_call(capture_files(redacted / "inputs")[0]).tensors["sequences"].any()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--tries 0", "invalid value for '--tries'"),
        ("--save-model x", "unknown option --save-model"),
        ("--processes 3 --backend fsdp2 --tp 2", "--processes 3 is no multiple of tp x ring, 2. Try: --processes 2"),
        ("--inputs nowhere", "--inputs nowhere: no such folder."),
        ("--continue nowhere", "--continue nowhere holds no minimise.json. Give a folder that `replay minimise` left"),
        ("--continue nowhere --tp 2", "--continue takes its options from that folder. Leave out --tp"),
        ("--continue nowhere --redact", "--continue takes its options from that folder. Leave out --redact"),
    ],
)
def test_bad_input_is_one_line(typed: str, says: str, capsys: Captured) -> None:
    assert main(["minimise", *typed.split()]) == 2
    assert capsys.readouterr().err.startswith(f"replay: {says}")


def test_a_damaged_or_foreign_state_is_one_line(tmp_path: Path, runs: Runs, capsys: Captured) -> None:
    assert minimise("--inputs", str(usual_inputs(tmp_path)), logs=tmp_path / "logs") == 0
    path = written(tmp_path / "logs") / "minimise.json"
    whole = json.loads(path.read_text())
    for text, says in (
        (path.read_text()[:-30], "is damaged"),
        (json.dumps(whole | {"format": 99}), "is of format 99"),
        (json.dumps(whole | {"versions": whole["versions"] | {"torch": "1.0"}}), "has runs of torch 1.0 there"),
        (
            json.dumps(whole | {"plan": whole["plan"] | {"sources": ["/nowhere/a.pkl"]}}),
            "/nowhere/a.pkl is no longer there",
        ),
    ):
        path.write_text(text)
        capsys.readouterr()
        assert main(["minimise", "--continue", str(path.parent)]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.slow
def test_an_exception_of_the_model_is_shown_by_torch_and_transformers_alone(tmp_path: Path, capsys: Captured) -> None:
    """The model has four positions, and a row of the second file is longer."""
    folder = tmp_path / "inputs"
    for step, length in enumerate((4, 6)):
        write_pass(folder, step=step, num_rows=2, length=length, num_real=length)
    write_actor_config(folder, {**GPT2, "n_positions": 4}, "tiny")
    assert minimise("--inputs", str(folder), logs=tmp_path / "logs") == 0
    smallest = written(tmp_path / "logs") / "smallest"
    (path,) = capture_files(smallest / "inputs")
    assert read_call(path).tensors["sequences"].shape == (1, 5)
    assert "repro.py   shows it" in capsys.readouterr().out
    lines = (smallest / "repro.py").read_text().splitlines()
    assert len(lines) < 80
    imported = {line.split()[1].partition(".")[0] for line in lines if line.startswith(("import", "from"))}
    assert imported == {"sys", "pathlib", "torch", "transformers"}
    done = subprocess.run(
        [warm_bin() / "python", str(smallest / "repro.py")],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("IndexError: index out of range")


def test_a_difference_in_one_of_eight_rows_is_cut_to_that_row(tmp_path: Path, capsys: Captured) -> None:
    """The job's head was wrong in one row. Of 8 x 99 tokens 64 were recorded, so a row has eight of its own."""
    model: Any = make_model(tmp_path)

    def wrong(module: nn.Module, given: object, logits: Tensor) -> Tensor:
        return torch.cat([logits[:5], 1.5 * logits[5:6], logits[6:]])

    with model.lm_head.register_forward_hook(wrong), recording(model, tmp_path / "captures", reproduce=True):
        ids_BS = torch.randint(3, 64, (8, 100), generator=torch.Generator().manual_seed(0))
        model(input_ids=ids_BS, labels=ids_BS).loss.backward()
    typed = ["--inputs", str(tmp_path / "captures"), "--model", str(tmp_path / "model"), "--loss", "sft"]
    assert minimise(*typed, "--max-runs", "7", logs=tmp_path / "logs") == 0
    printed = capsys.readouterr().out
    assert "failure    differs (token log-probs)" in printed
    (path,) = capture_files(written(tmp_path / "logs") / "smallest" / "inputs")
    assert read_call(path).tensors["input_ids"].tolist() == [ids_BS[5].tolist()]


@pytest.mark.slow
def test_a_failure_of_one_rank_keeps_both(tmp_path: Path, capsys: Captured) -> None:
    inputs, usual = tmp_path / "inputs", usual_inputs(tmp_path / "usual")
    inputs.mkdir()
    for path in [*capture_files(usual)[4:6], usual / "actor.json"]:
        os.link(path, inputs / path.name)
    typed = ["--inputs", str(inputs), "--processes", "2", "--loss", f"{LOSSES}:raises_on_rank_1", "--max-runs", "4"]
    assert minimise(*typed, logs=tmp_path / "logs") == 0
    printed = capsys.readouterr().out
    assert "failure    RuntimeError in pass 1" in printed
    assert "2 of 2 files" in printed
    smallest = written(tmp_path / "logs") / "smallest"
    assert "torchrun --nproc-per-node 2" in (smallest / "run.sh").read_text()
    assert "the failure needs 2 processes" in (smallest / "README.md").read_text()
