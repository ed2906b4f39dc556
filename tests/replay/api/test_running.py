"""A replay from Python is the replay of the command line, in processes of its own."""

import ast
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np
import pytest
from torch import tensor

import replay
from replay.api.running import build_spec
from replay.campaign.result import CampaignResult
from replay.command_line.cli import main, parse_command_line
from replay.options.spec import StepMode
from tests.helpers.children import start_each_task
from tests.helpers.machine import lack_package
from tests.helpers.schemas import assert_valid
from tests.warm import warm_bin

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "inputs" / "sample"


@pytest.mark.parametrize(
    ("options", "typed"),
    [
        ({}, ""),
        ({"max_inputs": 4, "tp": 2, "backend": "fsdp2"}, "--max-inputs 4 --tp 2 --backend fsdp2"),
        ({"compile": True, "packing": False}, "--compile --no-packing"),
        ({"compile": False, "deepcompile": False}, ""),
        ({"step": True}, "--step"),
        ({"step": False}, "--no-step"),
        ({"step": "auto", "max_inputs": None}, "--step auto"),
        ({"learning_rate": 1, "inputs": Path("inputs/x")}, "--lr 1.0 --inputs inputs/x"),
        ({"model": Path("runs/x"), "log_folder": "elsewhere"}, "--model runs/x -o elsewhere"),
        ({"max_inputs": 4.0}, "--max-inputs 4"),
        ({"max_inputs": np.int64(4), "learning_rate": np.float32(0.5)}, "--max-inputs 4 --lr 0.5"),
        ({"packing": np.bool_(False), "step": np.bool_(True), "tp": tensor(2)}, "--no-packing --step --tp 2"),
    ],
)
def test_options_are_those_of_the_command_line(options: dict[str, Any], typed: str) -> None:
    assert build_spec(options) == parse_command_line(typed.split()).args[0].spec


def test_of_step_every_spelling_is_known() -> None:
    assert [build_spec({"step": value}).measure.step for value in (True, False, "auto")] == [
        StepMode.ON,
        StepMode.OFF,
        StepMode.AUTO,
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_input": 3}, "a replay has no option max_input. Did you mean max_inputs?"),
        ({"quiet": True}, "a replay has no option quiet"),
        ({"max_inputs": 2.5}, "max_inputs 2.5 is not allowed. Give a whole number of at least 1"),
        ({"max_inputs": np.float32(2.5)}, "max_inputs 2.5 is not allowed. Give a whole number of at least 1"),
        ({"max_inputs": np.array([2])}, "max_inputs array([2]) is not allowed. Give a whole number of at least 1"),
        ({"max_inputs": math.inf}, "max_inputs inf is not allowed. Give a whole number of at least 1"),
        ({"max_inputs": True}, "max_inputs True is not allowed. Give a whole number of at least 1"),
        ({"max_inputs": 0}, "max_inputs=0 is not allowed. Give a whole number of at least 1"),
        ({"packing": "no"}, "packing 'no' is not allowed. Give True or False"),
        ({"backend": "zero"}, "backend 'zero' is not allowed. Give one of deepspeed, fsdp2, ddp"),
        ({"model": 3}, "model 3 is not allowed. Give a name"),
        ({"dtype": b"bf16"}, "dtype b'bf16' is not allowed. Give one of auto, bf16, fp32, fp16"),
        ({"step": True, "backward": False}, "step='on' needs the gradients that backward=False leaves out"),
    ],
)
def test_a_wrong_option_is_refused_in_python_s_words(options: dict[str, Any], says: str) -> None:
    with pytest.raises(replay.UsageError) as refusal:
        build_spec(options)
    assert str(refusal.value).startswith(says)


