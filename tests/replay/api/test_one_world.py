"""`replay.diagnose` and `replay.mismatch`: what they ask of their processes, and what they make of what these left."""

import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Self

import pytest
import torch

import replay
from actor_init.as_json import json_bytes
from actor_init.spec import ActorSpec, Attention, Dtype, UsageError
from replay.api.logs import RESULT_TYPES
from replay.campaign.result import GrowingResult, ResultStatus
from replay.command_line.cli import main, parse_command_line
from replay.commands.diagnose.report import Diagnosis, choose_check, diagnose_in_world
from replay.commands.mismatch.report import MismatchCell, MismatchReport, ReplayDistance, mismatch_in_world
from replay.commands.mismatch.statistics import Mismatch, WorstToken
from replay.options.spec import ReplaySpec
from replay.output.text import CheckResult, CheckStatus
from replay.processes.child_job import REFUSAL, ChildJob
from replay.processes.pool import OUTPUT, ProcessResult, Task
from tests.helpers.children import start_each_task
from tests.helpers.commands import ROOT
from tests.helpers.schemas import assert_valid
from tests.helpers.thread_ranks import call_on_ranks
from tests.helpers.typed import spec_of

SAMPLE = ROOT / "inputs" / "sample"
PASSED = CheckResult(name="same pass twice", status=CheckStatus.OK, found="loss by 0")
FAILED = CheckResult(name="accumulated", status=CheckStatus.FAILED, found="by 3", advice="Try: less", needed=True)
DIAGNOSIS = Diagnosis(
    status=ResultStatus.RUNNING,
    command="replay diagnose --steps 3",
    spec=ReplaySpec(),
    versions={"torch": "2.11.0", "deepspeed": None},
    world_size=1,
    model="llama",
    inputs="2 inputs",
    actor="ddp",
)
WHOLE = replace(DIAGNOSIS, status=ResultStatus.FINISHED)
WORST = WorstToken(
    source="a.pkl",
    row=0,
    column=3,
    token=7,
    rollout=-math.inf,
    replays=[math.nan, -2.0],
    before=(5, None),
    after=(-1, 0.5),
)
NUMBERS = dict.fromkeys(("mean", "p99", "largest", "shift", "kl_k1", "kl_k3", "ess_tokens", "ess_sequences"), 0.25)
MISMATCH = MismatchReport(
    status=ResultStatus.FINISHED,
    command="replay mismatch --worst 1",
    spec=ReplaySpec(),
    versions={"torch": "2.11.0"},
    replays=[
        MismatchCell(
            name="bf16, sdpa",
            dtype="bf16",
            attention="sdpa",
            mismatch=Mismatch(num_tokens=9, num_sequences=2, **NUMBERS | {"largest": math.inf}),
        )
    ],
    distances=[ReplayDistance(one="bf16, sdpa", other="fp32, sdpa", mean=math.nan, largest=0.5)],
    worst=[WORST],
)
Leave = Callable[..., list[Task]]


@dataclass
class EndedTask:
    """Stand for a task whose processes have ended, and for these."""

    exit_code: int
    task: Task

    @property
    def ranks(self) -> Self:
        return self

    def wait(self) -> None: ...

    def end(self, *, grace: float) -> None: ...

    def finish(self) -> ProcessResult:
        return ProcessResult(exit_code=self.exit_code, seconds=1.0, output=self.task.output, logs=self.task.logs)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Leave:
    """Let processes leave files, and end with an exit code. Returns the list of what was asked of them."""
    monkeypatch.chdir(tmp_path)

    def leave(files: Mapping[str, bytes], exit_code: int = 0) -> list[Task]:
        tasks: list[Task] = []

        def start(task: Task) -> EndedTask:
            tasks.append(task)
            for file, content in {OUTPUT: b"replay: rank 1: no such kernel\n", **files}.items():
                (task.logs / file).parent.mkdir(parents=True, exist_ok=True)
                (task.logs / file).write_bytes(content)
            return EndedTask(exit_code, task)

        start_each_task(start, monkeypatch)
        return tasks

    return leave


