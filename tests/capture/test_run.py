"""`capture run`: the script notices nothing, and the model that it trains is found and recorded."""

import argparse
import json
import multiprocessing.popen_spawn_posix
import multiprocessing.spawn
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from capture import capture_files, read_micro_batch, recording
from capture.child_processes import leave_mark, record_children
from capture.cli import build_parser, list_commands, list_declared, main
from capture.module_search import ModuleSearch, TrainedLanguageModel, has_class_name
from capture.record.recorder import Recorder
from capture.run import ModelSearch, RecordingOrder
from replay.processes.launch import without_launcher
from tests.helpers.causal_lms import IDS_BS, Outer, Tiny, lm
from tests.warm import warm_bin

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = list_commands(build_parser())
original_call = nn.Module.__call__

MODEL = """
import sys
import torch
from torch import nn

class Config:
    model_type = "tiny"
    def to_dict(self):
        return {"model_type": "tiny"}

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Config()
        self.embedding = nn.Embedding(16, 4)
    def forward(self, input_ids):
        return self.embedding(input_ids)

class Reward(Tiny):
    def get_output_embeddings(self):
        return None

ids = torch.ones(2, 4, dtype=torch.long)
"""


@pytest.fixture(autouse=True)
def _every_search_ends() -> Iterator[None]:
    yield
    assert nn.Module.__call__ is original_call


