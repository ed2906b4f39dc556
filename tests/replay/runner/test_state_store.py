"""`--save-every` and `--resume`: a run that was killed goes on from its latest whole state as if nothing had happened.

About 8 s.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actor_init.saving.huggingface import create_whole_folder
from actor_init.saving.state_file import SavedState
from actor_init.spec import UsageError
from replay.command_line.cli import main
from replay.options.option_parsing import format_error_with_flags
from replay.options.spec import StateSpec
from replay.runlog.reader import PastRun
from replay.runner.checkpoint import find_state_to_load
from replay.runner.replayer import Replayer
from replay.runner.state_store import EarlierPasses, find_whole_states
from tests.helpers.made_logs import write_log
from tests.helpers.made_records import record

TRAINING = "--step --grad-accumulation 1 --dtype fp32 --quiet --learning-rate 0.01 --backend"
pytestmark = pytest.mark.usefixtures("one_world", "short_sample")


def train(home: Path, typed: str, logs: str = "logs", *, backend: str = "fsdp2") -> int:
    where = ["--save-state", str(home / "states"), "--log-folder", str(home / logs)]
    return main([*TRAINING.split(), backend, *where, *typed.split()])


def read_numbers(logs: Path) -> list[tuple[object, ...]]:
    (folder,) = logs.iterdir()
    return [
        (record.index, record.source, record.result.loss, record.result.grad_norm)
        for record in PastRun.read(folder).records
    ]


def list_names(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "states").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp2", "ddp", "deepspeed"])
def test_a_run_that_was_interrupted_goes_on_to_the_same_numbers(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the last bit. Its log is one log, of all passes."""
    assert train(tmp_path / "whole", "--max-inputs 5 --save-every 2", backend=backend) == 0
    replayed = Replayer.replay

    def interrupt(self: Replayer, index: int, path: Path) -> object:
        if index == 3:
            raise KeyboardInterrupt
        return replayed(self, index, path)

    with monkeypatch.context() as patch:
        patch.setattr(Replayer, "replay", interrupt)
        assert train(tmp_path, "--max-inputs 5 --save-every 2", "first", backend=backend) == 130
    assert list_names(tmp_path) == ["step-000002"]
    (tmp_path / "states" / ".step-000004.unfinished-1234").mkdir()
    capsys.readouterr()
    assert train(tmp_path, "--max-inputs 5 --save-every 2 --resume --no-quiet", "second", backend=backend) == 0
    assert "resumed    behind 2 steps, 2 of 5 passes on each rank\n" in capsys.readouterr().out
    assert read_numbers(tmp_path / "second") == read_numbers(tmp_path / "whole" / "logs")
    assert list_names(tmp_path) == list_names(tmp_path / "whole") == ["step-000004", "step-000005"]
    work = [
        json.loads(next((tmp_path / logs).glob("*/run.json")).read_text())["work"] for logs in ("second", "whole/logs")
    ]
    assert work[0] == work[1]


@pytest.mark.slow
def test_a_state_holds_whole_windows_and_is_loaded_by_the_folder_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "--max-inputs 5 --grad-accumulation 2 --save-every 3") == 0
    said = capsys.readouterr().out
    assert "not saved  the last 1 pass: their accumulation window was cut short\n" in said
    assert f"--skip-inputs 4 --max-inputs 5 --step --quiet --log-folder {tmp_path / 'logs'} --load-state" in said
    (state,) = find_whole_states(tmp_path / "states")
    assert state.name == "step-000002"
    assert len((state / "rank0.jsonl").read_text().splitlines()) == 4
    going_on = ["--skip-inputs", "4", "--max-inputs", "2", "--grad-accumulation", "2", "--log-folder", str(tmp_path)]
    assert main([*TRAINING.split(), "fsdp2", *going_on, "--load-state", str(tmp_path / "states")]) == 0
    longer = train(tmp_path, "--max-inputs 6 --grad-accumulation 2 --save-every 3 --resume", "longer")
    assert (longer, list_names(tmp_path)) == (0, ["step-000002", "step-000003"])
    whole = train(tmp_path / "whole", "--max-inputs 6 --grad-accumulation 2 --save-every 3")
    assert whole == 0
    assert read_numbers(tmp_path / "longer") == read_numbers(tmp_path / "whole" / "logs")


def test_a_state_that_cannot_be_written_ends_the_run_and_leaves_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_full(folder: Path, world: object) -> object:
        if folder.name == "step-000003":
            raise OSError(28, "No space left on device")
        return create_whole_folder(folder, world)  # type: ignore[arg-type]

    monkeypatch.setattr("replay.runner.state_store.create_whole_folder", raise_full)
    assert train(tmp_path, "--max-inputs 4 --save-every 1") == 1
    said = capsys.readouterr().err
    assert said.startswith(f"replay: SavingError: {tmp_path / 'states'}, the state after 3 steps, could not be saved")
    assert "No space left on device" in said
    assert list_names(tmp_path) == ["step-000001", "step-000002"]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--save-every 2", "--save-every 2 needs a folder. Try: --save-state FOLDER --save-every 2"),
        ("--save-state a --resume", "--resume goes on from what --save-every saved."),
        ("--save-state a --save-every 2", "--save-every 2 counts optimizer steps. Try: --step --save-every 2"),
        ("--step --save-state a --save-every 2 --resume --load-state b", "--resume and --load-state exclude"),
        ("--step --save-state a --save-every 2 --resume --trace", "--trace needs every pass, and --resume leaves out"),
        ("--step --save-state pyproject.toml --save-every 2", "--save-state pyproject.toml is a file."),
    ],
)
def test_what_cannot_be_meant_is_refused(typed: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split()) == 2
    assert capsys.readouterr().err.startswith(f"replay: {says}")