def test_a_diagnosis_comes_back_from_its_file(processes: Leave, tmp_path: Path) -> None:
    whole = WHOLE.add(PASSED).add(FAILED)
    processes({"1-diagnose/diagnose.json": json_bytes(whole)}, exit_code=1)
    result = replay.diagnose(SAMPLE)
    assert (list(result.checks), list(result.failing)) == ([PASSED, FAILED], ["accumulated"])
    assert (result.exit_code, result.command) == (1, "replay diagnose --steps 3")
    assert result.result == json.loads(json_bytes(whole))
    assert list(result.to_frame().status) == ["ok", "failed"]
    assert_valid("diagnose", result.to_dict())
    assert replay.open(result.folder) == result


def test_distances_come_back_from_their_file_and_may_be_no_numbers(processes: Leave) -> None:
    processes({"1-mismatch/mismatch.json": json_bytes(MISMATCH)})
    result = replay.mismatch(SAMPLE)
    assert (result.exit_code, result.command) == (0, "replay mismatch --worst 1")
    assert result.result == json.loads(json_bytes(MISMATCH))
    assert (result.worst[0].rollout, result.replays[0].mismatch.largest) == (-math.inf, math.inf)
    assert math.isnan(result.distances[0].mean)
    assert result.to_frame().to_dict("records") == [
        {"name": "bf16, sdpa", "dtype": "bf16", "attention": "sdpa", "num_tokens": 9, "num_sequences": 2}
        | NUMBERS
        | {"largest": math.inf}
    ]
    assert_valid("mismatch", result.to_dict())
    assert replay.open(result.folder).to_dict() == result.to_dict()


@pytest.mark.parametrize("function", [replay.diagnose, replay.mismatch])
def test_what_the_processes_refuse_is_refused_in_python_s_words(
    function: Callable[..., Any], processes: Leave, tmp_path: Path
) -> None:
    processes({REFUSAL: "⟨num_layers=99⟩, but the model has 4. Try: ⟨tp=2⟩".encode()}, exit_code=2)
    with pytest.raises(replay.UsageError) as refusal:
        function(SAMPLE, num_layers=99)
    assert str(refusal.value) == "num_layers=99, but the model has 4. Try: tp=2"
    assert list((tmp_path / "logs").iterdir()) == []


@pytest.mark.parametrize(
    ("function", "files"),
    [
        (replay.diagnose, {}),
        (replay.diagnose, {"1-diagnose/diagnose.json": json_bytes(DIAGNOSIS.add(PASSED))}),
        (replay.mismatch, {}),
    ],
)
def test_processes_that_end_too_early_are_an_error_that_says_where_they_printed(
    function: Callable[..., Any], files: Mapping[str, bytes], processes: Leave, tmp_path: Path
) -> None:
    tasks = processes(files, exit_code=1)
    with pytest.raises(
        replay.RunFailedError, match=r"ended without a result: no such kernel\. What it printed"
    ) as failure:
        function(SAMPLE)
    [folder] = (tmp_path / "logs").iterdir()
    assert [task.logs for task in tasks] == [folder]
    assert (failure.value.exit_code, failure.value.output) == (1, folder / OUTPUT)
    if files:
        left = replay.open(folder / "1-diagnose").to_dict()
        assert (left["exit_code"], left["result"]["status"]) == (1, "running")


@pytest.mark.parametrize(
    ("function", "options", "num_processes", "typed"),
    [
        (replay.diagnose, {}, 1, "--steps 120"),
        (replay.diagnose, {"steps": 3, "learning_rate": 0.5, "tp": 2}, 2, "--steps 3 --learning-rate 0.5 --tp 2"),
        (replay.mismatch, {"processes": 4}, 4, "--dtype bf16,fp32 --attention auto --worst 10"),
        (
            replay.mismatch,
            {"dtypes": ["fp32", "bf16"], "attention_kernels": "eager", "worst": 0, "packing": False},
            1,
            "--dtype fp32,bf16 --attention eager --worst 0 --no-packing",
        ),
    ],
)
def test_the_processes_get_what_the_command_line_says_with_the_same_options(
    function: Callable[..., Any],
    options: dict[str, Any],
    num_processes: int,
    typed: str,
    processes: Leave,
    tmp_path: Path,
) -> None:
    tasks = processes({}, exit_code=1)
    with pytest.raises(replay.RunFailedError):
        function(SAMPLE, **options)
    [task] = tasks
    assert task.num_processes == num_processes
    job = ChildJob(spec=task.job.spec).with_log_folder(tmp_path).write()
    child = parse_command_line([*task.words, "--job", str(job)])
    assert child.args[1] == tmp_path, "where it leaves a refusal"
    shown = [function.__name__, *typed.split(), "--inputs", str(SAMPLE), "--log-folder", str(tmp_path)]
    assert read_action(child.args[0]) == read_action(parse_command_line(shown))


