"""Run `replay parity`: replay one folder under a matrix of configurations, each in its own processes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from actor_init.spec import Head, UsageError
from capture.facts import Setting
from replay.agreement.matrix import EDGES, arrange_settings, make_edge_settings, read_settings
from replay.agreement.noise_floor import ROUNDING_VARIATIONS, CellResult, MatrixJudge, MatrixResult
from replay.agreement.plan import Cell, MatrixContext, ParityPlan, merge_plans, plan_matrix, repeat_in_environments
from replay.agreement.rows import ParityLog, RowState, folder_name_of
from replay.campaign.campaign import Campaign, PlannedRun, catch_interruption
from replay.campaign.campaign_options import list_words
from replay.campaign.executor import Executor, open_executor
from replay.campaign.result import CampaignResult
from replay.commands.parity.report import ParityProgress, write_report
from replay.comparison.text import describe_first_difference
from replay.options.option_parsing import build_replay_spec, format_command_line, format_error_with_flags, list_options
from replay.options.ray_options import RayOptions
from replay.options.spec import Passes, ReplaySpec, find_edge_folder
from replay.output.text import Pairs
from replay.processes.interpreter import Environment, probe
from replay.processes.pool import Machine, RunLimits
from replay.resolution.job_defaults import find_inputs_folder
from replay.runlog.reader import PastRun
from replay.tracing.first_difference import FirstDifference, find_first_difference

SET_HERE = ("shuffle_inputs", "quiet", "full_names", "name")
STATES = ("optimizer_state", "save_state", "save_model", "load_state", "save_every", "resume")
NOT_FOR_ALL = (*SET_HERE, "uneven", "skip_inputs", *STATES)
NOT_OF_A_CELL = ("max_inputs", "log_folder")
NUM_INPUTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityResult(CampaignResult):
    """How far each run is from its reference, what noise was measured, and where runs that differ first depart."""

    matrix: MatrixResult
    first_differences: Sequence[str]

    def _list_rows(self) -> Iterable[dict[str, Any]]:
        cells = self.result["cells"]
        for run in self.result["runs"]:
            distances = cells.get(run["name"], {}).get("distances", {})
            result = cells.get(run["name"], {}).get("result")
            yield {**run, "result": result} | {quantity: point["value"] for quantity, point in distances.items()}


def begin(
    matrix: str,
    common: Mapping[str, Any],
    num_devices: int | None,
    limits: RunLimits,
    *,
    trace: bool,
    ray: RayOptions | None,
    pythons: Sequence[str] = (),
    screen: IO[str],
) -> ParityResult:
    """Run the matrix. The exit code is 0 if every cell that ran is equal or within noise.

    `common` holds the replay options that were typed, `pythons` the interpreters of the environments to run it in;
    empty: this one. Raises UsageError before anything has run.
    """
    _refuse_what_parity_sets(common)
    spec = build_replay_spec(common)
    if ray is not None and pythons:
        raise UsageError(
            Setting("python"),
            f"names interpreters of this machine, and {Setting('launcher', 'ray')} runs elsewhere",
            "Leave out one",
        )
    environments = [probe(python) for python in pythons]
    with open_executor(ray) as executor:
        machine = executor.choose_machine(num_devices)
        campaign = _begin_campaign(matrix, common, spec, machine, num_devices, environments)
        return _run(ParityLog(campaign=campaign), executor, limits, screen, trace=trace)


def _begin_campaign(
    matrix: str,
    common: Mapping[str, Any],
    spec: ReplaySpec,
    machine: Machine,
    num_devices: int | None,
    environments: Sequence[Environment],
) -> Campaign[ParityPlan]:
    context = _describe_context(spec, machine)
    shared = {name: value for name, value in common.items() if value is not None and name not in NOT_OF_A_CELL}
    settings = read_settings(matrix, context.num_devices, context.kernel)
    plan = merge_plans(
        [
            plan_matrix(settings, shared, context, partial(arrange_settings, matrix)),
            *plan_edges(matrix, shared, spec, context),
        ]
    )
    if environments:
        plan = repeat_in_environments(plan, environments)
    options = {
        "matrix": matrix,
        "processes": num_devices,
        "python": [environment.python for environment in environments],
    }
    words = [*list_words(options), *format_command_line(spec)]
    return Campaign.begin("parity", spec.measure.log_folder, plan, arguments=words, machine=machine)


def plan_edges(
    matrix: str, shared: Mapping[str, Any], spec: ReplaySpec, context: MatrixContext
) -> Iterator[ParityPlan]:
    """Plan the runs of edge shapes: the same model and options on inputs that ship with the project.

    Skipped under --step: steps on so few tokens are dominated by rounding.
    """
    if spec.measure.steps or spec.inputs.passes is Passes.ROLLOUT:
        return
    of_inputs = {option.parameter for option in list_options() if option.part == "inputs"}
    common = {name: value for name, value in shared.items() if name not in of_inputs}
    common |= {"inputs": "", "model": spec.actor.model or str(find_inputs_folder(spec.inputs))}
    typed_values = {"dtype": spec.actor.dtype, "attention": spec.actor.attention}
    for group, settings in make_edge_settings(matrix, context.num_devices, context.kernel).items():
        folder = find_edge_folder(EDGES[group])
        own_settings = [
            setting | {name: value for name, value in typed_values.items() if name in shared}
            for setting in map(dict, settings)
        ]
        try:
            yield plan_matrix(
                own_settings, common | {"inputs": str(folder)}, replace(_adapt_to_edges(context, folder), group=group)
            )
        except UsageError as error:
            yield ParityPlan(cells=[], refused={group: format_error_with_flags(error)})


def _adapt_to_edges(context: MatrixContext, folder: Path) -> MatrixContext:
    """Return `context` for the edge shapes. Raises UsageError if the model's vocabulary lacks their tokens."""
    from actor_init.inputs.documents import find_documents
    from capture.file_format.capture_file import read_micro_batch
    from capture.file_format.listing import capture_files

    if context.has_user_model:
        raise UsageError("nothing says how long the rows of a user's model may be")
    batches = [read_micro_batch(path) for path in capture_files(folder)]
    largest, size = max(int(batch.sequences_BS.max()) for batch in batches), context.config.get_text_config().vocab_size
    if largest >= size:
        raise UsageError(f"their token ids go up to {largest}, and the model's vocabulary is of {size}")
    return replace(
        context, num_inputs=len(batches), must_pack=any(find_documents(batch).has_shared_rows for batch in batches)
    )


