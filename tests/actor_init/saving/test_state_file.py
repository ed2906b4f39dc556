"""State folders: what is refused, what a run leaves behind when something goes wrong, and the line that says how to
go on."""

import json
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from replay.command_line.cli import main
from tests.helpers.contract import records_of
from tests.helpers.failing_inputs import TOO_LONG, folder_of
from tests.helpers.read_logs import read_log

pytestmark = pytest.mark.usefixtures("one_world", "proofs_once")

TRAINING = "--dtype fp32 --quiet --warmup 0 --step --learning-rate 1e-2 --lr-warmup-steps 4 --max-norm 0.5"
BACKENDS = ["--zero-stage 1", "--backend fsdp2", "--backend ddp"]
LENGTHS = [20, 22, 24, 26, 28, 30]


def replay(home: Path, typed: str) -> int:
    """One more run, with its log in `home`/<number>."""
    return main([*typed.split(), "--log-folder", str(home / f"log-{len(list(home.glob('log-*')))}")])


def read_numbers(home: Path, run: int) -> list[tuple[str, float | None, float | None]]:
    return [(record.source, record.result.loss, record.result.grad_norm) for record in records_of(home / f"log-{run}")]


def find_lines(out: str, name: str) -> list[str]:
    return [line[11:] for line in out.splitlines() if line[:11].strip() == name]


def list_files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith("log-")}


