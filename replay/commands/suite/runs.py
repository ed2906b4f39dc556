"""Run `replay suite`: train one model under each configuration, in its own processes, and judge the loss curves.

A suite keeps its files in one folder:

LOGS/<time>-suite/suite.json        of the campaign; its result has the status, and the result of each configuration
                  journal.jsonl     of the campaign
                  inputs/           training inputs, unless --output-dir is given
                  initial-weights/  model folder of --save-init-weights, unless --storage is given
                  states/           of --save-state, unless --storage is given
                  <name>.jsonl      a line per step of a configuration, written after the last step
                  runs/<name>/0/    output of the configuration's replay, and its log; 1/ is the second attempt

STORAGE/<name of the folder>/ holds the states of each configuration, and copies of suite.json, the journal, the curves
and the inputs. From these --continue makes the folder again on a machine that lacks LOGS.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Self

from actor_init.as_json import parse_json, to_json
from actor_init.saving.huggingface import check_folder
from actor_init.spec import Dtype, UsageError
from capture.facts import Setting
from capture.file_format.atomic_write import write_atomically
from capture.progress_bar import ProgressBar
from replay.campaign.campaign import JOURNAL, Campaign, PlannedRun, catch_interruption
from replay.campaign.executor import Executor, open_executor
from replay.campaign.result import CampaignResult
from replay.commands.suite.inputs import SuiteInputs, prepare_inputs
from replay.commands.suite.loss_curve import (
    CurveComparison,
    LossCurve,
    NoCurve,
    TrainingResult,
    TrainingStatus,
    TrainingStep,
    TrainingSummary,
    judge_trainings,
    read_curve,
)
from replay.commands.suite.plan import (
    DDP,
    DEEPSPEED,
    PlannedTraining,
    SuiteSpec,
    build_init_weights_spec,
    build_run_spec,
    count_inputs_per_step,
    count_ranks,
    plan_trainings,
)
from replay.comparison.plot import check_plot, draw_curves
from replay.options.option_parsing import format_error_with_flags
from replay.options.ray_options import RayOptions
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import Columns, Pairs, format_gibibytes, format_milliseconds, pluralise
from replay.processes.pool import ProcessResult, RunLimits
from replay.runlog.reader import PastRun
from replay.runlog.writer import create_folder

SUITE_FILE = "suite.json"
INPUTS = "inputs"


@dataclass(frozen=True, kw_only=True, slots=True)
class SuitePlan:
    spec: SuiteSpec
    inputs: SuiteInputs


class SuiteStatus(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteOutcome:
    """The `result` of suite.json: how the suite ended, and what became of each configuration."""

    status: SuiteStatus
    configurations: Mapping[str, TrainingSummary]


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    campaign: Campaign[SuitePlan]

    @classmethod
    def begin(cls, spec: SuiteSpec, logs: Path, executor: Executor, *, arguments: Sequence[str] = ()) -> Self:
        """Begin a suite. Raises UsageError, and leaves no folder, if there are no inputs or too few GPUs.

        arguments  options of the command line
        """
        machine = executor.choose_machine(spec.processes)
        inputs_a_step = count_inputs_per_step(plan_trainings(spec, machine))
        folder = create_folder(logs, "suite").resolve()
        try:
            inputs_folder = _choose_inputs_folder(spec, folder)
            plan = SuitePlan(spec=spec, inputs=prepare_inputs(spec, inputs_folder, inputs_a_step))
            suite = cls(campaign=Campaign.begin_in(folder, "suite", plan, arguments=arguments, machine=machine))
            if (copy := suite._copy) is not None:
                check_folder(copy, "storage")
                shutil.copytree(inputs_folder, copy / INPUTS)
        except BaseException:
            shutil.rmtree(folder)
            raise
        suite.copy_out()
        return suite

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a suite, and have what left no curve run again. Raises UsageError if `folder` holds none."""
        suite = cls(campaign=Campaign.read("suite", folder.resolve(), SuitePlan))
        if not suite.inputs_folder.is_dir():
            raise UsageError(
                Setting("continue_", folder), f": its inputs in {suite.inputs_folder} are gone", "Try: replay suite"
            )
        for training in suite.runnable:
            finished = suite.campaign.find_ended(suite.plan_run(training))
            child = None if finished is None else finished.process_result
            # what a copy from the storage holds of a training that failed does not say why
            if child and (child.exit_code != 0 or isinstance(suite.curve_after(training, child), NoCurve)):
                suite.campaign.forget(suite.plan_run(training))
        return suite

    @property
    def folder(self) -> Path:
        return self.campaign.folder

    @property
    def spec(self) -> SuiteSpec:
        return self.campaign.plan.spec

    @property
    def inputs(self) -> SuiteInputs:
        return self.campaign.plan.inputs

    @property
    def plan(self) -> list[PlannedTraining]:
        return plan_trainings(self.spec, self.campaign.machine)

    @property
    def runnable(self) -> list[PlannedTraining]:
        return [training for training in self.plan if not training.reason]

    @property
    def inputs_a_step(self) -> int:
        return count_inputs_per_step(self.plan)

    def plan_run(self, training: PlannedTraining) -> PlannedRun:
        """Return the training of a configuration."""
        begin = str(self.init_weights) if self.spec.save_init_weights else self.spec.init_weights
        spec = build_run_spec(
            training,
            replace(self.spec, init_weights=begin, save_init_weights=False),
            inputs=self.inputs_folder,
            num_inputs=self.inputs.num_inputs,
            inputs_a_step=self.inputs_a_step,
            loss=self.inputs.loss,
            # Ray Train keeps the states in its storage, whatever this folder is
            states=None if self.storage is None else Path(self.storage) / training.name / "states",
        )
        return PlannedRun(home=f"runs/{training.name}", spec=spec, num_processes=training.num_processes)

    @property
    def init_weights_run(self) -> PlannedRun:
        """Return the run that writes the weights with which all configurations begin."""
        spec = build_init_weights_spec(
            self.spec, inputs=self.inputs_folder, loss=self.inputs.loss, folder=self.init_weights
        )
        return PlannedRun(home="runs/init-weights", spec=spec)

    @property
    def curves(self) -> dict[str, LossCurve | NoCurve]:
        """Return the curves of the configurations that were trained, by name. Raises UsageError for a damaged file."""
        finished_runs = [(training, self.campaign.find_ended(self.plan_run(training))) for training in self.runnable]
        return {
            training.name: self.curve_after(training, finished.process_result)
            for training, finished in finished_runs
            if finished
        }

    def curve_after(self, training: PlannedTraining, child: ProcessResult) -> LossCurve | NoCurve:
        """Return the curve that a training left, or why there is none.

        It is read from the log, and kept in a file, unless that was done before. Raises UsageError for a damaged file.
        """
        if child.exit_code != 0:
            return NoCurve(reason=child.error, is_refusal=child.is_refusal)
        path = self.folder / f"{training.name}.jsonl"
        if path.exists():
            return read_curve_file(path)
        try:
            curve = read_curve(PastRun.read(child.logs))
        except UsageError as error:
            return NoCurve(reason=format_error_with_flags(error))
        if len(curve.steps) != self.spec.steps:
            return NoCurve(reason=f"its log has {len(curve.steps)} steps, not {self.spec.steps}, see {child.output}")
        lines = [json.dumps(to_json(step), allow_nan=False) for step in curve.steps]
        write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
        return curve

    def write(self, outcome: SuiteOutcome) -> None:
        """Write suite.json."""
        self.campaign.result = outcome
        self.campaign.write()
        self.copy_out()

    def copy_out(self) -> None:
        """Copy what --continue needs into the storage; last the journal, which says which curves are there."""
        if self._copy is not None:
            names = [SUITE_FILE, *(f"{training.name}.jsonl" for training in self.plan), JOURNAL]
            for path in (path for name in names if (path := self.folder / name).exists()):
                write_atomically(self._copy / path.name, path.read_bytes())

    @property
    def storage(self) -> str | None:
        """Return where the states of its configurations are kept, each in a folder of its name; None: nowhere."""
        if self.spec.save_every is None:
            return None
        return str(self.folder / "states") if self.spec.storage is None else f"{self.spec.storage}/{self.folder.name}"

    @property
    def init_weights(self) -> Path:
        """Return the folder for --save-init-weights, which all nodes share if --storage is given."""
        return (self._copy or self.folder) / "initial-weights"

    @property
    def inputs_folder(self) -> Path:
        """Return the folder of the inputs, which all nodes share if --storage is given."""
        return _choose_inputs_folder(self.spec, self.folder) if self._copy is None else self._copy / INPUTS

    @property
    def _copy(self) -> Path | None:
        """Return the folder in the storage for copies of what this folder holds."""
        is_folder = self.spec.storage is not None and "://" not in self.spec.storage
        return Path(str(self.storage)) if is_folder else None

    def discard(self) -> None:
        for folder in (_choose_inputs_folder(self.spec, self.folder), self.folder, self._copy):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)


