"""`replay suite`: every configuration takes the same steps, and what ends in which verdict."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import pytest

import replay
from actor_init.spec import Dtype, UsageError
from capture import capture_files
from replay.api.logs import PastCampaign
from replay.command_line.cli import main, parse_command_line
from replay.commands.suite.inputs import prepare_inputs
from replay.commands.suite.loss_curve import (
    LossCurve,
    NoCurve,
    TrainingStatus,
    TrainingStep,
    compare_curves,
    judge_trainings,
    read_curve,
)
from replay.commands.suite.plan import (
    CONFIGURATIONS,
    SuiteSpec,
    build_run_spec,
    count_inputs_per_step,
    find_skipped,
    plan_trainings,
)
from replay.commands.suite.runs import read_curve_file
from replay.options.spec import LossName
from replay.processes.pool import Machine, ProcessResult, Task
from replay.resolution.selection import select
from replay.runlog.reader import PastRun
from tests.helpers.children import end_each_task, run_quietly
from tests.helpers.made_captures import damage, write_config, write_passes, write_recordings
from tests.helpers.made_logs import passed, write_log
from tests.helpers.schemas import assert_valid

FALLING = [5.0, 4.75, 4.5, 4.25]
VARIABLES = ("NUM_GPUS", "MAX_SAMPLES", "MODEL", "DATASET", "OUTPUT_DIR", "LOG_DIR", "TP_SIZE", "RING_SIZE")
SKIPS = ("SKIP_DEEPSPEED", "SKIP_FSDP2", "SKIP_TP", "SKIP_RING")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES + SKIPS:
        monkeypatch.delenv(name, raising=False)


def curve(losses: Sequence[float], inputs: str = "ab") -> LossCurve:
    return LossCurve(
        steps=[
            TrainingStep(step=number, loss=loss, norm=1.0, seconds=number / 4, memory_bytes=number, inputs=list(inputs))
            for number, loss in enumerate(losses, start=1)
        ]
    )


def moved(*differences: float) -> LossCurve:
    return curve([loss + difference for loss, difference in zip(FALLING, differences, strict=True)])


def complaints(name: str, of: LossCurve, ddp: LossCurve | None = None, deepspeed: LossCurve | None = None) -> list[str]:
    return compare_curves(
        name, of, steps_an_epoch=2, ddp=ddp, deepspeed=deepspeed, is_standard=not name.endswith("autotp")
    ).complaints


# the plan


@pytest.mark.parametrize(("num_devices", "has_gpus"), [(1, False), (2, False), (3, True), (4, True), (8, True)])
def test_every_configuration_takes_the_same_steps_whatever_its_number_of_data_ranks(
    tmp_path: Path, num_devices: int, has_gpus: bool
) -> None:
    write_passes(tmp_path, {0: "tttt", 1: "ttttt"})
    spec = SuiteSpec(steps=5)
    plan = plan_trainings(spec, Machine(num_devices=num_devices, has_gpus=has_gpus))
    inputs_a_step = count_inputs_per_step(plan)
    steps: dict[str, list[list[Path]]] = {}
    for training in (training for training in plan if not training.reason):
        run = build_run_spec(
            training, spec, inputs=tmp_path, num_inputs=9, inputs_a_step=inputs_a_step, loss=LossName.STAND_IN
        )
        ranks = [select(run.inputs, rank, training.num_data_ranks).inputs for rank in range(training.num_data_ranks)]
        rounds = list(zip(*ranks, strict=True))
        size = run.actor.resolved_grad_accumulation
        windows = [rounds[i : i + size] for i in range(0, len(rounds), size)]
        steps[training.name] = [sorted(path for members in window for path in members) for window in windows]
    assert len(steps["ddp"]) == 5
    assert [len(step) for step in steps["ddp"]] == [inputs_a_step] * 5
    assert all(taken == steps["ddp"] for taken in steps.values())


def test_a_configuration_that_needs_more_gpus_is_not_run_and_a_cpu_has_processes_for_it() -> None:
    on_two = {
        training.name: training for training in plan_trainings(SuiteSpec(), Machine(num_devices=2, has_gpus=True))
    }
    assert {training.name: training.reason for training in on_two.values() if training.reason} == {
        "fsdp2-tp-ring": "needs 4 GPUs, this machine has 2"
    }
    on_cpu = {
        training.name: training for training in plan_trainings(SuiteSpec(), Machine(num_devices=2, has_gpus=False))
    }
    assert (on_cpu["fsdp2-tp-ring"].num_processes, on_cpu["fsdp2-tp-ring"].reason) == (4, "")
    of_four = plan_trainings(SuiteSpec(processes=1), Machine(num_devices=1, has_gpus=True))
    assert [training.reason for training in of_four if training.name == "fsdp2-ring"] == [
        "needs 2 GPUs, --processes is 1"
    ]


def test_data_ranks_are_the_same_for_all_where_they_are_asked_for() -> None:
    for machine in (Machine(num_devices=4, has_gpus=True), Machine(num_devices=2, has_gpus=False)):
        plan = {training.name: training for training in plan_trainings(SuiteSpec(data_ranks=2), machine)}
        ranks = {name: plan[name].num_processes for name in ("ddp", "deepspeed-autotp", "fsdp2-tp")}
        assert ranks == {"ddp": 2, "deepspeed-autotp": 4, "fsdp2-tp": 4}
        assert {training.num_data_ranks for training in plan.values() if not training.reason} == {2}
        assert plan["fsdp2-tp-ring"].reason == ("needs 8 GPUs, this machine has 4" if machine.has_gpus else "")


def test_skipping_changes_no_other_configuration() -> None:
    machine = Machine(num_devices=4, has_gpus=True)
    whole = plan_trainings(SuiteSpec(), machine)
    some = plan_trainings(SuiteSpec(skip=find_skipped(["ddp"], ["tp"])), machine)
    assert {training.name for training in some if training.reason == "skipped"} == {
        *("ddp", "fsdp2-tp", "fsdp2-tp-ring", "deepspeed-autotp")
    }
    assert [training for training in some if not training.reason] == [
        training for training in whole if not find_skipped(["ddp"], ["tp"]) & {training.name}
    ]
    assert count_inputs_per_step(some) == count_inputs_per_step(whole) == 4


# curves


def test_a_step_is_its_micro_batches_on_all_data_ranks_and_its_slowest_ranks(tmp_path: Path) -> None:
    losses = [[5.0, 4.0], [3.0, 2.0], [4.0, 3.0], [2.0, 1.0]]
    records = [
        passed(index, f"{index}{rank}", loss, norm=7.0 + index if index % 2 else None, rank=rank, seconds=1.0 + rank)
        for index, ranks in enumerate(losses)
        for rank, loss in enumerate(ranks)
    ]
    typed = "--step on --grad-accumulation 2"
    found = read_curve(PastRun.read(write_log(tmp_path / "log", records, typed=typed)))
    assert found.losses == [3.5, 2.5]
    assert [step.norm for step in found.steps] == [8.0, 10.0]
    assert [step.seconds for step in found.steps] == [4.0, 4.0]
    assert [step.inputs for step in found.steps] == [["00", "01", "10", "11"], ["20", "21", "30", "31"]]
    assert {step.memory_bytes for step in found.steps} == {2 * 2**30}


@pytest.mark.parametrize(
    ("seconds", "usual"),
    [([9.0, 1.0, 5.0, 2.0], 2.0), ([9.0, 1.0, 5.0], 3.0), ([0.5, 1.0], 1.0), ([9.0], 9.0)],
)
def test_the_first_step_counts_in_no_time_unless_it_is_the_only_one(seconds: list[float], usual: float) -> None:
    steps = [
        replace(step, seconds=number, memory_bytes=int(1000 * number))
        for step, number in zip(curve([2.0] * len(seconds)).steps, seconds, strict=True)
    ]
    made = LossCurve(steps=steps)
    assert (made.seconds_a_step, made.peak_bytes, made.mean) == (usual, int(1000 * max(seconds)), 2.0)


@pytest.mark.parametrize(
    ("losses", "steps_an_epoch", "falls"),
    [
        ([5, 2, 4.9, 1.9], 2, True),  # each input's loss fell, though step 3 is above step 1's neighbour
        ([2, 5, 2, 5], 2, False),  # the same losses over the same inputs
        ([5, 4, 3, 2, 1, 0, 9, 9], 2, False),
        ([5, 4, 3, 6], 4, False),  # no input comes twice: the last quarter against the first
        ([5, 9, 9, 4], 4, True),
    ],
)
def test_a_loss_falls_if_its_last_pass_over_the_inputs_is_below_the_first(
    losses: list[float], steps_an_epoch: int, falls: bool
) -> None:
    complaint = curve(losses).explain_no_fall(steps_an_epoch)
    assert (complaint == "") is falls
    assert ("on other inputs. Try: --steps 8" in complaint) is (steps_an_epoch == 4 and not falls)


# the judgement


@pytest.mark.parametrize(
    ("name", "differences", "says"),
    [
        ("fsdp2", (0.0009, 0.01, 0.01, 0.01), []),
        ("fsdp2", (0.002, 0, 0, 0), ["initial difference from ddp 0.002, bound 0.001"]),
        ("fsdp2-tp", (0, 0.003, 0, 0.0005), []),
        (
            "fsdp2-tp",
            (0, 0, 0.021, 0),
            ["max difference from ddp 0.021, bound 0.02", "mean difference from ddp 0.0052"],
        ),
        ("fsdp2-tp", (0, 0.002, 0.002, -0.002), ["mean difference from ddp 0.0015, bound 0.001"]),
        ("deepspeed-autotp", (0, 0.4, 0, 0.1), []),
        ("deepspeed-autotp", (0, 0.3, 0.3, 0.3), ["mean difference from ddp 0.225, bound 0.15"]),
        ("deepspeed-autotp", (0, 0.51, 0, 0), ["max difference from ddp 0.51, bound 0.5"]),
    ],
)
def test_each_bound_on_the_distance_from_ddp_can_be_broken(
    name: str, differences: tuple[float, ...], says: list[str]
) -> None:
    found = complaints(name, moved(*differences), ddp=curve(FALLING))
    assert len(found) == len(says)
    assert all(line.startswith(start) for line, start in zip(found, says, strict=True))


@pytest.mark.parametrize(
    ("name", "scale", "says"),
    [
        ("fsdp2", 1.049, []),
        ("fsdp2", 1.051, ["5.10% from deepspeed, bound 5%"]),
        ("fsdp2-ring", 0.949, ["5.10% from deepspeed, bound 5%"]),
        ("deepspeed-autotp", 1.1, []),  # has bounds of its own
    ],
)
def test_the_standard_configurations_stay_near_deepspeed_at_every_step(
    name: str, scale: float, says: list[str]
) -> None:
    found = complaints(name, curve([*FALLING[:3], FALLING[3] * scale]), deepspeed=curve(FALLING))
    assert [line for line in found if "fall" not in line] == says


@pytest.mark.parametrize(
    ("of", "says"),
    [
        (curve(FALLING[::-1]), "the loss does not fall: mean 4.37500 in the first 2 steps, 4.87500 in the last"),
        (curve([5.0, 4.0, float("nan"), 3.0]), "the loss of step 3 is nan"),
        (curve(FALLING, inputs="ac"), "step 1 was on other inputs than ddp's"),
    ],
)
def test_a_curve_that_is_none_is_complained_of(of: LossCurve, says: str) -> None:
    assert complaints("fsdp2-ring", of) == ([says] if "ddp" not in says else [])
    assert says in complaints("fsdp2-ring", of, ddp=curve(FALLING))


def test_a_refusal_fails_a_standard_configuration_alone_and_what_was_not_come_to_none() -> None:
    plan = plan_trainings(SuiteSpec(skip=frozenset(["fsdp2"])), Machine(num_devices=4, has_gpus=True))
    refusal = NoCurve(reason="cannot be had", is_refusal=True)
    no_curves = {"fsdp2-tp": refusal, "deepspeed-autotp": refusal, "fsdp2-ring": NoCurve(reason="crashed")}
    curves = {"ddp": curve(FALLING), "deepspeed": moved(0, 0, 0, 1)}
    found = judge_trainings(plan, {**curves, **no_curves}, steps_an_epoch=1)
    assert {result.planned.name: (result.status, result.reason) for result in found} == {
        "ddp": (TrainingStatus.PASSED, ""),
        "deepspeed": (TrainingStatus.FAILED, ""),
        "fsdp2": (TrainingStatus.NOT_RUN, "skipped"),
        "fsdp2-tp": (TrainingStatus.FAILED, "cannot be had"),
        "fsdp2-ring": (TrainingStatus.FAILED, "crashed"),
        "fsdp2-tp-ring": (TrainingStatus.NOT_RUN, "not reached"),
        "deepspeed-autotp": (TrainingStatus.NOT_RUN, "cannot be had"),
    }


# the command


def asked(*typed: str) -> SuiteSpec:
    spec = parse_command_line(["suite", *typed]).run.args[0]
    assert isinstance(spec, SuiteSpec)
    return spec


def test_variables_are_defaults_and_an_empty_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES + SKIPS:
        monkeypatch.setenv(name, "")
    assert asked() == SuiteSpec()
    values = ("4", "32", "models/m", "texts.jsonl", "out", "elsewhere", "4", "8")
    for name, value in zip(VARIABLES, values, strict=True):
        monkeypatch.setenv(name, value)
    expected = SuiteSpec(
        processes=4, max_samples=32, model="models/m", dataset=Path("texts.jsonl"), output_dir=Path("out"), tp=4, ring=8
    )
    assert asked() == expected
    assert parse_command_line(["suite"]).run.args[1] == Path("elsewhere")
    assert asked("--tp", "2", "--dtype", "fp32") == SuiteSpec(
        **{name: getattr(expected, name) for name in ("processes", "max_samples", "model", "dataset", "output_dir")},
        tp=2,
        ring=8,
        dtype=Dtype.FP32,
    )


@pytest.mark.parametrize(
    ("variable", "value", "left"),
    [
        ("SKIP_DEEPSPEED", "1", {"ddp", "fsdp2", "fsdp2-tp", "fsdp2-ring", "fsdp2-tp-ring"}),
        ("SKIP_FSDP2", "yes", {"ddp", "deepspeed", "deepspeed-autotp"}),
        ("SKIP_TP", "true", {"ddp", "deepspeed", "fsdp2", "fsdp2-ring"}),
        ("SKIP_RING", "on", {"ddp", "deepspeed", "fsdp2", "fsdp2-tp", "deepspeed-autotp"}),
        ("SKIP_RING", "0", {configuration.name for configuration in CONFIGURATIONS}),
    ],
)
def test_a_variable_skips_a_group(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, left: set[str]) -> None:
    monkeypatch.setenv(variable, value)
    assert {configuration.name for configuration in CONFIGURATIONS} - asked().skip == left


@pytest.mark.parametrize(
    ("typed", "variables", "says"),
    [
        ("", {"NUM_GPUS": "two"}, "invalid value for '--processes' (env var: 'NUM_GPUS')"),
        ("", {"SKIP_TP": "maybe"}, "invalid value for '--skip-tp' (env var: 'SKIP_TP')"),
        ("", {"TP_SIZE": "1"}, "invalid value for '--tp' (env var: 'TP_SIZE')"),
        ("--only zero", {}, "--only zero is no configuration. Give one of ddp, deepspeed, deepspeed-autotp"),
        ("--only ddp --skip fsdp2", {}, "--skip and --only exclude each other."),
        ("--save-every 3", {}, "--save-every is for the states of --save-state. Try: --save-state --save-every 3"),
        ("--save-state --storage s3://a/b", {}, "--storage s3://a/b is for a Ray cluster. Try: --launcher ray"),
        ("--save-state --launcher ray --address auto", {}, "--save-state needs a folder that all nodes share"),
        ("--init-weights a --save-init-weights", {}, "--init-weights and --save-init-weights exclude each other."),
        (
            "--continue x --storage nowhere",
            {},
            "--continue x: no such folder, and no suite of that name in logs or nowhere. Give one that ",
        ),
        ("--skip zero", {}, "--skip zero is no configuration. Give one of ddp, deepspeed, fsdp2"),
        ("--skip ddp", {"SKIP_FSDP2": "1", "SKIP_DEEPSPEED": "1"}, "every configuration is skipped."),
        (
            "--continue nowhere --steps 3",
            {},
            "--continue takes its options from the suite that was begun.",
        ),
        (
            "--continue nowhere",
            {"NUM_GPUS": "2"},
            "--continue nowhere: no such folder, and no suite of that name in logs. Give a folder that ",
        ),
        ("--dataset nowhere", {}, "--dataset nowhere does not exist. Give a folder of captures"),
        ("--dataset pyproject.toml", {}, "--dataset pyproject.toml is no folder of captures, .jsonl or .parquet."),
    ],
)
def test_wrong_usage_is_one_line_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: str,
    variables: dict[str, str],
    says: str,
) -> None:
    logs = [] if "--continue" in typed else ["--log-folder", str(tmp_path)]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["suite", *typed.split(), *logs]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"replay: {says}")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# inputs


def test_as_many_training_passes_are_copied_as_fill_whole_steps(tmp_path: Path) -> None:
    paths = write_passes(tmp_path / "captures", {0: "rttr", 1: "tttr"})
    spec = SuiteSpec(dataset=tmp_path / "captures", max_samples=4)
    made = prepare_inputs(spec, tmp_path / "out" / "inputs", 3)
    assert made.num_inputs == 3
    assert {path.name for path in (tmp_path / "out" / "inputs").iterdir()} == {
        path.name for path in [*paths[0][1:3], paths[1][0]]
    }
    again = prepare_inputs(spec, tmp_path / "more" / "inputs", 5)  # fewer than a step's: all there are
    assert again.num_inputs == 4
    with pytest.raises(UsageError, match="is not empty"):
        prepare_inputs(spec, tmp_path / "out" / "inputs", 3)


def test_of_several_recordings_the_latest_is_trained_on(tmp_path: Path) -> None:
    paths = write_recordings(tmp_path / "captures", {"a": "tttt", "b": "rtrtt"})
    write_config(tmp_path / "captures")
    made = prepare_inputs(SuiteSpec(dataset=tmp_path / "captures", steps=6), tmp_path / "inputs", 1)
    names = [path.name for path in capture_files(tmp_path / "inputs")]
    assert names == [paths["b"][number].name for number in (1, 3, 4)]
    assert (made.num_inputs, made.steps_an_epoch(1), made.steps_an_epoch(2)) == (3, 3, 1)


def test_a_damaged_capture_is_refused_and_leaves_no_inputs(tmp_path: Path) -> None:
    paths = write_passes(tmp_path / "captures", {0: "tt"})
    damage(paths[0][1])
    with pytest.raises(UsageError, match="Try: capture check"):
        prepare_inputs(SuiteSpec(dataset=tmp_path / "captures"), tmp_path / "out" / "inputs", 1)
    assert list((tmp_path / "out").iterdir()) == []


# a run


class HereRunner:
    """In the place of other processes: a replay in this process, or what happens to it."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.happens: dict[str, BaseException | int] = {}

    def __call__(self, task: Task) -> ProcessResult:
        name = task.logs.parent.name
        self.started.append(name)
        event = self.happens.pop(name, None)
        if isinstance(event, BaseException):
            raise event
        task.output.parent.mkdir(parents=True)
        task.output.write_text(f"replay: {name} says why\n")
        code = run_quietly(task) if event is None else event
        return ProcessResult(exit_code=code, seconds=1.0, output=task.output, logs=task.logs)