def resume(folder: Path, limits: RunLimits, *, trace: bool, ray: RayOptions | None, screen: IO[str]) -> ParityResult:
    """Run the cells of a parity run that have not run yet, and report all of them.

    Raises UsageError if there is no such run, or if some may still have to run and it was made on another machine or
    with other versions.
    """
    log = ParityLog.read(folder)
    with open_executor(ray) as executor:
        pending = [
            planned_run
            for planned_run, row in zip(log.planned_runs, log.rows, strict=True)
            if row.state is RowState.PENDING
        ]
        # Which runs are traced shows only when the others are judged.
        log.campaign.check_can_continue(executor, None if trace else pending)
        return _run(log, executor, limits, screen, trace=trace)


def _refuse_what_parity_sets(common: Mapping[str, Any]) -> None:
    for option in list_options():
        if option.field in NOT_FOR_ALL and common.get(option.parameter) is not None:
            raise UsageError(
                Setting(option.parameter), "cannot be given to parity, which starts many runs", "Leave it out"
            )


def _describe_context(spec: ReplaySpec, machine: Machine) -> MatrixContext:
    """Describe the machine and the inputs. Slow: reads the inputs, and imports torch and transformers."""
    from actor_init.inputs.documents import find_documents
    from capture.file_format.capture_file import read_micro_batch
    from replay.resolution.job_defaults import find_source
    from replay.resolution.selection import select

    inputs_spec = replace(spec.inputs, shuffle_inputs=True, max_inputs=spec.inputs.max_inputs or NUM_INPUTS)
    inputs = select(inputs_spec, 0, 1).inputs
    if not inputs:
        raise UsageError("every input is damaged. Try: replay inspect, with that folder")
    batches = map(read_micro_batch, inputs)
    return MatrixContext(
        device="cuda" if machine.has_gpus else "cpu",
        num_devices=machine.num_devices,
        num_inputs=len(inputs),
        config=find_source(spec).config,
        must_pack=any(find_documents(batch).has_shared_rows for batch in batches),
    )


