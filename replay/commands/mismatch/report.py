"""Run `replay mismatch`, which measures how far a rollout engine's log-probs are from the replay's.

The inputs are replayed under each dtype and kernel:

    replay       mean |d|  p99 |d|  max |d|      shift     KL k1     KL k3  ESS tokens  ESS sequences
    bf16, eager    0.0081    0.031    0.044   -0.00021   0.00021  6.05e-05       0.999          0.998
    fp32, eager    0.0079    0.030    0.041   -0.00018   0.00018  5.90e-05       0.999          0.998

d is the replay's log-prob minus the rollout's, in nats, of each action token. mismatch.json has the same numbers.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

import torch

from actor_init.as_json import AnyFloat, json_bytes, parse_json
from actor_init.attention.kernel_choice import choose_kernel_name_on_all_ranks
from actor_init.backends.protocol import Backend, free_closed_backends, open_backend
from actor_init.model import ModelSource
from actor_init.model_positions import add_model_positions
from actor_init.spec import Dtype, UsageError
from actor_init.world import World
from capture.file_format.atomic_write import write_atomically
from capture.file_format.capture_file import read_call
from capture.file_format.micro_batch import CaptureError, MicroBatch, with_shift_labels_as_labels
from replay.campaign.campaign_options import list_words
from replay.campaign.result import GrowingResult, ResultStatus
from replay.commands.mismatch.statistics import (
    ActionTokens,
    Mismatch,
    WorstToken,
    collect_action_tokens,
    find_worst_tokens,
    measure_mismatch,
)
from replay.objective.inputs import ObjectiveData, ObjectiveError, ObjectiveInputs
from replay.objective.objective import compute_negated_mean
from replay.options.declarations.tensor_names import ROLLOUT_LOG_PROBS
from replay.options.needed_tensors import explain_missing
from replay.options.option_parsing import format_command_line
from replay.options.spec import ReplaySpec
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import Columns, Pairs, describe_engine, pluralise, shorten_names
from replay.resolution.job_defaults import find_source
from replay.resolution.selection import Selection, select
from replay.runlog.writer import create_folder, list_versions
from replay.runner.observers import PhaseReporter
from replay.runner.run_pass import PassInputs, prepare_actor_inputs, run_pass
from replay.watch.progress import Tracker
from replay.watch.stacks import extend_collective_timeouts
from replay.watch.watcher import watch_run

FILE = "mismatch.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchCell:
    """One replay: its name, and its distance from the rollout."""

    name: str
    dtype: str
    attention: str
    mismatch: Mismatch


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayDistance:
    """How far two replays are apart: the mean and the largest absolute difference of a token's log-prob."""

    one: str
    other: str
    mean: AnyFloat
    largest: AnyFloat


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchReport:
    """What mismatch.json has: how far replays are from a rollout, and from each other, and the worst tokens.

    It is written anew behind each replay.
    """

    status: ResultStatus
    command: str
    spec: ReplaySpec
    versions: Mapping[str, str | None]
    replays: Sequence[MismatchCell]
    distances: Sequence[ReplayDistance]
    worst: Sequence[WorstToken]

    @classmethod
    def build(
        cls,
        status: ResultStatus,
        run: ReplaySpec,
        command: str,
        cells: Sequence[tuple[MismatchCell, list[ActionTokens]]],
        distances: Mapping[tuple[int, int], ReplayDistance],
        num_worst: int,
    ) -> Self:
        return cls(
            status=status,
            command=command,
            spec=run,
            versions=list_versions(),
            replays=[cell for cell, _ in cells],
            distances=[distances[pair] for pair in sorted(distances)],
            worst=find_worst_tokens([tokens for _, tokens in cells], num_worst) if cells else [],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchResult(GrowingResult):
    """How far replays are from a rollout, and from each other.

    status     `running` of one that broke off before its last replay; the exit code is 0 otherwise
    replays    a replay for each dtype and kernel, and its distance from the rollout
    distances  of each two replays
    worst      the tokens on which the first replay is farthest from the rollout, farthest first
    """

    replays: Sequence[MismatchCell]
    distances: Sequence[ReplayDistance]
    worst: Sequence[WorstToken]

    @classmethod
    def from_report(cls, report: MismatchReport, folder: Path) -> Self:
        return cls.from_parts(
            folder,
            report.command,
            report,
            exit_code=int(report.status is not ResultStatus.FINISHED),
            status=report.status,
            replays=report.replays,
            distances=report.distances,
            worst=report.worst,
        )

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read what `replay mismatch` left in its log folder, as far as it came. Raises UsageError if it is damaged."""
        path = folder / FILE
        return cls.from_report(parse_json(MismatchReport, path.read_bytes(), source=str(path)), folder)

    def _list_rows(self) -> Iterable[dict[str, Any]]:
        for cell in self.replays:
            yield {"name": cell.name, "dtype": cell.dtype, "attention": cell.attention, **asdict(cell.mismatch)}


def mismatch(
    run: ReplaySpec, dtypes: Sequence[Dtype], kernels: Sequence[str], num_worst: int, screen: IO[str]
) -> MismatchResult:
    """Replay the inputs' forwards under each dtype and kernel, and print how far they are from the rollout.

    Raises UsageError for options that cannot be satisfied here, and inputs without the rollout's log-probs.
    """
    with World.from_env(run.actor.parallel) as world:
        return mismatch_in_world(world, run, dtypes, kernels, num_worst, screen)


def mismatch_in_world(
    world: World,
    run: ReplaySpec,
    dtypes: Sequence[Dtype],
    kernels: Sequence[str],
    num_worst: int,
    screen: IO[str],
) -> MismatchResult:
    """Run `mismatch` in a world that is already open, and leave it open."""
    own_words = list_words({"dtype": ",".join(dtypes), "attention": ",".join(kernels), "worst": num_worst})
    command = shlex.join(["replay", "mismatch", *own_words, *format_command_line(run)])
    selection = select(run.inputs, world.data_rank, world.num_data_ranks)
    if not selection.inputs:
        raise UsageError(f"no input can be read: {selection.damaged[0][1]}")
    source = find_source(run)
    specs = [
        replace(run, actor=replace(run.actor, dtype=dtype, attention=kernel).with_defaults())
        for dtype in dtypes
        for kernel in kernels
    ]
    # A rank that found out alone, as it opens its actor, would leave the others waiting for it.
    for spec in specs:
        choose_kernel_name_on_all_ranks(spec.actor, world, source.config)
    batches = [_read_input(path, source) for path in selection.inputs]
    folder = world.broadcast_from_rank0(create_folder(run.measure.log_folder, "mismatch") if world.rank == 0 else None)
    cells: list[tuple[MismatchCell, list[ActionTokens]]] = []
    # By the numbers of two replays, each of which is measured once.
    distances: dict[tuple[int, int], ReplayDistance] = {}

    def write_report() -> MismatchReport:
        status = ResultStatus.FINISHED if len(cells) == len(specs) else ResultStatus.RUNNING
        report = MismatchReport.build(status, run, command, cells, distances, num_worst)
        if world.rank == 0:
            write_atomically(folder / FILE, json_bytes(report))
        return report

    def show_report() -> None:
        if world.rank == 0:
            print_report(report, _list_header(run, source, world, selection), folder, screen)

    report = write_report()
    try:
        with watch_run(world, folder, run.measure.timeout) as watch:
            extend_collective_timeouts(run.measure.timeout)
            for number, spec in enumerate(specs):
                latest = _replay_forwards(spec, source, world, watch.tracker, batches)
                distances |= {(before, number): _measure_distance(cell, latest) for before, cell in enumerate(cells)}
                cells.append(latest)
                report = write_report()
            world.gather(None)
    except KeyboardInterrupt:
        show_report()
        raise
    show_report()
    return MismatchResult.from_report(report, folder)


def _read_input(path: Path, source: ModelSource) -> tuple[MicroBatch, ObjectiveData]:
    """Read a capture. Raises UsageError if it cannot be read, or lacks the rollout's log-probs."""
    try:
        call = read_call(path)
        batch = add_model_positions(with_shift_labels_as_labels(call.micro_batch()), source.config)
    except CaptureError as error:
        raise UsageError(*error.args) from error
    recorded = ObjectiveData.collect(call, batch)
    if not any(name in recorded.tensors for name in ROLLOUT_LOG_PROBS):
        raise UsageError(explain_missing(recorded, ROLLOUT_LOG_PROBS))
    if not recorded.has_action_mask:
        raise UsageError(
            f"{recorded.source}: nothing says which tokens were sampled: no action mask, no labels. "
            "Try: recorder.note(action_mask=...) in the job (docs/objectives.md)"
        )
    return batch, recorded


@torch.no_grad()
def _replay_forwards(
    spec: ReplaySpec,
    source: ModelSource,
    world: World,
    tracker: Tracker,
    batches: Sequence[tuple[MicroBatch, ObjectiveData]],
) -> tuple[MismatchCell, list[ActionTokens]]:
    """Replay the forwards under one dtype and kernel. All ranks must call this."""
    backend = open_backend(spec.actor, source, world, lambda _: tracker.report_progress())
    try:
        rank_tokens = [
            _run_forward(backend, spec, source, world, tracker, batch, recorded) for batch, recorded in batches
        ]
        attention = str(backend.facts()["attention_kernel"])
    finally:
        backend.close()
        del backend
        free_closed_backends()
    all_tokens = gather_data_ranks(rank_tokens, world)
    if not any(len(tokens.id_N) for tokens in all_tokens):
        raise UsageError("no row of these inputs has an action token. Try: other inputs")
    cell = MismatchCell(
        name=f"{spec.actor.dtype}, {attention}",
        dtype=spec.actor.dtype.value,
        attention=attention,
        mismatch=measure_mismatch(
            torch.cat([tokens.rollout_N for tokens in all_tokens]),
            torch.cat([tokens.replay_N for tokens in all_tokens]),
            number_sequences(all_tokens),
        ),
    )
    return cell, all_tokens


def _run_forward(
    backend: Backend,
    spec: ReplaySpec,
    source: ModelSource,
    world: World,
    tracker: Tracker,
    batch: MicroBatch,
    recorded: ObjectiveData,
) -> ActionTokens:
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
    outcome = run_pass(backend, forward, observers=[PhaseReporter(tracker)])
    objective_inputs = ObjectiveInputs(
        log_probs_BA=outcome.log_probs_BA,
        action_mask_BA=inputs.action_mask_BA,
        recorded=recorded.to(world.device),
        num_window_tokens=int(inputs.action_mask_BA.sum()),
        num_window_passes=1,
    )
    try:
        return collect_action_tokens(objective_inputs, batch.sequences_BS)
    except ObjectiveError as error:
        raise UsageError(str(error)) from error


def gather_data_ranks(rank_tokens: list[ActionTokens], world: World) -> list[ActionTokens]:
    """Return the micro-batches of each data rank, in their order; ranks that share one have the same."""
    by_data_rank: dict[int, list[ActionTokens]] = {}
    for data_rank, tokens in world.gather((world.data_rank, rank_tokens)):
        by_data_rank.setdefault(data_rank, tokens)
    return [tokens for data_rank in sorted(by_data_rank) for tokens in by_data_rank[data_rank]]


def number_sequences(batches: Sequence[ActionTokens]) -> torch.Tensor:
    """Number the sequences of all micro-batches together."""
    numbers, first = [], 0
    for tokens in batches:
        numbers.append(tokens.sequence_N + first)
        first += int(tokens.sequence_N.max()) + 1 if len(tokens.sequence_N) else 0
    return torch.cat(numbers)


def _measure_distance(
    first: tuple[MismatchCell, list[ActionTokens]], second: tuple[MismatchCell, list[ActionTokens]]
) -> ReplayDistance:
    (first_cell, first_tokens), (second_cell, second_tokens) = first, second
    pairs = zip(first_tokens, second_tokens, strict=True)
    difference_N = torch.cat([(tokens.replay_N - others.replay_N).abs() for tokens, others in pairs])
    return ReplayDistance(
        one=first_cell.name,
        other=second_cell.name,
        mean=float(difference_N.double().mean()),
        largest=float(difference_N.max()),
    )


def print_report(report: MismatchReport, header: Pairs, folder: Path, screen: IO[str]) -> None:
    out = open_console(screen)
    print_pairs(out, header)
    print_line(out)
    if not report.replays:
        print_pairs(out, [("log", str(folder))])
        return
    print_table(out, build_replay_table([(cell.name, cell.mismatch) for cell in report.replays]))
    if report.distances:
        print_line(out)
        print_table(out, build_distance_table(report.distances))
    print_line(out)
    print_table(out, build_worst_token_table(report.worst, [cell.name for cell in report.replays]))
    print_line(out)
    print_pairs(out, [("nearest", _describe_nearest(report)), ("log", str(folder))])


def _describe_nearest(report: MismatchReport) -> str:
    """Name the replay that is nearest to the rollout, and what dtypes and kernels alone are apart."""
    nearest = min(report.replays, key=lambda cell: cell.mismatch.mean)
    text = f"{nearest.name}: {nearest.mismatch.mean:.3g} a token"
    if report.distances:
        widest = max(report.distances, key=lambda distance: distance.mean)
        text += f"; replays are up to {widest.mean:.3g} from each other ({widest.one} and {widest.other})"
        if widest.mean < nearest.mismatch.mean / 2:
            text += ": dtype and kernel do not explain it. Other weights, temperature, or another engine's kernels"
    return text


def _list_header(run: ReplaySpec, source: ModelSource, world: World, selection: Selection) -> Pairs:
    layers = source.config.get_text_config().num_hidden_layers
    actor = run.actor.with_defaults()
    return [
        ("model", f"{source.name}, {pluralise(layers, 'layer')}; weights {source.weights.describe()}"),
        (
            "inputs",
            f"{pluralise(len(selection.inputs), 'input')}{' a data rank' * (world.num_data_ranks > 1)}, "
            f"{selection.dealing}",
        ),
        (
            "actor",
            f"{describe_engine(actor.backend, actor.resolved_zero_stage)}, "
            f"{'packed' if actor.packs else 'padded'}, {pluralise(world.world_size, 'process')}",
        ),
    ]


def build_replay_table(replays: Sequence[tuple[str, Mismatch]]) -> Columns:
    """Return a row for each replay: how far its log-probs are from the rollout's."""
    return {
        "configuration": [name for name, _ in replays],
        "tokens": [f"{mismatch.num_tokens:,}" for _, mismatch in replays],
        "mean |d|": [f"{mismatch.mean:.3g}" for _, mismatch in replays],
        "p99 |d|": [f"{mismatch.p99:.3g}" for _, mismatch in replays],
        "max |d|": [f"{mismatch.largest:.3g}" for _, mismatch in replays],
        "KL k1": [f"{mismatch.kl_k1:.3g}" for _, mismatch in replays],
        "KL k3": [f"{mismatch.kl_k3:.3g}" for _, mismatch in replays],
        "ESS tokens": [f"{mismatch.ess_tokens:.4f}" for _, mismatch in replays],
        "ESS sequences": [f"{mismatch.ess_sequences:.4f}" for _, mismatch in replays],
    }


def build_distance_table(distances: Sequence[ReplayDistance]) -> Columns:
    """Return a row for each two replays: how far they are from each other."""
    return {
        "configuration": [f"{distance.one} and {distance.other}" for distance in distances],
        "mean |d|": [f"{distance.mean:.3g}" for distance in distances],
        "max |d|": [f"{distance.largest:.3g}" for distance in distances],
    }


def build_worst_token_table(worst: Sequence[WorstToken], names: Sequence[str]) -> Columns:
    """Return a row for each of the worst tokens, with its neighbours' ids and differences."""
    columns: Columns = {
        "input": [shorten_names(token.source) for token in worst],
        "row": [str(token.row) for token in worst],
        "token": [str(token.column) for token in worst],
        "id": [str(token.token) for token in worst],
        "rollout": [f"{token.rollout:.4f}" for token in worst],
    }
    for number, name in enumerate(names):
        columns[name] = [f"{token.replays[number]:.4f}" for token in worst]
    columns["before"] = [_format_neighbour(*token.before) for token in worst]
    columns["after"] = [_format_neighbour(*token.after) for token in worst]
    return columns


def _format_neighbour(token: int, difference: float | None) -> str:
    if token < 0:
        return "-"
    return str(token) if difference is None else f"{token} ({difference:+.3g})"
