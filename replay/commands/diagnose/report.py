"""Run `replay diagnose`, which checks whether this model can learn these inputs here: a line per check, with figures.

    model      inputs/sample/actor.json, 4 layers; weights random, seed 0
    inputs     4 inputs from inputs/sample, rank by rank in recorded order
    actor      deepspeed, ZeRO stage 1, bf16, packed, 1 process

      note         attention kernel     sdpa, for flash-attn has no CPU kernel
      ok           same pass twice      loss by 0, bound 0.001; gradient by 0 at most, bound 0.05, lm_head.weight
      not run      gradient on ranks    one process; Try: torchrun --nproc-per-node 2 -m replay diagnose

Lines, and diagnose.json, are written as they become known.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from actor_init.as_json import json_bytes
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
from replay.commands.diagnose.checks import DiagnosisCase, run_checks
from replay.commands.diagnose.untimed_actor import select_rows
from replay.objective.objective import select_loss_tokens
from replay.options.option_parsing import spec_to_dict
from replay.options.spec import ReplaySpec
from replay.output.text import CheckResult, CheckStatus, describe_engine, format_check, pluralise
from replay.resolution.job_defaults import apply_choices, choose_from_job, find_source
from replay.resolution.selection import Selection, read_first_call, select
from replay.runlog.writer import create_folder, list_versions
from replay.runner.run_pass import check_vocabulary
from replay.watch.stacks import extend_collective_timeouts
from replay.watch.watcher import watch_run

# The inputs of each data rank without --max-inputs.
NUM_DEFAULT_INPUTS = 4
# The learning rate times the hidden size: AdamW's best rate is proportional to 1 / width,
# https://arxiv.org/abs/2203.03466.
RATE_TIMES_WIDTH = 0.2
# Fewer tokens are learned by any step, whatever is wrong.
TOKENS_TO_LEARN = 16


def diagnose(
    run: ReplaySpec, *, num_steps: int, learning_rate: float | None, json_file: Path | None, show_traceback: bool
) -> int:
    """Print all checks and return 0 if none of those that ran failed, else 1.

    Raises UsageError for options that cannot be satisfied here.
    """
    with World.from_env(run.actor.parallel) as world:
        return diagnose_in_world(
            world,
            run,
            num_steps=num_steps,
            learning_rate=learning_rate,
            json_file=json_file,
            show_traceback=show_traceback,
        )


def diagnose_in_world(
    world: World,
    run: ReplaySpec,
    *,
    num_steps: int,
    learning_rate: float | None = None,
    json_file: Path | None = None,
    show_traceback: bool = False,
) -> int:
    """Run `diagnose` in a world that is already open, and leave it open.

    Everything that can refuse the options comes before the log folder is made, and is the same on all ranks.
    """
    is_packing_typed = run.actor.packing is not None
    if not run.actor.has_optimizer:
        no_optimizer = Setting("optimizer", "none")
        raise UsageError("diagnose", f"trains, which {no_optimizer} prevents", f"Try: no {Setting('optimizer')}")
    if json_file is not None:
        _check_writable(json_file)
    inputs = replace(run.inputs, max_inputs=run.inputs.max_inputs or NUM_DEFAULT_INPUTS)
    selection = select(inputs, world.data_rank, world.num_data_ranks)
    if not selection.inputs:
        raise UsageError(f"no input can be read: {selection.damaged[0][1]}")
    choices = choose_from_job(run, read_first_call(selection), selection, world.device.type)
    run = world.from_first(replace(run, actor=apply_choices(run.actor, choices)))
    source = find_source(run)
    width = source.config.get_text_config().hidden_size
    actor, layout = choose_layout(run.actor, source.config, world, is_typed=is_packing_typed)
    source = replace(source, layout=layout)
    rate = RATE_TIMES_WIDTH / width if learning_rate is None else learning_rate
    spec = replace(actor, learning_rate=rate)
    read_batch = partial(_read_batch, run=run, source=source)
    batches = [read_batch(path) for path in selection.inputs]
    row = _find_shortest_row([read_batch(path) for path in world.from_first(selection.inputs)])
    folder = world.from_first(create_folder(run.measure.log_folder, "diagnose") if world.rank == 0 else None)
    report = DiagnosisReport(world, run, [folder / "diagnose.json", *([json_file] if json_file else [])])
    report.print_header(source, spec, selection)
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
        for check in run_checks(case, show_traceback=show_traceback):
            report.add(world.gather(check))
    return report.finish(folder)


class DiagnosisReport:
    """Print and write checks on rank 0, and determine every rank's exit code."""

    def __init__(self, world: World, run: ReplaySpec, files: Sequence[Path]) -> None:
        self._world = world
        self._files = files
        self._checks: list[CheckResult] = []
        self._facts: dict[str, Any] = {
            "spec": spec_to_dict(run),
            "versions": list_versions(),
            "world_size": world.world_size,
        }

    def print_header(self, source: ModelSource, spec: ActorSpec, selection: Selection) -> None:
        layers = source.config.get_text_config().num_hidden_layers
        axes = {"tp": spec.parallel.tp, "ring": spec.parallel.ring}
        lines = {
            "model": f"{source.name}, {pluralise(layers, 'layer')}; weights {source.weights.describe()}",
            "inputs": f"{pluralise(len(selection.inputs), 'input')}"
            f"{' a data rank' * (self._world.num_data_ranks > 1)}, {selection.dealing}",
            "actor": f"{describe_engine(spec.backend, spec.resolved_zero_stage)}, {spec.dtype}, "
            f"{source.layout_under(spec).describe()}, on {self._world.device.type}, "
            + ", ".join(
                [pluralise(self._world.world_size, "process"), *(f"{a} {n}" for a, n in axes.items() if n > 1)]
            ),
        }
        self._facts |= lines
        for name, text in lines.items():
            self._say(f"{name:<11}{text}")
        self._say("")

    def add(self, ranks: Sequence[CheckResult]) -> None:
        """Add one check from the results of every rank: it fails if it fails on any of them."""
        failing = [(rank, check) for rank, check in enumerate(ranks) if check.fails]
        check = ranks[0]
        if failing:
            rank, check = failing[0]
            if len(failing) < len(ranks):
                check = replace(check, found=f"on rank {rank}: {check.found}")
        self._checks.append(check)
        self._say(f"  {format_check(check)}")
        self._write("running")

    def finish(self, folder: Path) -> int:
        """Print the last line and return the exit code."""
        failing = self._list_failing()
        num_run = sum(check.status in (CheckStatus.OK, CheckStatus.FAILED) for check in self._checks)
        if failing:
            self._say(f"\n{pluralise(len(failing), 'check')} of {num_run} failed: {', '.join(failing)}")
        else:
            self._say(f"\nall {num_run} checks that were run passed")
        self._say(f"log        {folder}")
        self._write("finished")
        return 1 if failing else 0

    def _list_failing(self) -> list[str]:
        return [check.name for check in self._checks if check.fails]

    def _say(self, text: str) -> None:
        if self._world.rank == 0:
            print(text, flush=True)

    def _write(self, status: str) -> None:
        if self._world.rank == 0:
            values = {"status": status, **self._facts, "failing": self._list_failing(), "checks": self._checks}
            for path in self._files:
                write_atomically(path, json_bytes(values))


def _check_writable(path: Path) -> None:
    try:
        path.open("a").close()
    except OSError as error:
        setting = Setting("json", path)
        raise UsageError(setting, f": {error.strerror}", f"Try: {setting.with_value('diagnose.json')}") from None


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