def _run(log: ParityLog, executor: Executor, limits: RunLimits, screen: IO[str], *, trace: bool) -> ParityResult:
    campaign = log.campaign
    campaign.open(executor, limits)
    judge, progress = MatrixJudge(), ParityProgress(log, screen)
    differences: Pairs = []
    with catch_interruption() as interruption:
        for references in (True, False):
            for number in log.run_rows(references=references):
                progress.show_run(number, log.rows[number], judge.judge(log.rows), campaign.num_running)
        if trace:
            differences.extend(FirstDifferences(log).find(judge.judge(log.rows)))
    result = judge.judge(log.rows)
    write_report(log, result, differences, progress)
    interruption.reraise(log.folder)
    failed = any(row.state in (RowState.FAILED, RowState.PENDING) for row in log.rows)
    return ParityResult.from_campaign(
        campaign,
        exit_code=0 if result.is_clean and result.cells and not failed else 1,
        matrix=result,
        first_differences=[text for _, text in differences],
    )


class FirstDifferences:
    """Find the first difference of each differing run. References and equivalents are traced once and shared.

    Only the inputs of one gradient are run, those of the pass where the two are farthest apart.
    """

    def __init__(self, log: ParityLog) -> None:
        self._campaign = log.campaign
        self._rows = {row.cell.name: row for row in log.rows}

    def find(self, result: MatrixResult) -> Iterator[tuple[str, str]]:
        """Yield a line for each run that differs."""
        distrusted = {name for noise in result.noises for name in noise.distrusted}
        measuring = {name for name, row in self._rows.items() if row.cell.varies in ROUNDING_VARIATIONS}
        sound = [name for name in result.cells if name in measuring - distrusted]
        for name, judged_cell in result.cells.items():
            if judged_cell.result is CellResult.DIFFERS:
                index = judged_cell.distances[judged_cell.deciding[0]].place
                try:
                    text = describe_first_difference(self._compare_cell(self._rows[name].cell, index, sound))
                except UsageError as error:
                    text = f"not found: {format_error_with_flags(error)}"
                yield "first", f"{name}: {text}"

    def _compare_cell(self, cell: Cell, index: int, sound: Sequence[str]) -> FirstDifference | None:
        """Find the first difference; `index` is that of the farthest pass."""
        num_inputs = cell.num_data_ranks * cell.spec.actor.resolved_grad_accumulation
        first = index // num_inputs * num_inputs
        other_cells = [self._rows[name].cell for name in sound if name != cell.name]
        equivalents = [other for other in other_cells if other.baseline == cell.baseline]
        reference = self._rows[cell.reference].cell
        folders = [self._trace(run_cell, first, num_inputs) for run_cell in (reference, cell, *equivalents)]
        return find_first_difference(folders[0], folders[1], folders[2:])

    def _trace(self, cell: Cell, first: int, num_inputs: int) -> Path:
        """Return the log of the traced run over the inputs of one gradient. Raises UsageError if it failed."""
        num_each = num_inputs // cell.num_data_ranks
        spec = replace(
            cell.spec,
            # The trace needs whole logits, whatever was typed.
            actor=replace(cell.spec.actor, grad_accumulation=num_each, head=Head.AUTO),
            inputs=replace(cell.spec.inputs, skip_inputs=first // cell.num_data_ranks, max_inputs=num_each),
            measure=replace(cell.spec.measure, trace=True, warmup=0),
        )
        home = f"traces/{first:04d}-{folder_name_of(cell.name)}"
        child = self._campaign.run(
            PlannedRun(home=home, spec=spec, num_processes=cell.num_processes, python=cell.python)
        )
        if child.exit_code != 0:
            raise UsageError(f"the traced run of {cell.name} failed: {child.error}")
        return PastRun.read(child.logs).folder