def read_action(action: Any) -> tuple[Any, ...]:
    """Return what an action runs and with what, but the words of its command line."""
    spec, *others = action.args
    if isinstance(others[0] if others else None, list):
        return (action.func, spec, *others, action.keywords["as_json"])
    inner, ray = others
    return (inner.func, spec.spec, ray, inner.keywords["checking"], inner.keywords["as_json"])


@pytest.mark.parametrize(("name", "result"), [("diagnose", WHOLE.add(PASSED).add(FAILED)), ("mismatch", MISMATCH)])
@pytest.mark.parametrize("rank", [0, 1])
def test_of_json_the_result_stands_alone_on_the_first_rank(
    name: str,
    result: Any,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / f"{name}.json").write_bytes(json_bytes(result))
    made: Any = replay.open(tmp_path)

    def run(spec: ReplaySpec, *arguments: Any, **options: Any) -> Any:
        screen = next(argument for argument in arguments if hasattr(argument, "write"))
        print("a table", file=screen)
        return made

    monkeypatch.setattr(f"replay.commands.{name}.report.{name}", run)
    # The sample has no log-probs of a rollout, which would be refused before.
    monkeypatch.setattr("replay.processes.launch.find_lack", lambda *_: None)
    monkeypatch.setenv("RANK", str(rank))
    assert main([name, str(SAMPLE), "--json"]) == made.exit_code
    out = capsys.readouterr().out
    assert [json.loads(line) for line in out.splitlines()] == ([made.to_dict()] if rank == 0 else [])
    assert main([name, str(SAMPLE)]) == made.exit_code
    assert capsys.readouterr().out == "a table\n"


def test_a_check_fails_if_it_fails_on_any_rank() -> None:
    other = CheckResult(name="accumulated", status=CheckStatus.OK, found="by 0")
    assert choose_check([other, other]) == other
    assert choose_check([FAILED, FAILED]) == FAILED
    assert choose_check([other, FAILED]).found == "on rank 1: by 3"
    # Of several the first is named, and unless it fails on all of them its rank is.
    worse = replace(FAILED, found="by 5")
    assert choose_check([other, FAILED, worse]).found == "on rank 1: by 3"
    assert choose_check([worse, other, FAILED]).found == "on rank 0: by 5"
    assert choose_check([worse, FAILED]) == worse


def test_what_opens_folders_knows_each_command_that_writes_its_result_as_it_goes() -> None:
    growing = {
        import_module(result.__module__).FILE: f"{result.__module__}:{result.__name__}"
        for result in GrowingResult.__subclasses__()
    }
    assert growing
    assert growing.items() <= RESULT_TYPES.items()
    for name in RESULT_TYPES.values():
        assert resolve_name(name).read


def diagnose_on(world: Any, run: ReplaySpec) -> Any:
    return diagnose_in_world(world, run, io.StringIO(), num_steps=1)


def mismatch_on(world: Any, run: ReplaySpec) -> Any:
    return mismatch_in_world(world, run, [Dtype.BF16], [Attention.SDPA], 1, io.StringIO())


@pytest.mark.parametrize("call", [diagnose_on, mismatch_on])
def test_a_kernel_that_one_rank_lacks_is_refused_on_all_before_a_folder_is_made(
    call: Callable[[Any, ReplaySpec], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank that found out alone, as it opens its actor, would leave the others waiting for it."""

    def choose_kernel_name_here(spec: ActorSpec, where: torch.device, config: Any) -> str:
        if where.index == 1:
            raise UsageError("flash-attn is not installed")
        return "sdpa"

    def call_on(world: Any) -> Any:
        world.data_rank, world.num_data_ranks = world.rank, world.world_size
        return call(world, run)

    run = spec_of(["--inputs", str(SAMPLE), "--backend", "ddp", "--log-folder", str(tmp_path / "logs")])
    monkeypatch.setattr("actor_init.attention.kernel_choice.choose_kernel_name", choose_kernel_name_here)
    results = call_on_ranks(call_on, [torch.device("cpu", 0), torch.device("cpu", 1)])
    assert [(type(result), str(result)) for result in results] == [
        (UsageError, "on rank 1: flash-attn is not installed")
    ] * 2
    assert not (tmp_path / "logs").exists()
