"""Run `replay diagnose`, which checks whether this model can learn these inputs here: a line per check, with figures.

    model      inputs/sample/actor.json, 4 layers; weights random, seed 0
    inputs     4 inputs from inputs/sample, rank by rank in recorded order
    actor      deepspeed, ZeRO stage 1, bf16, packed, 1 process

      note         attention kernel     sdpa, for flash-attn has no CPU kernel
      ok           same pass twice      loss by 0, bound 0.001; gradient by 0 at most, bound 0.05, lm_head.weight
      not run      gradient on ranks    one process; Try: torchrun --nproc-per-node 2 -m replay diagnose

Lines, and diagnose.json, are written as they become known.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

from actor_init.as_json import json_bytes, parse_json, to_json
from actor_init.attention.kernel_choice import choose_kernel_name_on_all_ranks
from actor_init.inputs.packing import prepare_inputs
from actor_init.model import ModelSource
from actor_init.model_positions import add_model_positions
from actor_init.probe.layout_choice import choose_layout
from actor_init.spec import ActorSpec, UsageError
from actor_init.world import World
from capture.facts import Setting
from capture.file_format.atomic_write import write_atomically
from capture.file_format.capture_file import read_micro_batch
from capture.file_format.micro_batch import CaptureError, MicroBatch, with_shift_labels_as_labels
from replay.campaign.campaign_options import list_words
from replay.campaign.result import GrowingResult, ResultStatus
from replay.commands.diagnose.checks import DiagnosisCase, run_checks
from replay.commands.diagnose.untimed_actor import select_rows
from replay.objective.objective import select_loss_tokens
from replay.options.option_parsing import format_command_line
from replay.options.spec import ReplaySpec
from replay.output.text import CheckResult, CheckStatus, describe_engine, format_check, pluralise
from replay.resolution.job_defaults import apply_choices, choose_from_job, find_source
from replay.resolution.selection import Selection, read_first_call, select
from replay.runlog.writer import create_folder, list_versions
from replay.runner.run_pass import check_vocabulary
from replay.watch.stacks import extend_collective_timeouts
from replay.watch.watcher import watch_run

FILE = "diagnose.json"
# The inputs of each data rank without --max-inputs.
NUM_DEFAULT_INPUTS = 4
# The learning rate times the hidden size: AdamW's best rate is proportional to 1 / width,
# https://arxiv.org/abs/2203.03466.
RATE_TIMES_WIDTH = 0.2
# Fewer tokens are learned by any step, whatever is wrong.
TOKENS_TO_LEARN = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What diagnose.json has: what was checked, and the checks so far; `failing` names those that fail."""

    status: ResultStatus
    command: str
    spec: ReplaySpec
    versions: Mapping[str, str | None]
    world_size: int
    model: str
    inputs: str
    actor: str
    failing: Sequence[str] = ()
    checks: Sequence[CheckResult] = ()

    def add(self, check: CheckResult) -> Self:
        failing = [*self.failing, *([check.name] if check.fails else [])]
        return replace(self, checks=[*self.checks, check], failing=failing)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiagnoseResult(GrowingResult):
    """Whether the model can learn the inputs.

    status   `running` of one that broke off before its last check
    checks   in the order in which they ran, each with its figures and what to look at next
    failing  names of those that fail; the exit code is 0 if all ran, and none fails
    """

    checks: Sequence[CheckResult]
    failing: Sequence[str]

    @classmethod
    def from_diagnosis(cls, diagnosis: Diagnosis, folder: Path) -> Self:
        return cls.from_parts(
            folder,
            diagnosis.command,
            diagnosis,
            exit_code=int(bool(diagnosis.failing) or diagnosis.status is not ResultStatus.FINISHED),
            status=diagnosis.status,
            checks=diagnosis.checks,
            failing=diagnosis.failing,
        )

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read what `replay diagnose` left in its log folder, as far as it came. Raises UsageError if it is damaged."""
        path = folder / FILE
        return cls.from_diagnosis(parse_json(Diagnosis, path.read_bytes(), source=str(path)), folder)

    def _list_rows(self) -> Iterable[dict[str, Any]]:
        return map(to_json, self.checks)


def diagnose(
    run: ReplaySpec, screen: IO[str], *, num_steps: int, learning_rate: float | None, show_traceback: bool
) -> DiagnoseResult:
    """Print all checks. The exit code of the result is 0 if none of those that ran failed, else 1.

    Raises UsageError for options that cannot be satisfied here.
    """
    with World.from_env(run.actor.parallel) as world:
        return diagnose_in_world(
            world, run, screen, num_steps=num_steps, learning_rate=learning_rate, show_traceback=show_traceback
        )


def diagnose_in_world(
    world: World,
    run: ReplaySpec,
    screen: IO[str],
    *,
    num_steps: int,
    learning_rate: float | None = None,
    show_traceback: bool = False,
) -> DiagnoseResult:
    """Run `diagnose` in a world that is already open, and leave it open.

    Everything that can refuse the options comes before the log folder is made, and is the same on all ranks.
    """
    own_words = list_words({"steps": num_steps, "learning_rate": learning_rate})
    command = shlex.join(["replay", "diagnose", *own_words, *format_command_line(run)])
    is_packing_typed = run.actor.packing is not None
    if not run.actor.has_optimizer:
        no_optimizer = Setting("optimizer", "none")
        raise UsageError("diagnose", f"trains, which {no_optimizer} prevents", f"Try: no {Setting('optimizer')}")
    inputs = replace(run.inputs, max_inputs=run.inputs.max_inputs or NUM_DEFAULT_INPUTS)
    selection = select(inputs, world.data_rank, world.num_data_ranks)
    if not selection.inputs:
        raise UsageError(f"no input can be read: {selection.damaged[0][1]}")
    choices = choose_from_job(run, read_first_call(selection), selection, world.device.type)
    run = world.broadcast_from_rank0(replace(run, actor=apply_choices(run.actor, choices)))
    source = find_source(run)
    width = source.config.get_text_config().hidden_size
    actor, layout = choose_layout(run.actor, source.config, world, is_typed=is_packing_typed)
    # `choose_layout` has asked for the kernel on rank 0 alone.
    choose_kernel_name_on_all_ranks(actor, world, source.config)
    source = replace(source, layout=layout)
    rate = RATE_TIMES_WIDTH / width if learning_rate is None else learning_rate
    spec = replace(actor, learning_rate=rate)
    read_batch = partial(_read_batch, run=run, source=source)
    batches = [read_batch(path) for path in selection.inputs]
    row = _find_shortest_row([read_batch(path) for path in world.broadcast_from_rank0(selection.inputs)])
    folder = world.broadcast_from_rank0(create_folder(run.measure.log_folder, "diagnose") if world.rank == 0 else None)
    diagnosis = Diagnosis(
        status=ResultStatus.RUNNING,
        command=command,
        spec=run,
        versions=list_versions(),
        world_size=world.world_size,
        **_describe_case(source, spec, selection, world),
    )
    console = DiagnosisConsole(folder, screen) if world.rank == 0 else None
    if console is not None:
        console.show_header(diagnosis)
    try:
        with watch_run(world, folder, run.measure.timeout, show_traceback=show_traceback) as watch:
            extend_collective_timeouts(run.measure.timeout)
            case = DiagnosisCase(
                spec=spec,
                source=source,
                world=world,
                tracker=watch.tracker,
                batches=batches,
                row=row,
                num_steps=num_steps,
            )
            for rank_check in run_checks(case, show_traceback=show_traceback):
                check = choose_check(world.gather(rank_check))
                diagnosis = diagnosis.add(check)
                if console is not None:
                    console.show_check(check, diagnosis)
    except KeyboardInterrupt:
        if console is not None:
            console.show_folder()
        raise
    diagnosis = replace(diagnosis, status=ResultStatus.FINISHED)
    if console is not None:
        console.finish(diagnosis)
    return DiagnoseResult.from_diagnosis(diagnosis, folder)


def _describe_case(source: ModelSource, spec: ActorSpec, selection: Selection, world: World) -> dict[str, Any]:
    """Return the lines of the header, by name."""
    layers = source.config.get_text_config().num_hidden_layers
    axes = {"tp": spec.parallel.tp, "ring": spec.parallel.ring}
    ranks = [pluralise(world.world_size, "process"), *(f"{axis} {size}" for axis, size in axes.items() if size > 1)]
    return {
        "model": f"{source.name}, {pluralise(layers, 'layer')}; weights {source.weights.describe()}",
        "inputs": f"{pluralise(len(selection.inputs), 'input')}"
        f"{' a data rank' * (world.num_data_ranks > 1)}, {selection.dealing}",
        "actor": f"{describe_engine(spec.backend, spec.resolved_zero_stage)}, {spec.dtype}, "
        f"{source.layout_under(spec).describe()}, on {world.device.type}, {', '.join(ranks)}",
    }


def choose_check(ranks: Sequence[CheckResult]) -> CheckResult:
    """Make one check of the results of every rank: it fails if it fails on any of them."""
    failing = [(rank, check) for rank, check in enumerate(ranks) if check.fails]
    if not failing:
        return ranks[0]
    rank, check = failing[0]
    return replace(check, found=f"on rank {rank}: {check.found}") if len(failing) < len(ranks) else check


@dataclass(frozen=True, slots=True)
class DiagnosisConsole:
    """Prints checks as they become known, and writes them into diagnose.json of the folder."""

    folder: Path
    screen: IO[str]

    def show_header(self, diagnosis: Diagnosis) -> None:
        for name in ("model", "inputs", "actor"):
            self._print(f"{name:<11}{getattr(diagnosis, name)}")
        self._print("")
        self._write(diagnosis)

    def show_check(self, check: CheckResult, diagnosis: Diagnosis) -> None:
        self._print(f"  {format_check(check)}")
        self._write(diagnosis)

    def finish(self, diagnosis: Diagnosis) -> None:
        """Print which checks failed and where the log is."""
        failing = diagnosis.failing
        num_run = sum(check.status in (CheckStatus.OK, CheckStatus.FAILED) for check in diagnosis.checks)
        if failing:
            self._print(f"\n{pluralise(len(failing), 'check')} of {num_run} failed: {', '.join(failing)}")
        else:
            self._print(f"\nall {num_run} checks that were run passed")
        self.show_folder()
        self._write(diagnosis)

    def show_folder(self) -> None:
        self._print(f"log        {self.folder}")

    def _print(self, text: str) -> None:
        print(text, file=self.screen, flush=True)

    def _write(self, diagnosis: Diagnosis) -> None:
        write_atomically(self.folder / FILE, json_bytes(diagnosis))


def _read_batch(path: Path, *, run: ReplaySpec, source: ModelSource) -> MicroBatch:
    """Read a capture. Raises UsageError if this model cannot take it under the given options."""
    try:
        captured = with_shift_labels_as_labels(read_micro_batch(path))
        batch = select_loss_tokens(run.measure.loss, add_model_positions(captured, source.config))
        check_vocabulary(batch, source)
        prepare_inputs(batch, packing=source.layout_under(run.actor).joins_rows)
    except CaptureError as error:
        raise UsageError(*error.args) from error
    return batch


def _find_shortest_row(batches: Sequence[MicroBatch]) -> MicroBatch:
    """Return the shortest row with enough tokens to learn, or else the one with most. Raises UsageError if none has
    any.
    """
    rows = [select_rows(batch, [row]) for batch in batches for row in range(batch.num_rows)]
    counts = [int(prepare_inputs(row, packing=True).action_mask_BA.sum()) if row.num_real_tokens else 0 for row in rows]
    if not any(counts):
        advice = f"Try: {Setting('loss', 'sft')}, or other inputs"
        raise UsageError("no row of these inputs", "has a token to learn", advice)
    least = min(TOKENS_TO_LEARN, max(counts))
    candidates = [row for row, count in zip(rows, counts, strict=True) if count >= least]
    return min(candidates, key=lambda row: row.num_real_tokens)