@pytest.mark.parametrize("flags", BACKENDS)
def test_the_line_that_says_how_to_go_on_goes_on(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = folder_of(tmp_path, LENGTHS)
    common = f"{flags} {TRAINING} --inputs {inputs}"
    assert replay(tmp_path, common) == 0
    assert find_lines(capsys.readouterr().out, "go on") == []
    assert replay(tmp_path, f"{common} --max-inputs 3 --save-state {tmp_path}/state") == 0
    out = capsys.readouterr().out
    assert find_lines(out, "saved") == [f"state in {tmp_path}/state: 3 steps, the next with learning rate 0.0075"]
    program, *typed = shlex.split(find_lines(out, "go on")[0])
    assert program == "replay"
    at = typed.index("--log-folder")
    assert replay(tmp_path, shlex.join(typed[:at] + typed[at + 2 :])) == 0
    assert read_numbers(tmp_path, 2) == read_numbers(tmp_path, 0)[3:]
    (folder,) = (tmp_path / "log-2").iterdir()
    assert read_log(folder)[0]["facts"]["weights"] == f"from the state in {tmp_path}/state, after 3 steps"


@pytest.mark.parametrize("flags", BACKENDS)
def test_a_window_that_was_cut_short_is_done_again(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = f"{flags} {TRAINING} --grad-accumulation 2 --inputs {folder_of(tmp_path, LENGTHS)}"
    assert replay(tmp_path, common) == 0
    assert replay(tmp_path, f"{common} --max-inputs 3 --save-state {tmp_path}/state") == 0
    out = capsys.readouterr().out
    assert find_lines(out, "not saved") == ["the last 1 pass: their accumulation window was cut short"]
    assert "--skip-inputs 2 " in find_lines(out, "go on")[0]
    state = json.loads((tmp_path / "state" / "state.json").read_text())
    assert (state["num_steps"], state["num_inputs"]) == (1, 2)
    assert replay(tmp_path, f"{common} --skip-inputs 2 --load-state {tmp_path}/state") == 0
    assert read_numbers(tmp_path, 2) == read_numbers(tmp_path, 0)[2:]


@pytest.mark.parametrize("flags", BACKENDS)
def test_a_pass_that_broke_off_leaves_the_loaded_state_for_the_next(flags: str, tmp_path: Path) -> None:
    inputs = folder_of(tmp_path, [20, 22, 24, TOO_LONG, 26])
    common = f"{flags} {TRAINING} --inputs {inputs}"
    assert replay(tmp_path, f"{common} --max-inputs 2 --save-state {tmp_path}/state") == 0
    standing = common.replace("--step", "") + f" --load-state {tmp_path}/state"
    assert replay(tmp_path, f"{standing} --skip-inputs 4") == 0
    assert replay(tmp_path, f"{standing} --skip-inputs 2") == 1
    assert read_numbers(tmp_path, 2)[-1] == read_numbers(tmp_path, 1)[0]


@pytest.mark.parametrize("flags", ["--zero-stage 0", "--zero-stage 3", *BACKENDS])
def test_a_state_saved_before_the_first_step_begins_at_the_beginning(flags: str, tmp_path: Path) -> None:
    """Nothing makes moments on the way, and no step is counted: AdamW's first step would be another."""
    common = f"{flags} {TRAINING} --inputs {folder_of(tmp_path, LENGTHS)}"
    assert replay(tmp_path, f"{common.replace('--step', '')} --max-inputs 2 --save-state {tmp_path}/state") == 0
    assert json.loads((tmp_path / "state" / "state.json").read_text())["num_steps"] == 0
    assert replay(tmp_path, common) == 0
    assert replay(tmp_path, f"{common} --load-state {tmp_path}/state") == 0
    assert read_numbers(tmp_path, 2) == read_numbers(tmp_path, 1)


def test_a_state_saved_without_a_step_is_the_state_as_it_was_loaded(tmp_path: Path) -> None:
    common = f"--backend fsdp2 {TRAINING} --inputs {folder_of(tmp_path, LENGTHS)}"
    assert replay(tmp_path, f"{common} --max-inputs 3 --save-state {tmp_path}/a") == 0
    standing = common.replace("--step", "")
    assert replay(tmp_path, f"{standing} --max-inputs 1 --load-state {tmp_path}/a --save-state {tmp_path}/b") == 0
    assert json.loads((tmp_path / "b" / "state.json").read_text())["num_steps"] == 3
    for run in ("a", "b"):
        assert replay(tmp_path, f"{common} --skip-inputs 3 --load-state {tmp_path}/{run}") == 0
    assert read_numbers(tmp_path, 3) == read_numbers(tmp_path, 2)


def test_a_run_that_failed_saves_nothing_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = f"{TRAINING} --inputs {folder_of(tmp_path, [20, TOO_LONG, 24])}"
    assert replay(tmp_path, f"{common} --save-state {tmp_path}/state --save-model {tmp_path}/model") == 1
    expected = [f"--save-{what} {tmp_path}/{what}: the run did not succeed" for what in ("model", "state")]
    out = capsys.readouterr().out
    assert find_lines(out, "not saved") == expected
    (ended,) = find_lines(out, "ended")
    assert ended.startswith("1 input not replayed: with --step a pass that fails loses the weights")
    assert list_files(tmp_path) == {"inputs"}


def _full(_: Any, folder: Path) -> None:
    (folder / "half").write_text("written")
    raise OSError(28, "No space left on device")


def test_what_could_not_be_saved_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("actor_init.backends.deepspeed.DeepSpeedBackend.save_state", _full)
    common = f"{TRAINING} --inputs {folder_of(tmp_path, [20, 22])}"
    assert replay(tmp_path, f"{common} --save-model {tmp_path}/model --save-state {tmp_path}/state") == 1
    out, err = capsys.readouterr()
    assert f"{tmp_path}/state could not be saved and does not exist: [Errno 28] No space left on device" in err
    assert find_lines(out, "not saved") == [f"--save-state {tmp_path}/state: the run did not succeed"]
    assert list_files(tmp_path) == {"inputs", "model"}
    (folder,) = (tmp_path / "log-0").iterdir()
    assert read_log(folder)[0]["status"] == "failed"


def test_a_large_model_is_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = folder_of(tmp_path, [20])
    assert replay(tmp_path, f"--quiet --inputs {inputs} --save-model {tmp_path}/one") == 0
    monkeypatch.setattr("actor_init.saving.huggingface.MAX_SHARD_SIZE", "4KB")
    assert replay(tmp_path, f"--quiet --inputs {inputs} --save-model {tmp_path}/several") == 0
    assert not (tmp_path / "several" / "model.safetensors").exists()
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    with safe_open(tmp_path / "one" / "model.safetensors", framework="pt") as file:
        assert set(index["weight_map"]) == set(file.keys())
    single, several = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "several"))
    for (name, expected), tensor in zip(single.state_dict().items(), several.state_dict().values(), strict=True):
        assert tensor.equal(expected), name
    for model in ("one", "several"):
        assert replay(tmp_path, f"--quiet --inputs {inputs} --model {tmp_path}/{model}") == 0
    assert read_numbers(tmp_path, 3) == read_numbers(tmp_path, 2) == read_numbers(tmp_path, 0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, world: Any) -> Path:
    """State folders by backend, and folders that are none."""
    home = tmp_path_factory.mktemp("saved")
    inputs = folder_of(home, [20, 22])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replay.runner.run.World.from_env", lambda _: nullcontext(world))
        for name, flags in {"zero1": "--zero-stage 1", "fsdp2": "--backend fsdp2"}.items():
            assert replay(home, f"{flags} {TRAINING} --inputs {inputs} --max-inputs 1 --save-state {home}/{name}") == 0
    (home / "empty").mkdir()
    (home / "file").touch()
    (home / "mangled").mkdir()
    (home / "mangled" / "state.json").write_text("{")
    (home / "old").mkdir()
    (home / "old" / "state.json").write_text('{"format": 0}')
    values = json.loads((home / "zero1" / "state.json").read_text())
    other_ranks: dict[str, dict[str, Any]] = {"of-2-sgd": {"optimizer": "sgd"}, "of-2-new": {"num_steps": 0}}
    for name, changes in other_ranks.items():
        folder = home / name
        folder.mkdir()
        (folder / "state.json").write_text(json.dumps({**values, "world_size": 2, **changes}))
    return home