def _choose_inputs_folder(spec: SuiteSpec, folder: Path) -> Path:
    return (spec.output_dir or folder).resolve() / INPUTS


def read_curve_file(path: Path) -> LossCurve:
    """Read the steps of a configuration, which <name>.jsonl keeps. Raises UsageError if it is damaged."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        steps = [parse_json(TrainingStep, line, source=f"line {number}") for number, line in enumerate(lines, start=1)]
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is damaged: {format_error_with_flags(error)}. "
            f"Remove it, and: replay suite --continue {path.parent}"
        ) from error
    return LossCurve(steps=steps)


class SuiteConsole:
    """Prints a line or two for each training, then the table of losses and the verdict."""

    def __init__(self, suite: Suite, file: IO[str]) -> None:
        """Print what is trained, on which inputs and device."""
        self._out = open_console(file)
        self._bar = ProgressBar(self._out.file)
        self._suite = suite
        self._say(_format_header(suite))

    def show_init_weights(self) -> None:
        self._say([("weights", f"all begin with {_shorten(self._suite.init_weights)}")])

    def show_training(self, training: PlannedTraining, num_done: int, num_all: int) -> None:
        """Say which configuration is trained now; the bar shows how many of those to train are done."""
        passes = pluralise(self._suite.inputs_a_step // training.num_data_ranks, "pass")
        ranks = pluralise(training.num_data_ranks, "data rank")
        text = f"{training.name}: {pluralise(training.num_processes, 'process')}, {ranks} x {passes} a step"
        self._say([("training", text)])
        self._bar.show(num_done, num_all, "configurations trained")

    def show_curve(self, curve: LossCurve | NoCurve) -> None:
        if isinstance(curve, NoCurve):
            self._say([("", f"no curve: {curve.reason}")])
        else:
            self._say([("", f"loss {curve.losses[0]:.5f} to {curve.losses[-1]:.5f}")])

    def report_interruption(self, trained: Mapping[str, LossCurve | NoCurve]) -> None:
        trained_names = [
            training.name for training in self._suite.plan if isinstance(trained.get(training.name), LossCurve)
        ]
        self._say([("finished", ", ".join(trained_names) or "none"), *_format_continue(self._suite)])

    def finish(self, results: Sequence[TrainingResult]) -> None:
        """Print the answer; see docs/commands.md."""
        self._bar.clear()
        print_line(self._out)
        print_table(self._out, _format_table(results))
        print_line(self._out)
        print_pairs(self._out, _format_verdict(self._suite, results))

    def _say(self, lines: Pairs) -> None:
        self._bar.clear()
        print_pairs(self._out, lines)


def _format_header(suite: Suite) -> Pairs:
    spec, machine = suite.spec, suite.campaign.machine
    device = pluralise(machine.num_devices, "GPU") if machine.has_gpus else "a CPU, where processes stand in for GPUs"
    steps = f"{pluralise(spec.steps, 'step')} of {pluralise(suite.inputs_a_step, 'input')}"
    return [
        ("suite", str(_shorten(suite.folder))),
        ("inputs", f"{suite.inputs.said}; {steps}, learning rate {spec.learning_rate:g}, {spec.dtype}"),
        ("device", device),
        *([("states", f"every {pluralise(spec.save_every, 'step')} in {suite.storage}")] if spec.save_every else []),
    ]


def _format_continue(suite: Suite) -> Pairs:
    return [("go on", f"replay suite --continue {_shorten(suite.folder)}")]


def _format_table(results: Sequence[TrainingResult]) -> Columns:
    """Return a row per configuration; differences are of a step's loss, from the same step under ddp and deepspeed."""
    curves: list[tuple[str, Callable[[CurveComparison], str]]] = [
        ("initial", lambda comparison: f"{comparison.curve.losses[0]:.5f}"),
        ("final", lambda comparison: f"{comparison.curve.losses[-1]:.5f}"),
        ("min", lambda comparison: f"{min(comparison.curve.losses):.5f}"),
        ("mean", lambda comparison: f"{comparison.curve.mean:.5f}"),
        (
            "initial diff",
            lambda comparison: f"{comparison.from_ddp.points[0].difference:.2g}" if comparison.from_ddp else "-",
        ),
        ("max diff", lambda comparison: f"{comparison.from_ddp.max_difference:.2g}" if comparison.from_ddp else "-"),
        ("mean diff", lambda comparison: f"{comparison.from_ddp.mean_difference:.2g}" if comparison.from_ddp else "-"),
        (
            "from deepspeed",
            lambda comparison: f"{comparison.from_deepspeed.max_relative:.2%}" if comparison.from_deepspeed else "-",
        ),
        ("step ms", lambda comparison: format_milliseconds(comparison.curve.seconds_a_step)),
        ("peak GiB", lambda comparison: format_gibibytes(comparison.curve.peak_bytes)),
    ]
    return {
        "configuration": [result.planned.name for result in results],
        "ranks": [str(result.planned.num_processes) if result.judgement else "-" for result in results],
        **{
            title: [cell(result.judgement) if result.judgement else "-" for result in results] for title, cell in curves
        },
        "result": [result.status.value for result in results],
    }


