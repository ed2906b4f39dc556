"""Run `replay mismatch`: how far are a rollout engine's log-probs from the replay's, under each dtype and kernel?

    replay       mean |d|  p99 |d|  max |d|      shift     KL k1     KL k3  ESS tokens  ESS sequences
    bf16, eager    0.0081    0.031    0.044   -0.00021   0.00021  6.05e-05       0.999          0.998
    fp32, eager    0.0079    0.030    0.041   -0.00018   0.00018  5.90e-05       0.999          0.998

d is the replay's log-prob minus the rollout's, in nats, of each action token. mismatch.json has the same numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from actor_init.as_json import json_bytes, to_json
from actor_init.backends.protocol import Backend, free_closed_backends, open_backend
from actor_init.model import ModelSource
from actor_init.model_positions import add_model_positions
from actor_init.spec import Dtype, UsageError
from actor_init.world import World
from capture.file_format.atomic_write import write_atomically
from capture.file_format.capture_file import read_call
from capture.file_format.micro_batch import CaptureError, MicroBatch, with_shift_labels_as_labels
from replay.commands.mismatch.statistics import Mismatch, Tokens, WorstToken, mismatch_of, tokens_of, worst_tokens
from replay.objective.inputs import ROLLOUT_LOG_PROBS, ObjectiveError, ObjectiveInputs, ObjectiveRecord, explain_missing
from replay.objective.objective import compute_negated_mean
from replay.options.option_parsing import spec_to_dict
from replay.options.spec import ReplaySpec
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import Columns, Pairs, describe_engine, pluralise, shorten_names
from replay.resolution.job_defaults import find_source
from replay.resolution.selection import Selection, select
from replay.runlog.writer import create_folder, list_versions
from replay.runner.observers import PositionMarker
from replay.runner.run_pass import PassInputs, prepare_actor_inputs, run_pass
from replay.watch.progress import Tracker
from replay.watch.stacks import extend_collective_timeouts
from replay.watch.watcher import watch_run

FILE = "mismatch.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One replay: its name, and its distance from the rollout."""

    name: str
    dtype: str
    attention: str
    mismatch: Mismatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """How far two replays are apart: the mean and the largest absolute difference of a token's log-prob."""

    one: str
    other: str
    mean: float
    largest: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchReport:
    """How far replays are from a rollout, and from each other; `worst` holds the tokens that are farthest apart."""

    spec: ReplaySpec
    list_versions: Mapping[str, str | None]
    replays: Sequence[Cell]
    distances: Sequence[Distance]
    worst: Sequence[WorstToken]

    @classmethod
    def of(cls, run: ReplaySpec, cells: Sequence[tuple[Cell, list[Tokens]]], num_worst: int) -> Self:
        return cls(
            spec=run,
            list_versions=list_versions(),
            replays=[cell for cell, _ in cells],
            distances=[_distance(cell, other) for number, cell in enumerate(cells) for other in cells[number + 1 :]],
            worst=worst_tokens([tokens for _, tokens in cells], num_worst),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of mismatch.json."""
        return {**to_json(self), "spec": spec_to_dict(self.spec)}


def mismatch(
    run: ReplaySpec, dtypes: Sequence[Dtype], kernels: Sequence[str], num_worst: int, json_file: Path | None
) -> int:
    """Replay the inputs' forwards under each dtype and kernel, print how far they are from the rollout, return 0.

    Raises UsageError for options that cannot be satisfied here, and inputs without the rollout's log-probs.
    """
    with World.from_env(run.actor.parallel) as world:
        return mismatch_in(world, run, dtypes, kernels, num_worst, json_file)


def mismatch_in(
    world: World,
    run: ReplaySpec,
    dtypes: Sequence[Dtype],
    kernels: Sequence[str],
    num_worst: int,
    json_file: Path | None = None,
) -> int:
    """Run `mismatch` in a world that is already open, and leave it open."""
    selection = select(run.inputs, world.data_rank, world.num_data_ranks)
    if not selection.inputs:
        raise UsageError(f"no input can be read: {selection.damaged[0][1]}")
    source = find_source(run)
    batches = [_read(path, source) for path in selection.inputs]
    folder = world.from_first(create_folder(run.measure.log_folder, "mismatch") if world.rank == 0 else None)
    cells: list[tuple[Cell, list[Tokens]]] = []
    with watch_run(world, folder, run.measure.timeout) as watch:
        extend_collective_timeouts(run.measure.timeout)
        for dtype in dtypes:
            for kernel in kernels:
                spec = replace(run, actor=replace(run.actor, dtype=dtype, attention=kernel).with_defaults())
                cells.append(_replayed(spec, source, world, watch.tracker, batches))
        if world.rank == 0:
            report = MismatchReport.of(run, cells, num_worst)
            print_report(report, _header(run, source, world, selection), folder)
            for path in [folder / FILE, *([json_file] if json_file is not None else [])]:
                write_atomically(path, json_bytes(report.to_dict()))
        world.gather(None)
    return 0


def _read(path: Path, source: ModelSource) -> tuple[MicroBatch, ObjectiveRecord]:
    """Read a capture. Raises UsageError if it cannot be read, or lacks the rollout's log-probs."""
    try:
        call = read_call(path)
        batch = add_model_positions(with_shift_labels_as_labels(call.micro_batch()), source.config)
    except CaptureError as error:
        raise UsageError(*error.args) from error
    recorded = ObjectiveRecord.collect(call, batch)
    if not any(name in recorded.tensors for name in ROLLOUT_LOG_PROBS):
        raise UsageError(explain_missing(recorded, ROLLOUT_LOG_PROBS))
    if not recorded.has_action_mask:
        raise UsageError(
            f"{recorded.source}: nothing says which tokens were sampled: no action mask, no labels. "
            "Try: recorder.note(action_mask=...) in the job (docs/objectives.md)"
        )
    return batch, recorded


@torch.no_grad()
def _replayed(
    spec: ReplaySpec,
    source: ModelSource,
    world: World,
    tracker: Tracker,
    batches: Sequence[tuple[MicroBatch, ObjectiveRecord]],
) -> tuple[Cell, list[Tokens]]:
    """Replay the forwards under one dtype and kernel. All ranks must call this."""
    backend = open_backend(spec.actor, source, world, lambda _: tracker.report_progress())
    try:
        own = [_forward(backend, spec, source, world, tracker, *one) for one in batches]
        attention = str(backend.facts()["attention_kernel"])
    finally:
        backend.close()
        del backend
        free_closed_backends()
    everything = _of_all_data_ranks(own, world)
    if not sum(len(one.id_N) for one in everything):
        raise UsageError("no row of these inputs has an action token. Try: other inputs")
    cell = Cell(
        name=f"{spec.actor.dtype}, {attention}",
        dtype=spec.actor.dtype.value,
        attention=attention,
        mismatch=mismatch_of(
            torch.cat([one.rollout_N for one in everything]),
            torch.cat([one.replay_N for one in everything]),
            _numbered(everything),
        ),
    )
    return cell, everything


def _forward(
    backend: Backend,
    spec: ReplaySpec,
    source: ModelSource,
    world: World,
    tracker: Tracker,
    batch: MicroBatch,
    recorded: ObjectiveRecord,
) -> Tokens:
    """Run one forward, and put its log-probs beside the rollout's."""
    tracker.begin_pass(tracker.position.index + 1, batch.origin.source)
    tracker.set_shapes(batch.num_rows, batch.num_padded_tokens, batch.num_real_tokens)
    inputs = prepare_actor_inputs(batch, spec.actor, source, world)
    forward = PassInputs(
        actor_inputs=inputs,
        compute_loss=partial(compute_negated_mean, inputs=inputs),
        train_mode=False,
        builds_graph=False,
        runs_backward=False,
        captured_row_length=batch.sequences_BS.shape[1],
    )
    outcome = run_pass(backend, forward, observers=[PositionMarker(tracker)])
    given = ObjectiveInputs(
        log_probs_BA=outcome.log_probs_BA,
        action_mask_BA=inputs.action_mask_BA,
        recorded=recorded.to(world.device),
        num_window_tokens=int(inputs.action_mask_BA.sum()),
        num_window_passes=1,
    )
    try:
        return tokens_of(given, batch.sequences_BS)
    except ObjectiveError as error:
        raise UsageError(str(error)) from error


def _of_all_data_ranks(own: list[Tokens], world: World) -> list[Tokens]:
    """Return the micro-batches of each data rank, in their order; ranks that share one have the same."""
    by_data_rank: dict[int, list[Tokens]] = {}
    for data_rank, tokens in world.gather((world.data_rank, own)):
        by_data_rank.setdefault(data_rank, tokens)
    return [one for data_rank in sorted(by_data_rank) for one in by_data_rank[data_rank]]


def _numbered(batches: Sequence[Tokens]) -> torch.Tensor:
    """Number the sequences of all micro-batches together."""
    numbers, first = [], 0
    for one in batches:
        numbers.append(one.sequence_N + first)
        first += int(one.sequence_N.max()) + 1 if len(one.sequence_N) else 0
    return torch.cat(numbers)


def _distance(one: tuple[Cell, list[Tokens]], other: tuple[Cell, list[Tokens]]) -> Distance:
    apart_N = torch.cat([(a.replay_N - b.replay_N).abs() for a, b in zip(one[1], other[1], strict=True)])
    return Distance(
        one=one[0].name, other=other[0].name, mean=float(apart_N.double().mean()), largest=float(apart_N.max())
    )


def print_report(report: MismatchReport, header: Pairs, folder: Path) -> None:
    out = open_console()
    print_pairs(out, header)
    print_line(out)
    print_table(out, replays_table([(cell.name, cell.mismatch) for cell in report.replays]))
    if report.distances:
        print_line(out)
        print_table(out, distances_table([(f"{d.one} and {d.other}", d.mean, d.largest) for d in report.distances]))
    print_line(out)
    print_table(out, worst_table(report.worst, [cell.name for cell in report.replays]))
    print_line(out)
    print_pairs(out, [("nearest", _nearest(report)), ("log", str(folder))])


def _nearest(report: MismatchReport) -> str:
    """Name the replay that is nearest to the rollout, and what dtypes and kernels alone are apart."""
    nearest = min(report.replays, key=lambda cell: cell.mismatch.mean)
    said = f"{nearest.name}: {nearest.mismatch.mean:.3g} a token"
    if report.distances:
        widest = max(report.distances, key=lambda distance: distance.mean)
        said += f"; replays are up to {widest.mean:.3g} from each other ({widest.one} and {widest.other})"
        if widest.mean < nearest.mismatch.mean / 2:
            said += ": dtype and kernel do not explain it. Other weights, temperature, or another engine's kernels"
    return said


def _header(run: ReplaySpec, source: ModelSource, world: World, selection: Selection) -> Pairs:
    layers = source.config.get_text_config().num_hidden_layers
    settled = run.actor.with_defaults()
    return [
        ("model", f"{source.name}, {pluralise(layers, 'layer')}; weights {source.weights.describe()}"),
        (
            "inputs",
            f"{pluralise(len(selection.inputs), 'input')}{' a data rank' * (world.num_data_ranks > 1)}, "
            f"{selection.dealing}",
        ),
        (
            "actor",
            f"{describe_engine(settled.backend, settled.resolved_zero_stage)}, "
            f"{'packed' if settled.packs else 'padded'}, {pluralise(world.world_size, 'process')}",
        ),
    ]


def replays_table(replays: Sequence[tuple[str, Mismatch]]) -> Columns:
    """Return a row for each replay: how far its log-probs are from the rollout's."""
    return {
        "configuration": [name for name, _ in replays],
        "tokens": [f"{one.num_tokens:,}" for _, one in replays],
        "mean |d|": [f"{one.mean:.3g}" for _, one in replays],
        "p99 |d|": [f"{one.p99:.3g}" for _, one in replays],
        "max |d|": [f"{one.largest:.3g}" for _, one in replays],
        "KL k1": [f"{one.kl_k1:.3g}" for _, one in replays],
        "KL k3": [f"{one.kl_k3:.3g}" for _, one in replays],
        "ESS tokens": [f"{one.ess_tokens:.4f}" for _, one in replays],
        "ESS sequences": [f"{one.ess_sequences:.4f}" for _, one in replays],
    }


def distances_table(pairs: Sequence[tuple[str, float, float]]) -> Columns:
    """Return a row for each two replays: how far they are from each other."""
    return {
        "configuration": [name for name, _, _ in pairs],
        "mean |d|": [f"{mean:.3g}" for _, mean, _ in pairs],
        "max |d|": [f"{largest:.3g}" for _, _, largest in pairs],
    }


def worst_table(worst: Sequence[WorstToken], names: Sequence[str]) -> Columns:
    """Return a row for each of the worst tokens, with its neighbours' ids and differences."""
    columns: Columns = {
        "input": [shorten_names(one.source) for one in worst],
        "row": [str(one.row) for one in worst],
        "token": [str(one.column) for one in worst],
        "id": [str(one.token) for one in worst],
        "rollout": [f"{one.rollout:.4f}" for one in worst],
    }
    for number, name in enumerate(names):
        columns[name] = [f"{one.replays[number]:.4f}" for one in worst]
    columns["before"] = [_neighbour(*one.before) for one in worst]
    columns["after"] = [_neighbour(*one.after) for one in worst]
    return columns


def _neighbour(token: int, apart: float | None) -> str:
    if token < 0:
        return "-"
    return str(token) if apart is None else f"{token} ({apart:+.3g})"