REFUSED = {
    "no such state": ("--load-state {home}/nowhere", "{home}/nowhere. Give a folder that --save-state wrote"),
    "an empty folder": ("--load-state {home}/empty", "Give a folder that --save-state wrote"),
    "a damaged state": ("--load-state {home}/mangled", "it is damaged"),
    "another format": ("--load-state {home}/old", "is not of format 1"),
    "fsdp2's under deepspeed": (
        "--load-state {home}/fsdp2",
        "saved with --backend fsdp2, not with --backend deepspeed",
    ),
    "deepspeed's under fsdp2": ("--backend fsdp2 --load-state {home}/zero1", "Try: --backend deepspeed"),
    "another stage": ("--zero-stage 2 --load-state {home}/zero1", "Try: --zero-stage 1; or for its weights alone"),
    "another optimizer": ("--optimizer sgd --load-state {home}/zero1", "saved with --optimizer adamw"),
    "another dtype": ("--dtype bf16 --load-state {home}/zero1", "Try: --dtype fp32"),
    "another rate": ("--learning-rate 1 --load-state {home}/zero1", "Try: --learning-rate 0.01"),
    "another warm-up": ("--lr-warmup-steps 0 --load-state {home}/zero1", "Try: --lr-warmup-steps 4"),
    "another clipping": ("--max-norm 2 --load-state {home}/zero1", "Try: --max-norm 0.5"),
    "another model": ("--num-layers 1 --load-state {home}/zero1", "n_layer is 2, and that of"),
    "other ranks, but not adamw": ("--optimizer sgd --load-state {home}/of-2-sgd", "one of sgd, not adamw"),
    "other ranks, but no moments": ("--load-state {home}/of-2-new", "Try: torchrun --nproc-per-node 2 -m replay"),
    "no optimizer to load": ("--optimizer none --load-state {home}/zero1", "Try: --save-model and --model"),
    "no optimizer to save": ("--optimizer none --save-state {home}/new", "--save-state needs an optimizer"),
    "two sources of weights": ("--random-weights --load-state {home}/zero1", "exclude each other"),
    "a folder that is not empty": ("--save-state {home}/zero1", "Try: --save-state {home}/zero1-2"),
    "a file": ("--save-model {home}/file", "is a file. Try: --save-model {home}/file-2"),
    "below a file": ("--save-model {home}/file/model", "Give a folder where you may write"),
    "both in one folder": ("--save-model {home}/new --save-state {home}/new", "Try: --save-model {home}/new-model"),
    "nothing left": ("--skip-inputs 2", "--skip-inputs 2 leaves no train pass on a data rank. Try: a smaller number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_before_anything_is_built(
    name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, expected = (text.format(home=saved) for text in REFUSED[name])
    before = list_files(saved)
    training = TRAINING.replace("--step", "") if "--optimizer none" in arguments else TRAINING
    options = {word for word in arguments.split() if word.startswith("--")}
    words = training.split()
    for option in options & set(words):
        del words[words.index(option) : words.index(option) + 2]
    assert replay(tmp_path, f"{' '.join(words)} --inputs {saved}/inputs {arguments}") == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert expected in lines[0]
    assert list_files(saved) == before
    assert not list(tmp_path.iterdir())