def _format_verdict(suite: Suite, results: Sequence[TrainingResult]) -> Pairs:
    pairs: Pairs = []
    for result in results:
        reasons = result.judgement.complaints if result.judgement else [result.reason]
        pairs += [(result.status.value, f"{result.planned.name}: {reason}") for reason in reasons]
    if any(result.status is TrainingStatus.FAILED and not result.judgement for result in results):
        pairs += _format_continue(suite)
    standard = [result for result in results if result.planned.configuration.is_standard]
    passed = [result for result in standard if result.status is TrainingStatus.PASSED]
    has_failed = any(result.status is TrainingStatus.FAILED for result in results)
    text = f"{len(passed)} of {len(standard)} standard configurations"
    if not has_failed:
        text += ": each loss falls, and none is further from the others than its bound"
    judgements = [result.judgement for result in results if result.judgement]
    if suite.spec.dtype is not Dtype.FP32 and any(result.beyond and not result.faults for result in judgements):
        pairs.append(("note", f"a large model's rounding in {suite.spec.dtype} is near the bounds. Try: --dtype fp32"))
    for result in results:
        if result.planned.name in (DDP, DEEPSPEED) and not result.judgement:
            pairs.append(("note", f"{result.planned.name} has no curve, so none was compared with it"))
    return [*pairs, ("failed" if has_failed else "passed", text), ("log", str(_shorten(suite.folder)))]