def test_states_of_another_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "--max-inputs 2 --save-every 1") == 0
    folder = tmp_path / "states"
    for typed, says in {
        "": f"--save-state {folder} holds the states of a run. Try: --resume, or --save-state {folder}-2",
        "--resume --shuffle-inputs": f"--resume: pass 1 in {folder / 'step-000002'} was on actor_inputs_rank0_",
        "--resume --learning-rate 1": f"--load-state {folder / 'step-000002'} was saved with --learning-rate 0.01, not",
    }.items():
        capsys.readouterr()
        assert train(tmp_path, f"--max-inputs 2 --save-every 1 {typed}", "other") == 2
        assert capsys.readouterr().err.startswith(f"replay: {says}")
    text = json.loads((folder / "step-000002" / "state.json").read_text())
    (folder / "step-000002" / "state.json").write_text(json.dumps(text | {"world_size": 4, "tp": 2}))
    assert train(tmp_path, "--max-inputs 2 --save-every 1 --resume", "other") == 2
    said = capsys.readouterr().err
    assert "was saved by 4 ranks with --tp 2 --ring 1, and here are 1 with --tp 1 --ring 1. Try: as there" in said


def read_earlier(
    folder: Path, inputs: Sequence[str], *, rank: int = 0, world_size: int = 2, tp: int = 1, ring: int = 1
) -> EarlierPasses:
    world = SimpleNamespace(
        rank=rank,
        world_size=world_size,
        mesh={"tp": SimpleNamespace(size=lambda: tp), "ring": SimpleNamespace(size=lambda: ring)},
    )
    selection = SimpleNamespace(inputs=[Path(name) for name in inputs])
    return EarlierPasses.read(folder, cast(Any, selection), cast(Any, world))


@pytest.fixture
def two_ranks_state(tmp_path: Path) -> Path:
    """A state of two ranks, after two windows of two passes each."""
    names = ["ac", "eg", "ik", "mo"]
    records = [
        record(index, rank=rank, source=name[rank], grad_norm=0.5 if index % 2 else None)
        for index, name in enumerate(names)
        for rank in range(2)
    ]
    folder = write_log(tmp_path / "step-000002", records)
    SavedState(
        backend="ddp",
        zero_stage=0,
        world_size=2,
        tp=1,
        ring=1,
        dtype="fp32",
        optimizer="adamw",
        learning_rate=1e-3,
        lr_warmup_steps=0,
        max_norm=None,
        num_steps=2,
        next_learning_rate=1e-3,
        num_inputs=9,
        model={},
        versions={},
    ).write(folder)
    return folder


@pytest.mark.parametrize(("rank", "inputs"), [(0, "aeimq"), (1, "cgkos")])
def test_a_rank_goes_on_behind_its_own_passes_and_steps(two_ranks_state: Path, rank: int, inputs: str) -> None:
    earlier = read_earlier(two_ranks_state, inputs, rank=rank)
    assert (earlier.folder, earlier.num_steps, earlier.num_passes) == (two_ranks_state, 2, 4)
    assert sorted((one.index, one.rank) for one in earlier.records) == [(i, r) for i in range(4) for r in range(2)]
    # As many inputs as passes are enough.
    assert read_earlier(two_ranks_state, inputs[:4], rank=rank).num_passes == 4


@pytest.mark.parametrize(
    ("inputs", "world", "says"),
    [
        ("aexm", {}, "pass 3 in {folder} was on i, and here it is on x"),
        ("aei", {}, "pass 4 in {folder} was on m, and here it is on none"),
        ("aeim", {"world_size": 1}, "saved by 2 ranks with --tp 1 --ring 1, and here are 1 with --tp 1 --ring 1"),
        ("aeim", {"tp": 2}, "saved by 2 ranks with --tp 1 --ring 1, and here are 2 with --tp 2 --ring 1"),
        (
            "aeim",
            {"ring": 2},
            "saved by 2 ranks with --tp 1 --ring 1, and here are 2 with --tp 1 --ring 2. Try: as there",
        ),
        ("aeim", {"ring": 2}, "or --load-state {folder} --skip-inputs 9, a run of its own"),
    ],
)
def test_a_run_goes_on_only_on_the_inputs_and_ranks_that_it_was_begun_with(
    two_ranks_state: Path, inputs: str, world: dict[str, int], says: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        read_earlier(two_ranks_state, inputs, **world)
    assert says.format(folder=two_ranks_state) in format_error_with_flags(refusal.value)


def test_a_state_is_not_loaded_by_a_torch_that_runs_code_from_files() -> None:
    spec = StateSpec(load_state=Path("runs/a"))
    assert find_state_to_load(spec) == Path("runs/a")
    with pytest.raises(UsageError, match=r"needs torch 2\.10\.0 or later, and 2\.9\.1\+cu126 is installed"):
        find_state_to_load(spec, torch_version="2.9.1+cu126")
    assert find_state_to_load(StateSpec(), torch_version="2.9.1+cu126") is None