def capture_run(
    folder: Path, script: str, *typed: str, cold: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `capture run TYPED` in the folder of a script `job.py`."""
    (folder / "job.py").write_text(MODEL + textwrap.dedent(script))
    # A test before this one may have left a rank's variables.
    environment = {**without_launcher(os.environ), "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable if cold else str(warm_bin() / "python"), "-m", "capture", "run", *typed]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)


@pytest.mark.slow
def test_the_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    script = """
        import json, os
        print(json.dumps([__name__, sys.argv, sys.path[0], sys.modules["__main__"].__file__]))
        os.chdir("..")
        Tiny()(ids)
    """
    for typed, path in (
        (["job.py", "--lr", "1", "--to", "x", "-m"], tmp_path),
        (["-m", "job", "--lr", "1"], tmp_path),
    ):
        done = capture_run(tmp_path, script, "--to", "kept", *typed, cold=True)
        assert done.returncode == 0, done.stderr
        plain = subprocess.run([sys.executable, *typed], cwd=path, capture_output=True, text=True, timeout=1800)
        assert done.stdout == plain.stdout
        assert "capture: 1 pass of Tiny" in done.stderr
        assert plain.stderr == ""
    assert len(capture_files(tmp_path / "kept")) == 2


@pytest.mark.parametrize(
    ("ending", "code", "says"),
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no more')", 1, "no more"),
        ("raise OSError('the job broke')", 1, "OSError: the job broke"),
        ("raise ValueError('the job broke')", 1, 'job.py", line'),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
    ],
)
def test_the_end_of_the_script_is_the_end_of_the_run(ending: str, code: int, says: str, tmp_path: Path) -> None:
    done = capture_run(tmp_path, f"Tiny()(ids)\n{ending}", "--to", "kept", "job.py")
    assert done.returncode == code
    assert says in done.stderr
    assert "capture: 1 pass of Tiny" in done.stderr
    assert len(capture_files(tmp_path / "kept")) == 1


def test_the_last_line_counts_the_training_passes_that_no_replay_could_make(tmp_path: Path) -> None:
    script = """
        class Cached(Tiny):
            def forward(self, input_ids, past_key_values=None):
                return self.embedding(input_ids)
        model = Cached()
        model(ids)
        model(ids, past_key_values=((ids, ids),))
        model(ids, past_key_values=((ids, ids),))
        with torch.no_grad():
            model(ids, past_key_values=((ids, ids),))
    """
    done = capture_run(tmp_path, script, "--to", "kept", "job.py")
    generated, trained = "1 of generation with a cache skipped", "2 training passes not recorded"
    assert f"capture: 1 pass of Cached, {generated}, {trained} (given a cache of earlier tokens), in" in done.stderr


def test_what_the_script_raises_is_an_incident_that_passes_are_written_for(tmp_path: Path) -> None:
    script = "model = Tiny()\nfor _ in range(5):\n    model(ids)\n"
    few = ["--flight-recorder", "2", "job.py"]
    done = capture_run(tmp_path, script, "--to", "quiet", *few)
    assert "capture: 0 passes of Tiny, 5 left out by what to keep, in" in done.stderr
    done = capture_run(
        tmp_path, script + "raise ValueError('broke')", "--to", "loud", "--flight-recorder", "2", "job.py"
    )
    assert "capture: 2 passes of Tiny, 3 left out by what to keep, in" in done.stderr
    assert len(capture_files(tmp_path / "loud")) == 2


WRONG_PATHS = {
    "run nowhere.py": "nowhere.py: no such script. Try: capture run train.py, or capture run -m package.module",
    "check nowhere": "nowhere: no such folder. Give one that a recording was written to",
    "salvage a.file": "a.file: no such folder. Give one that a recording was written to",
    "convert nowhere new": "nowhere: no such file or folder. Give a dump, or a folder of dumps",
    "convert a.file .": ". is not an empty folder. Give the name of a new one",
    "redact nowhere new": "nowhere: no such folder. Give one that a recording was written to",
    "redact . a.file": "a.file is not an empty folder. Give the name of a new one",
    "pack nowhere new.zip": "nowhere: no such folder. Give one that a recording was written to",
    "pack . a.file": "a.file exists already. Give another name, or delete it",
    "collect /nodes --to a.file": "FOLDER/a.file is no folder. Give --to a folder where you may write",
    "collect nodes --to new": "nodes is no absolute path, and workers of a Ray job have working folders of their own. "
    "Try: capture collect FOLDER/nodes --to FOLDER/new",
}


def test_what_is_typed_wrong_is_refused_without_torch(tmp_path: Path) -> None:
    (tmp_path / "a.file").touch()
    probe = (
        "import sys; from capture.cli import main; "
        f"print([main(typed.split()) for typed in {list(WRONG_PATHS)}], 'torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", probe]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{[2] * len(WRONG_PATHS)} False\n"
    refusals = [line.removeprefix("capture: ").replace(str(tmp_path), "FOLDER") for line in done.stderr.splitlines()]
    assert refusals == list(WRONG_PATHS.values())


@pytest.mark.parametrize("typed", [[], *([name] for name in COMMANDS)], ids=lambda typed: " ".join(typed))
def test_help_is_short_and_says_what_each_value_is(
    typed: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    texts = []
    for option in ("-h", "--help"):
        with pytest.raises(SystemExit) as ended:
            main([*typed, option])
        assert ended.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith(" ".join(["usage: capture", *typed, "[-h]"]))
    lines = texts[0].splitlines()
    assert len(lines) <= 60
    # Each option has its text beside it.
    assert [line for line in lines if re.fullmatch(r"  -.*\S", line) and "  " not in line.strip()] == []
    for action in list_declared(COMMANDS[typed[0]]) if typed else ():
        assert action.nargs == 0 or action.metavar is not None or action.help == argparse.SUPPRESS, action.dest


def test_help_all_has_the_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help-all"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert re.findall(r"^usage: capture (\w+)", text, re.MULTILINE) == list(COMMANDS)
    assert "--from slime|" in text


@pytest.mark.parametrize("typed", [["job.py"], ["-m", "job"]])
def test_a_script_that_raises_shows_its_own_traceback_first(typed: list[str], tmp_path: Path) -> None:
    script = "def inner():\n    raise ValueError('broke')\nTiny()(ids)\ninner()"
    done = capture_run(tmp_path, script, "--to", "kept", *typed)
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line.partition(" in ")[2] for line in lines if line.startswith("  File ")] == ["<module>", "inner"]
    assert lines.index("ValueError: broke") == len(lines) - 2
    assert lines[-1].startswith("capture: 1 pass of Tiny, in ")


def test_a_script_that_is_no_python_is_shown_without_frames_of_ours(tmp_path: Path) -> None:
    done = capture_run(tmp_path, "x = (", "--to", "kept", "job.py")
    assert "Traceback" not in done.stderr
    assert "SyntaxError: '(' was never closed" in done.stderr


def test_torchrun_is_left_the_job_s_traceback(tmp_path: Path) -> None:
    script, file = "raise ValueError('broke')", tmp_path / "error.json"
    capture_run(tmp_path, script, "job.py", TORCHELASTIC_ERROR_FILE=str(file))
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ValueError: broke"
    assert message["extraInfo"]["py_callstack"].startswith("job.py FAILED, not capture, which only ran it\nTraceback")
    assert message["extraInfo"]["py_callstack"].endswith("ValueError: broke\n")


def test_a_job_ends_as_it_would_where_nothing_can_be_left_for_torchrun(tmp_path: Path) -> None:
    unwritable = str(tmp_path / "no folder" / "error.json")
    done = capture_run(tmp_path, "raise ValueError('broke')", "job.py", TORCHELASTIC_ERROR_FILE=unwritable)
    assert "ValueError: broke" in done.stderr.splitlines()


def test_what_a_job_has_left_for_torchrun_stays(tmp_path: Path) -> None:
    script, file = "raise ValueError('broke')", tmp_path / "error.json"
    file.write_text("the job's own")
    capture_run(tmp_path, script, "job.py", TORCHELASTIC_ERROR_FILE=str(file))
    assert file.read_text() == "the job's own"


@pytest.mark.parametrize(
    ("script", "typed", "says"),
    [
        ("nn.Linear(2, 2)(torch.ones(2, 2))", [], "no causal LM (a module with a model's config"),
        ("Reward()(ids)", [], "no causal LM (a module"),
        (
            "import atexit, os; atexit.register(os._exit, 5); raise ValueError",
            [],
            "ended with an error before it trained",
        ),
        ("Tiny().requires_grad_(False)(ids)", [], "no causal LM (a module"),
        ("with torch.no_grad(): Tiny()(ids)", [], "but without: Tiny. Try: capture run --module Tiny"),
        ("Tiny()(ids)", ["--module", "Huge"], "no module of class Huge was called"),
    ],
)
def test_without_a_model_the_script_runs_all_the_same(script: str, typed: list[str], says: str, tmp_path: Path) -> None:
    done = capture_run(tmp_path, script + "\nsys.exit(5)", *typed, "job.py")
    assert done.returncode == 5
    assert "capture: nothing recorded" in done.stderr
    assert says in done.stderr
    assert not (tmp_path / "inputs").exists()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ([], "run needs a script. Try: capture run train.py"),
        (["nowhere.py"], "nowhere.py: no such script. Try: capture run train.py"),
        (["--every", "0", "job.py"], "every must be an integer of 1 or more"),
        (["--passes", "some", "job.py"], "passes must be one of all, train, rollout"),
        (
            ["--arguments", "idx", "job.py"],
            "--arguments idx: give pairs of names, each name once. Try: --arguments idx=",
        ),
        (["--arguments", "a=labels,b=labels", "job.py"], "--arguments a=labels,b=labels: give pairs of names"),
    ],
)
def test_wrong_usage_runs_nothing(typed: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *typed]) == 2
    assert says in capsys.readouterr().err


def test_ranks_of_one_launcher_share_a_folder_and_deepspeeds_local_rank_is_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(MODEL + "Tiny()(ids)")
    command = [sys.executable, "-m", "capture", "--local_rank=1", "run", "job.py"]
    for rank in (0, 1):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "WORLD_SIZE": "2"}
        subprocess.run([*command, str(rank)], cwd=tmp_path, env=environment, check=True, timeout=1800)
    (folder,) = (tmp_path / "inputs").iterdir()
    assert folder.name.endswith("-job")
    assert len(capture_files(folder)) == 2


LAUNCHING = {
    "the script again": """
        import os, subprocess
        def train():
            Tiny()(ids)
        if "LOCAL_RANK" not in os.environ:
            again = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]
            rank = subprocess.Popen(again, env={**os.environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"})
            os.environ["WORLD_SIZE"] = "2"
            train()
            rank.wait()
            print(subprocess.run([sys.executable, "-c", "print('a helper')"], capture_output=True, text=True).stdout)
        else:
            train()
            print(sys.argv[1:], "of rank 1")
        """,
    "fork": """
        import os, pathlib, time, torch.multiprocessing
        def train(rank):
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
            Tiny()(ids)
            while rank == 0 and not any(pathlib.Path("kept").glob("*_rank1_*.pkl")):  # or it says that it has none
                time.sleep(0.01)
        if __name__ == "__main__":
            torch.multiprocessing.start_processes(train, nprocs=2, start_method="fork")
        """,
    "spawn": """
        import os, pathlib, time, torch.multiprocessing
        def train(rank):
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
            Tiny()(ids)
            while rank == 0 and not any(pathlib.Path("kept").glob("*_rank1_*.pkl")):
                time.sleep(0.01)
        if __name__ == "__main__":
            torch.multiprocessing.spawn(train, nprocs=2)
        """,
}


@pytest.mark.slow
@pytest.mark.parametrize("way", LAUNCHING)
def test_ranks_that_the_script_starts_itself_are_recorded(way: str, tmp_path: Path) -> None:
    typed = ["--to", "kept", "--reproduce", "job.py", "--lr", "1"]
    done = capture_run(tmp_path, LAUNCHING[way], *typed, cold=way == "spawn")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("capture: ") == 1
    assert "capture: 1 pass of Tiny, in" in done.stderr
    ranks = [read_micro_batch(path).origin.rank for path in capture_files(tmp_path / "kept")]
    assert ranks == [0, 1], done.stderr
    assert main(["check", str(tmp_path / "kept")]) == 0
    if way == "the script again":
        assert "['--lr', '1'] of rank 1" in done.stdout
        assert "a helper" in done.stdout


def test_ranks_of_which_nothing_is_there_are_said_at_the_end_and_by_check(tmp_path: Path) -> None:
    done = capture_run(tmp_path, "Tiny()(ids)", "--to", "kept", "job.py", RANK="0", WORLD_SIZE="4")
    assert "has nothing of ranks 1 to 3 of the job's 4" in done.stderr
    alone = capture_run(tmp_path, "Tiny()(ids)", "--to", "kept", "--ranks", "0", "job.py", RANK="0", WORLD_SIZE="4")
    assert "capture: 1 pass of Tiny, in" in alone.stderr
    assert "has nothing of" not in alone.stderr
    for command in (["capture", "check"], ["replay", "inspect"]):
        done = subprocess.run(
            [str(warm_bin() / "python"), "-m", *command, str(tmp_path / "kept")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, done.stderr
        assert "of ranks 1 to 3 of the job's 4" in done.stdout


def test_what_starts_processes_is_as_it_was_when_the_job_ends(tmp_path: Path) -> None:
    def list_starters() -> list[Any]:
        return [
            subprocess.Popen.__init__,
            multiprocessing.spawn.get_command_line,
            multiprocessing.popen_spawn_posix.Popen._launch,  # type: ignore[attr-defined]
        ]

    before = list_starters()
    with record_children(name="job.py", is_module=False, order={}):
        assert list_starters() != before
    assert list_starters() == before


OWN_MODEL = """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 4), nn.Linear(4, 16)
    def forward(self, idx, targets=None):
        logits = self.head(self.embedding(idx))
        return logits, None if targets is None else nn.functional.cross_entropy(logits.mT, targets)
model = Own()
model(ids, torch.zeros_like(ids))
"""


def test_a_model_with_names_of_its_own_is_recorded_by_those_of_arguments(tmp_path: Path) -> None:
    typed = ["--to", "kept", "--arguments", "idx=input_ids,targets=labels", "job.py"]
    done = capture_run(tmp_path, OWN_MODEL, *typed)
    assert "capture: 1 pass of Own, in" in done.stderr
    (path,) = capture_files(tmp_path / "kept")
    batch = read_micro_batch(path)
    assert (batch.sequences_BS == 1).all()
    assert batch.labels_BS is not None
    assert not batch.labels_BS.any()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ([], "Own was trained, and its forward has no argument input_ids; it was given idx (int64 [2, 4]), targets"),
        ([], "Try, if these are what it says: capture run --arguments idx=input_ids,targets=labels ..."),
        (["--arguments", "tokens=input_ids"], "no module that is trained was called with tokens (input_ids)"),
        (["--module", "Own"], "0 passes of Own, 1 dropped (actor_inputs"),
        (["--module", "Own"], "record with --arguments idx=input_ids"),
    ],
)
def test_what_would_be_kept_of_a_model_with_names_of_its_own_is_said(
    typed: list[str], says: str, tmp_path: Path
) -> None:
    done = capture_run(tmp_path, OWN_MODEL, *typed, "job.py")
    assert done.returncode == 0
    assert says in done.stderr


class Own(nn.Module):
    """Has arguments of other names than a causal LM's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 4)

    def forward(self, idx: Tensor, targets: Tensor | None = None, kinds: Tensor | None = None) -> Tensor:
        embedded: Tensor = self.embedding(idx)
        return embedded


ROWS_BS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.mark.parametrize(
    ("others", "suggestion"),
    [
        ({}, "idx=input_ids"),
        ({"targets": ROWS_BS}, "idx=input_ids,targets=labels"),
        # What stands at the last token is of no token of the row.
        ({"targets": torch.tensor([[2, 3, 4, 9], [6, 7, 8, 9]])}, "idx=input_ids,targets=shift_labels"),
        ({"targets": torch.tensor([[9, 1, 2, 3], [9, 5, 6, 7]])}, "idx=input_ids,targets=labels"),
        ({"targets": torch.tensor([[2, 3, 4, 9], [6, 7, 9, 9]])}, "idx=input_ids,targets=labels"),
        ({"targets": ROWS_BS[:, :2]}, "idx=input_ids"),
        ({"targets": ROWS_BS[:, :2], "kinds": ROWS_BS}, "idx=input_ids,kinds=labels"),
        ({"targets": ROWS_BS.float(), "kinds": ROWS_BS}, "idx=input_ids,kinds=labels"),
        ({"targets": ROWS_BS[0]}, "idx=input_ids"),
    ],
)
def test_which_arguments_of_other_names_may_be_ids_and_labels_is_told_by_their_shapes_and_values(
    others: dict[str, Tensor], suggestion: str
) -> None:
    language_model = TrainedLanguageModel()
    assert search_in(lambda: Own()(ROWS_BS, **others), language_model) == []
    assert language_model.unnamed_tokens is not None
    assert language_model.unnamed_tokens.suggestion == suggestion
    rows = {name: tensor for name, tensor in others.items() if tensor.ndim == 2 and not tensor.is_floating_point()}
    assert language_model.unnamed_tokens.arguments == {
        name: f"int64 {list(tensor.shape)}" for name, tensor in {"idx": ROWS_BS, **rows}.items()
    }


def test_a_module_is_no_model_of_other_names_unless_it_is_trained_on_rows_of_integers() -> None:
    def judge() -> None:
        with torch.no_grad():
            Own()(ROWS_BS)

    for job in (
        judge,
        lambda: Own().requires_grad_(False)(ROWS_BS),
        lambda: Own()(ROWS_BS[0]),
        lambda: nn.Embedding(16, 4)(ROWS_BS),
        lambda: nn.Sequential(nn.Embedding(16, 4))(ROWS_BS),
    ):
        language_model = TrainedLanguageModel()
        assert search_in(job, language_model) == []
        assert language_model.unnamed_tokens is None


# What a recorder has counted, and the last line.
COUNTED: dict[str, Any] = {
    "num_written": 1,
    "num_dropped": 0,
    "num_not_kept": 0,
    "num_skipped": 0,
    "num_unseen_steps": 0,
    "not_recorded": Counter[str](),
    "refusal": None,
}


@pytest.mark.parametrize(
    ("counted", "says"),
    [
        ({}, "1 pass of Own"),
        ({"num_written": 0}, "0 passes of Own"),
        ({"num_dropped": 2}, "1 pass of Own, 2 dropped"),
        ({"num_dropped": 2, "refusal": "no ids"}, "1 pass of Own, 2 dropped (no ids)"),
        ({"num_not_kept": 3}, "1 pass of Own, 3 left out by what to keep"),
        ({"num_skipped": 4}, "1 pass of Own, 4 of generation with a cache skipped"),
        ({"num_unseen_steps": 1}, "1 pass of Own, 1 step of the optimizer without a forward of it"),
        ({"num_unseen_steps": 2}, "1 pass of Own, 2 steps of the optimizer without a forward of it"),
        (
            {"num_skipped": 6, "not_recorded": Counter({"given a mask": 1, "given a cache": 2})},
            "1 pass of Own, 3 of generation with a cache skipped, 1 training pass not recorded (given a mask), "
            "2 training passes not recorded (given a cache)",
        ),
        (
            {"num_written": 7, "num_dropped": 1, "num_not_kept": 2, "num_skipped": 3},
            "7 passes of Own, 1 dropped, 2 left out by what to keep, 3 of generation with a cache skipped",
        ),
    ],
)
def test_the_last_line_says_what_became_of_each_pass(
    counted: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelSearch, "has_begun", False)
    order = RecordingOrder(
        folder=str(tmp_path), module_name=None, arguments={}, settings={}, marks=str(tmp_path / "marks")
    )
    search = ModelSearch(order, lambda recorder: None)
    search.end()
    search.recordings.append(("Own", cast(Recorder, SimpleNamespace(folder=tmp_path, **(COUNTED | counted)))))
    assert search.describe() == f"capture: {says}, in {tmp_path}"


@pytest.mark.parametrize(
    ("rank", "has_recorded", "has_children", "speaks"),
    [
        (0, True, False, True),
        (0, True, True, True),
        (1, True, False, False),
        (0, False, False, True),
        # The children say what they have recorded.
        (0, False, True, False),
        (1, False, False, False),
    ],
)
def test_one_process_of_a_job_says_the_last_line(
    rank: int,
    has_recorded: bool,
    has_children: bool,
    speaks: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_process_group: None,
) -> None:
    monkeypatch.setattr(ModelSearch, "has_begun", False)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    marks = tmp_path / "marks"
    order = RecordingOrder(folder=str(tmp_path), module_name=None, arguments={}, settings={}, marks=str(marks))
    search = ModelSearch(order, lambda recorder: None)
    search.end()
    if has_recorded:
        recorder = SimpleNamespace(folder=tmp_path, rank=rank, **COUNTED)
        search.recordings.append(("Own", cast(Recorder, recorder)))
    if has_children:
        leave_mark(marks)
    said = search.describe_job()
    assert (said is not None) == speaks
    assert said is None or ("1 pass of Own" in said) == has_recorded
    # The marks are taken away in any case.
    assert not marks.exists()


class Harness(nn.Module):
    """Is called with a batch in a dict, as some frameworks' modules are."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.module(batch["ids"])


def search_in(job: Callable[[], object], accepts: Any) -> list[nn.Module]:
    modules: list[nn.Module] = []
    search = ModuleSearch(accepts, modules.append)
    try:
        job()
    finally:
        search.end()
    return modules


def test_the_outermost_module_that_is_given_tokens_is_found_and_the_search_is_over() -> None:
    inner = lm()
    for module in (inner, Outer(Outer(inner))):
        is_restored: list[bool] = []

        def job(module: nn.Module = module, is_restored: list[bool] = is_restored) -> None:
            module(IDS_BS)
            is_restored.append(nn.Module.__call__ is original_call)

        assert search_in(job, TrainedLanguageModel()) == [module]
        assert is_restored == [True]
    assert search_in(lambda: Harness(inner)({"ids": IDS_BS}), TrainedLanguageModel()) == [inner]
    assert search_in(lambda: inner(inputs_embeds=torch.ones(1, 2, 4)), TrainedLanguageModel()) == [inner]


def test_models_that_only_judge_and_rollouts_are_passed_over() -> None:
    policy, reference, reward = lm(), lm(), Tiny()

    def job() -> None:
        reward(IDS_BS)
        with torch.no_grad():
            reference(IDS_BS)
            policy(IDS_BS)
        nn.Embedding(16, 4)(IDS_BS)
        lm().requires_grad_(False)(IDS_BS)
        policy(IDS_BS)
        reference(IDS_BS)

    assert search_in(job, TrainedLanguageModel()) == [policy]


@pytest.mark.parametrize("name", ["Tiny", "tests.helpers.causal_lms.Tiny"])
def test_a_module_is_found_by_the_name_of_its_class_trained_or_not(name: str) -> None:
    class Sharded(Tiny):
        """As FSDP2 makes one."""

    model = Sharded()

    def job() -> None:
        with torch.no_grad():
            Outer(model)(IDS_BS)

    assert search_in(job, lambda module, *_: has_class_name(module, name)) == [model]


def test_a_failure_of_a_search_is_one_warning_and_its_end() -> None:
    def fail(*_: Any) -> bool:
        raise RuntimeError("not today")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert search_in(lambda: Outer(lm())(IDS_BS), fail) == []
    assert [str(warning.message) for warning in caught] == ["capture stops, the job goes on: RuntimeError: not today"]


def test_a_call_that_its_forward_refuses_raises_what_it_would() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        search_in(lambda: lm()(IDS_BS, nonsense=IDS_BS), TrainedLanguageModel())


@pytest.mark.parametrize("is_reentrant", [True, False])
@pytest.mark.parametrize("outer", [Outer, lambda model: model], ids=["wrapped", "bare"])
def test_the_re_run_of_a_checkpoint_is_no_second_pass(
    outer: Callable[[nn.Module], nn.Module], is_reentrant: bool, tmp_path: Path
) -> None:
    # A re-entrant checkpoint needs an input with a gradient.
    embeds = torch.ones(1, 2, 4, requires_grad=True)
    model = outer(lm())
    num_runs: list[int] = []
    model.register_forward_pre_hook(lambda *_: num_runs.append(1))
    with recording(model, tmp_path) as recorder:
        for _ in range(2):
            loss = checkpoint(model, IDS_BS, use_reentrant=False).sum()
            loss = loss + checkpoint(model, None, embeds, use_reentrant=is_reentrant).sum()
            loss.backward()
    assert len(num_runs) == 8
    assert recorder.num_seen == 4
    assert (recorder.num_written, recorder.num_dropped) == (4, 0)
    assert read_micro_batch(capture_files(tmp_path)[0]).trains