@pytest.fixture
def runner(one_world: None, monkeypatch: pytest.MonkeyPatch) -> HereRunner:
    made = HereRunner()
    end_each_task(made, monkeypatch)
    return made


SMALL = "--processes 1 --steps 3 --max-samples 1 --dtype fp32 --skip-tp --skip-ring"


@pytest.mark.slow
def test_a_suite_that_was_interrupted_goes_on_with_what_is_missing(
    tmp_path: Path, runner: HereRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.happens = {"deepspeed": 1, "fsdp2": KeyboardInterrupt()}
    assert main(["suite", *SMALL.split(), "--log-folder", str(tmp_path)]) == 130
    (folder,) = tmp_path.iterdir()
    out = capsys.readouterr().out
    assert "finished   ddp\n" in out
    assert f"go on      replay suite --continue {folder}\n" in out
    assert json.loads((folder / "suite.json").read_text())["result"]["status"] == "interrupted"
    first = (folder / "ddp.jsonl").read_bytes()

    begun = (folder / "suite.json").read_bytes()
    values = json.loads(begun)
    (folder / "suite.json").write_text(json.dumps(values | {"versions": values["versions"] | {"torch": "1.0"}}))
    assert main(["suite", "--continue", str(folder)]) == 2
    assert f"has runs of torch 1.0 there, {version('torch')} here. Go on with those" in capsys.readouterr().err
    (folder / "suite.json").write_bytes(begun)
    moved = folder.rename(tmp_path / "moved")
    assert main(["suite", "--continue", str(moved)]) == 0
    assert runner.started == ["ddp", "deepspeed", "fsdp2", "deepspeed", "fsdp2"]
    assert (moved / "ddp.jsonl").read_bytes() == first
    assert (moved / "runs" / "deepspeed" / "0" / "output.txt").read_text() == "replay: deepspeed says why\n"
    curves = {name: read_curve_file(moved / f"{name}.jsonl") for name in ("ddp", "deepspeed", "fsdp2")}
    for found in curves.values():
        assert len(found.losses) == 3
        assert found.losses[2] < found.losses[1] < found.losses[0]
        assert found.losses == pytest.approx(curves["ddp"].losses, rel=1e-5)
    values = json.loads((moved / "suite.json").read_text())["result"]
    assert values["status"] == "passed"
    assert values["configurations"]["fsdp2"]["difference_from_ddp"]["max"] < 1e-4
    skipped = values["configurations"]["fsdp2-tp"]
    assert (skipped["status"], skipped["reason"], skipped["final"]) == ("not run", "skipped", None)
    out = capsys.readouterr().out
    assert "passed     2 of 5 standard configurations" in out
    assert main(["suite", "--continue", str(moved), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    result = replay.suite(continue_=moved)
    assert capsys.readouterr().out == ""
    assert result.to_dict() == printed
    assert_valid("suite", printed)
    assert printed["result"] == values
    assert list(result.to_frame().set_index("name").status.items()) == [
        (training.planned.name, training.status) for training in result.trainings
    ]
    past = replay.open(moved)
    assert isinstance(past, PastCampaign)
    assert {name: len(past[name].records) for name in past} == {"ddp": 3, "deepspeed": 3, "fsdp2": 3}

    (moved / "ddp.jsonl").unlink()  # as where the command was killed behind the journal's line
    assert main(["suite", "--continue", str(moved)]) == 0
    assert len(runner.started) == 5
    assert (moved / "ddp.jsonl").read_bytes() == first
    (moved / "ddp.jsonl").write_text('{"loss": "2.5"}\n')
    assert main(["suite", "--continue", str(moved)]) == 2
    assert "ddp.jsonl is damaged: line 1: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_suite_is_made_again_from_its_storage_and_trains_what_is_missing(tmp_path: Path, runner: HereRunner) -> None:
    where = ["--storage", str(tmp_path / "storage"), "--log-folder"]
    runner.happens = {"deepspeed": 1, "fsdp2": KeyboardInterrupt()}
    typed = [*SMALL.split(), "--save-state", "--save-init-weights", *where, str(tmp_path / "logs")]
    assert main(["suite", *typed]) == 130
    (folder,) = (tmp_path / "logs").iterdir()
    first = (folder / "ddp.jsonl").read_bytes()
    shutil.rmtree(folder)
    assert main(["suite", "--continue", folder.name, *where, str(tmp_path / "elsewhere")]) == 0
    assert runner.started == ["init-weights", "ddp", "deepspeed", "fsdp2", "deepspeed", "fsdp2"]
    again = tmp_path / "elsewhere" / folder.name
    assert (again / "ddp.jsonl").read_bytes() == first
    assert (again / "suite.json").read_bytes() == (tmp_path / "storage" / folder.name / "suite.json").read_bytes()


def test_a_configuration_that_fails_leaves_the_others_and_can_be_tried_again(
    tmp_path: Path, runner: HereRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.happens = {"ddp": 1, "deepspeed": 2}
    assert main(["suite", *SMALL.split(), "--log-folder", str(tmp_path)]) == 1
    (folder,) = tmp_path.iterdir()
    out = capsys.readouterr().out
    assert "failed     ddp: ddp says why\n" in out
    assert "failed     deepspeed: deepspeed says why\n" in out
    assert "note       ddp has no curve, so none was compared with it\n" in out
    assert f"go on      replay suite --continue {folder}\n" in out
    assert sorted(path.name for path in folder.glob("*.jsonl")) == ["fsdp2.jsonl", "journal.jsonl"]


@pytest.mark.parametrize(("dtype", "falls"), [("bf16", True), ("fp32", True), ("bf16", False)])
def test_beyond_a_bound_in_bf16_it_says_how_rounding_is_told_from_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dtype: str, falls: bool
) -> None:
    """Rounding does not explain a loss that does not fall."""

    def train(task: Task) -> ProcessResult:
        apart = 0.0015 if task.logs.parent.name == "fsdp2" else 0.0
        losses = [loss + apart for loss in (FALLING[:3] if falls else FALLING[:1] * 3)]
        records = [passed(step, f"step {step}", loss) for step, loss in enumerate(losses)]
        write_log(task.logs / "run", records, spec=task.job.spec)
        return ProcessResult(exit_code=0, seconds=1.0, output=task.output, logs=task.logs)

    end_each_task(train, monkeypatch)
    assert main(["suite", *SMALL.split(), "--dtype", dtype, "--log-folder", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "failed     fsdp2: initial difference from ddp 0.0015, bound 0.001\n" in out
    assert ("is near the bounds. Try: --dtype fp32\n" in out) is (dtype == "bf16" and falls)


def test_what_the_plainest_configuration_refuses_is_refused_and_leaves_nothing(
    tmp_path: Path, runner: HereRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.happens = {"ddp": 2}
    with pytest.raises(replay.UsageError, match=r"^ddp says why$"):
        replay.suite(
            processes=1,
            steps=3,
            max_samples=1,
            dtype="fp32",
            skip_tp=True,
            skip_ring=True,
            log_folder=tmp_path / "logs",
            output_dir=tmp_path / "out",
        )
    assert capsys.readouterr().out == ""
    runner.happens = {"ddp": 2}
    typed = [*SMALL.split(), "--log-folder", str(tmp_path / "logs"), "--output-dir", str(tmp_path / "out")]
    assert main(["suite", *typed]) == 2
    assert capsys.readouterr().err == "replay: ddp says why\n"
    assert [path for home, _, files in os.walk(tmp_path) for path in files] == []


@pytest.mark.slow
def test_from_python_a_configuration_is_trained_in_processes_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = replay.suite(steps=2, max_samples=4, processes=1, num_layers=1, only=["ddp"], log_folder=tmp_path)
    assert capfd.readouterr() == ("", "")
    assert result.exit_code == 0
    rows = result.to_frame().set_index("name")
    assert dict(rows.status) == {name: "passed" if name == "ddp" else "not run" for name in rows.index}
    past = replay.open(result.folder)
    assert isinstance(past, PastCampaign)
    losses = [record.result.loss or 0.0 for record in past["ddp"].records]
    middle = len(losses) // 2
    firsts, lasts = losses[:middle], losses[middle:]
    assert (rows.initial["ddp"], rows.final["ddp"]) == pytest.approx((fmean(firsts), fmean(lasts)))
    assert fmean(lasts) < fmean(firsts), "AdamW's step goes down on the inputs that it was computed from"