@pytest.mark.parametrize("processes", [0, 3])
def test_processes_are_a_multiple_of_the_ranks_that_share_a_pass(processes: int, tmp_path: Path) -> None:
    with pytest.raises(replay.UsageError, match=f"processes={processes} is not allowed. Give a multiple of tp x ring"):
        replay.run(processes=processes, tp=2, backend="fsdp2", log_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_of_several_processes_may_not_start_a_replay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    lack_package("torch", monkeypatch)
    with pytest.raises(replay.UsageError, match="this one is rank 1 of 2 of a launcher's processes"):
        replay.run(log_folder=tmp_path)


@pytest.mark.slow
def test_an_open_process_group_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import replay, torch.distributed\n"
        "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
        "torch.distributed.init_process_group('fake', store=FakeStore(), rank=1, world_size=4)\n"
        "try:\n    replay.run()\nexcept replay.UsageError as error:\n    print(error)\n"
    )
    done = subprocess.run([warm_bin() / "python", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "this one is rank 1 of 4 of an open process group" in done.stdout


def test_importing_it_imports_no_torch() -> None:
    code = (
        "import sys, replay; assert dir(replay); print(sorted({'torch', 'typer', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_name_it_lists_is_there() -> None:
    assert set(replay.__all__) == set(replay._EXPORTS)
    for name in replay.__all__:
        assert callable(getattr(replay, name)), name
    with pytest.raises(AttributeError, match="no attribute 'replays'"):
        replay.replays  # noqa: B018


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> replay.ReplayedRun:
    return replay.run(SAMPLE, max_inputs=2, trace=True, log_folder=tmp_path_factory.mktemp("logs"))


def test_a_run_is_that_of_the_command_line(
    run: replay.ReplayedRun, one_world: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but times and the place of the log is the same."""
    assert main(["--inputs", str(SAMPLE), "--max-inputs", "2", "--trace", "--json", "-o", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    [printed] = [json.loads(line) for line in out.splitlines() if line.startswith('{"folder"')]
    whole = run.to_dict()
    assert_valid("replay", printed)
    assert printed.keys() == whole.keys()
    assert [drop_times(line) for line in printed["passes"]] == [drop_times(line) for line in whole["passes"]]
    assert printed["run"]["verdict"]["counts"] == whole["run"]["verdict"]["counts"]
    assert run.verdict.reproduced
    assert run.exit_code == 0
    assert replay.open(run.folder).to_dict() == whole


def drop_times(line: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what a second replay gives again."""
    names = ("source", "rank", "rows", "real_tokens", "input_digest", "loss", "row_log_probs", "grad_norm", "error")
    return {name: line[name] for name in names}


def test_a_run_does_nothing_to_the_process_that_asked_for_it(run: replay.ReplayedRun) -> None:
    """It leaves signal handlers, and holds no process group, and nothing beside its log lies in the folder."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    home = run.folder.parent
    assert sorted(path.name for path in home.iterdir() if path != run.folder) == ["job.json", "output.txt"]
    assert replay.open(home).folder == run.folder


def test_each_token_stands_beside_what_the_job_recorded_of_it(run: replay.ReplayedRun) -> None:
    """The job computed log-probs of all action tokens. Both passes have the weights that it began with."""
    tokens = run.tokens()
    capture = next(replay.captures(SAMPLE, passes="train"))
    mask_BA = capture.tensors["action_mask"]
    offset = capture.tensors["sequences"].shape[1] - mask_BA.shape[1]
    of_first = tokens.query("number == 1")
    places = [[row, column - offset] for row, column in zip(of_first.row, of_first.column, strict=True)]
    assert places == mask_BA.nonzero().tolist()
    assert len(tokens) == sum(sum(record.result.row_action_tokens) for record in run.records)
    assert tokens.recorded.notna().all()
    assert tokens.difference.max() < 1e-5
    worst = run.tokens(worst=3)
    assert list(worst.difference) == sorted(tokens.difference, reverse=True)[:3]


def test_what_only_the_replay_can_refuse_is_refused_in_python_s_words(tmp_path: Path) -> None:
    with pytest.raises(replay.UsageError) as refusal:
        replay.run(SAMPLE, num_layers=99, log_folder=tmp_path)
    assert str(refusal.value).startswith("num_layers=99")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_ranks_come_back_as_one_run(tmp_path: Path) -> None:
    run = replay.run(SAMPLE, backend="fsdp2", tp=2, max_inputs=1, log_folder=tmp_path)
    assert run.ranks == [0, 1]
    assert run.start.world_size == 2
    # One of the four passes of a step: its forward alone can be judged.
    assert run.verdict.coverage.num_forward_judged == 1, run.verdict.explain()


class StartedRanks:
    """Stand for processes that were started, and have not ended."""

    exit_code = None

    def __init__(self) -> None:
        self.signals: list[int] = []

    def wait(self) -> None:
        raise AssertionError("the interruption came first")

    def end(self, *, grace: float, first_signal: int = signal.SIGTERM) -> None:
        self.signals.append(first_signal)


def test_an_interruption_while_the_processes_start_ends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = StartedRanks()

    def start(task: object) -> SimpleNamespace:
        os.kill(os.getpid(), signal.SIGINT)
        # The handler of a signal runs between two instructions of the main thread.
        for _ in range(1000):
            pass
        return SimpleNamespace(ranks=ranks)

    start_each_task(start, monkeypatch)
    with pytest.raises(KeyboardInterrupt) as interruption:
        replay.run(SAMPLE, max_inputs=1, log_folder=tmp_path)
    assert ranks.signals[0] == signal.SIGINT
    assert "What ran is in" in interruption.value.__notes__[0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


INTERRUPTED_SCRIPT = """
import sys, replay
try:
    replay.run({inputs!r}, epochs=1000, log_folder={logs!r}, warmup=0)
except KeyboardInterrupt as interruption:
    print(interruption.__notes__[0])
    print("the kernel lives")
"""


@pytest.mark.slow
def test_an_interrupted_call_ends_its_ranks_and_the_log_says_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED_SCRIPT.format(inputs=str(SAMPLE), logs=str(tmp_path / "logs")))
    process = subprocess.Popen([warm_bin() / "python", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        while not any(path.stat().st_size for path in tmp_path.glob("logs/*/*/rank0.jsonl")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=1800)
    finally:
        process.kill()
    assert out.splitlines()[-1] == "the kernel lives"
    [home] = (tmp_path / "logs").iterdir()
    assert f"What ran is in {home}" in out
    run = replay.open(home)
    assert isinstance(run, replay.ReplayedRun)
    assert run.file.status == "interrupted"
    assert run.records


def test_the_command_line_has_no_other_way_to_a_result() -> None:
    """It imports the API alone of what runs, judges or reads logs; the commands are functions with results."""
    rooms = ("api.here", "command_line", "commands", "on_ray", "options", "output", "processes", "runner.run.explain")
    allowed = tuple(f"replay.{room}" for room in rooms)
    imported = [
        f"{node.module}.{alias.name}"
        for path in sorted((ROOT / "replay" / "command_line").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    ]
    assert [name for name in imported if name.startswith("replay.") and not name.startswith(allowed)] == []


@pytest.mark.parametrize("name", ["diagnose", "mismatch"])
def test_a_command_that_runs_in_one_world_has_no_other_way_either(name: str) -> None:
    """It has the function that returns the API's result, and an action that prints it and exits with its code."""
    tree = ast.parse((ROOT / "replay" / "commands" / name / "command.py").read_text(encoding="utf-8"))
    imported = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    ]
    rooms = ("replay.on_ray.ranks.", "replay.options.", "replay.processes.")
    ways = [name for name in imported if name.startswith("replay.") and not name.startswith(rooms)]
    assert ways == ["replay.campaign.campaign_options.CampaignAction", f"replay.commands.{name}.report.{name}"]
    report = import_module(f"replay.commands.{name}.report")
    result = get_type_hints(getattr(report, name))["return"]
    assert issubclass(result, CampaignResult)
    assert get_type_hints(getattr(import_module(f"replay.api.{name}"), name), vars(report))["return"] is result
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not {"print", "print_json", "write_text", "json.dumps"} & {*calls}


LOOP_SCRIPT = """
import asyncio, replay

async def main():
    return replay.run({inputs!r}, max_inputs=1, log_folder={logs!r})

run = asyncio.run(main())
print(run.verdict.coverage.num_passes)
"""


@pytest.mark.slow
def test_a_running_event_loop_is_no_obstacle(tmp_path: Path) -> None:
    """As in a notebook. The script has no guard of `__name__`: a replay does not run it again."""
    script = tmp_path / "script.py"
    script.write_text(LOOP_SCRIPT.format(inputs=str(SAMPLE), logs=str(tmp_path / "logs")))
    done = subprocess.run([warm_bin() / "python", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert len(list((tmp_path / "logs").iterdir())) == 1