def _shorten(folder: Path) -> Path:
    """Return the path relative to the current folder, if it is below it."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteResult(CampaignResult):
    """What became of each configuration."""

    trainings: Sequence[TrainingResult]

    def _list_rows(self) -> Iterable[dict[str, Any]]:
        for name, summary in self.result["configurations"].items():
            yield {"name": name, **summary}


def begin(
    spec: SuiteSpec,
    logs: Path,
    arguments: Sequence[str],
    ray: RayOptions | None,
    plot: Path | None,
    screen: IO[str],
) -> SuiteResult:
    """Run a suite. The exit code is 0 if every configuration that ran passed.

    arguments  options of the command line
    plot   file for a picture of the curves; None: none is drawn

    Raises UsageError, and leaves no folder, if no configuration can run.
    """
    if plot is not None:
        check_plot(plot)
    with open_executor(ray, count_ranks(spec)) as executor:
        return _run(Suite.begin(spec, logs, executor, arguments=arguments), executor, plot, screen)


def resume(folder: Path, ray: RayOptions | None, plot: Path | None, screen: IO[str]) -> SuiteResult:
    """Train the configurations of a suite that have no curve yet, and judge all of them.

    Raises UsageError if there is no such suite, or if it was begun on another machine or with other versions.
    """
    if plot is not None:
        check_plot(plot)
    suite = Suite.read(folder)
    with open_executor(ray, count_ranks(suite.spec)) as executor:
        suite.campaign.check_can_continue(executor, map(suite.plan_run, suite.runnable))
        return _run(suite, executor, plot, screen)


def _run(suite: Suite, executor: Executor, plot: Path | None, screen: IO[str]) -> SuiteResult:
    limits = RunLimits(run_limit_seconds=suite.spec.run_limit, total_seconds=None, at_once=None)
    suite.campaign.open(executor, limits, storage=suite.storage)
    console = SuiteConsole(suite, screen)
    curves = suite.curves
    missing = [training for training in suite.runnable if training.name not in curves]
    with catch_interruption() as interruption:
        if missing and suite.spec.save_init_weights:
            _save_init_weights(suite, console)
        for number, training in enumerate(missing):
            console.show_training(training, number, len(missing))
            curves[training.name] = _train(suite, training, is_first=not curves)
            console.show_curve(curves[training.name])
    results = _judge_suite(suite, curves)
    has_failed = any(result.status is TrainingStatus.FAILED for result in results)
    summaries = {result.planned.name: result.summarize() for result in results}
    status = SuiteStatus.FAILED if has_failed else SuiteStatus.PASSED
    status = SuiteStatus.INTERRUPTED if interruption.happened else status
    suite.write(SuiteOutcome(status=status, configurations=summaries))
    if interruption.happened:
        console.report_interruption(curves)
    interruption.reraise(suite.folder)
    if plot is not None:
        judgements = {result.planned.name: result.judgement for result in results if result.judgement}
        draw_curves(plot, {name: judgement.curve.losses for name, judgement in judgements.items()})
    console.finish(results)
    return SuiteResult.from_campaign(suite.campaign, exit_code=1 if has_failed else 0, trainings=results)


def _save_init_weights(suite: Suite, console: SuiteConsole) -> None:
    """Write the weights with which all configurations begin, unless they are there. Raises UsageError if that fails."""
    if suite.init_weights.exists():
        return
    suite.campaign.forget(suite.init_weights_run)
    if error := suite.campaign.run(suite.init_weights_run).error:
        raise UsageError(Setting("save_init_weights"), f": {error}")
    console.show_init_weights()


def _train(suite: Suite, training: PlannedTraining, *, is_first: bool) -> LossCurve | NoCurve:
    """Train one configuration.

    Raises UsageError for what the reference configuration refuses, since all others would refuse it too.
    """
    child = suite.campaign.run(suite.plan_run(training))
    if is_first and training.name == DDP and child.is_refusal:
        error = child.error
        suite.discard()
        raise UsageError(error)
    curve = suite.curve_after(training, child)
    suite.copy_out()
    return curve


def _judge_suite(suite: Suite, curves: Mapping[str, LossCurve | NoCurve]) -> list[TrainingResult]:
    return judge_trainings(suite.plan, curves, steps_an_epoch=suite.inputs.steps_an_epoch(suite.inputs_a_step))
