"""Measure the effect of rounding on a run's values: replay some inputs with another kernel and in another row order.

Two replays that differ in nothing else are as far apart as a correct replay may be from the job. The measurement is
kept in `rounding.json` beside the inputs, for later replays of the same inputs, weights and options.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actor_init.as_json import from_json, to_json
from actor_init.backends.protocol import free_closed_backends
from actor_init.declarations.attention import find_kernel
from actor_init.declarations.attention.plain import has_sdpa
from actor_init.model import to_plain_config
from actor_init.schedule_and_norm import TORCH_DTYPES
from actor_init.spec import ActorSpec, Attention, Dtype, UsageError
from actor_init.world import World
from capture.file_format.atomic_write import write_atomically
from replay.objective.objective import Objective
from replay.options.resolved import ATTENTION, ChosenBy, ResolvedReplay
from replay.resolution.job_defaults import DTYPES
from replay.resolution.selection import Selection
from replay.runlog.writer import list_versions
from replay.runner.checkpoint import digest_weights
from replay.runner.meter import Meter
from replay.runner.replayer import ReopenableActor, Replayer
from replay.tolerances.difference import relative_difference, roundoff
from replay.tolerances.job_bounds import (
    GRAD_NORM,
    GRADIENT,
    LOG_PROBS,
    LOSS,
    TOKEN_LOG_PROBS,
    TOKENS_RMS,
    NoiseFloor,
    measure_difference,
    name_signature_floor,
)
from replay.verdict.dropout_masks import drew_same_masks, may_drop_attention
from replay.verdict.gradient_evidence import measure_signature_distances
from replay.verdict.gradient_samples import compute_scale
from replay.verdict.judge import PassEvidence
from replay.verdict.weight_check import WeightChecker
from replay.watch.progress import Tracker

# Of each data rank, in whole windows; a window of more is measured all the same.
MAX_PASSES = 4
FLOORS_FILE = "rounding.json"
# The eager kernel keeps each score of a layer, as a probability, in fp32 and in the actor's dtype.
BYTES_PER_SCORE = 8
# More than that are not kept but computed again, layer by layer, which takes a third of the time of a pass.
MOST_SCORE_BYTES = 2**30
# Behind a step the floors of sampled gradients and of tokens, single and all together, are multiplied by this. Where an
# element's gradient is near 0, rounding turns the sign of Adam's step, so few elements decide how far two trainings are
# apart, and other casts turn others. Seen of jobs under autocast, replayed by a bf16 engine: 4.02 and 3.35 times the
# floor, and 4.6 under torch 2.11; of a sound one a token was 1.14 times its bound.
DRIFT = 3.0
DRIFTING = (GRADIENT, TOKEN_LOG_PROBS, TOKENS_RMS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRepeater:
    """Replays some of a run's inputs once more, with other choices.

    weight_checker  of the weights that the run began with, from which each replay begins
    dropout         the model's dropout settings that are not 0
    """

    world: World
    spec: ResolvedReplay
    selection: Selection
    tracker: Tracker
    weight_checker: WeightChecker
    dropout: Sequence[str]

    @property
    def has_dropout(self) -> bool:
        return bool(self.dropout)

    def make_rounding_variant(self, passes: Sequence[PassEvidence]) -> ResolvedReplay:
        """Return the spec of the replay that the floor is measured by. All ranks must call this."""
        return make_rounding_variant(
            self.spec, passes, self.world, has_dropout=self.has_dropout, keeps_kernel=self.keeps_kernel
        )

    @property
    def why_kernel_must_stay(self) -> str | None:
        """Say why each replay has to have one attention kernel; None if another one changes rounding alone."""
        if self.selection.must_keep_padding and not self.spec.actor.packs:
            return "another attention kernel computes other logits at the padding that predicts a label"
        if _find_chosen_kernel(self.spec) == Attention.EAGER and not has_sdpa(self.spec.source.config):
            return "the model has no other attention kernel"
        if self.spec.actor.parallel.ring > 1 or self.spec.actor.parallel.sequence_parallel:
            return "attention that ranks share has no other kernel"
        return None

    @property
    def keeps_kernel(self) -> bool:
        return self.why_kernel_must_stay is not None

    def replay_inputs(self, spec: ResolvedReplay, num_passes: int) -> list[PassEvidence]:
        """Replay the first `num_passes` inputs of all ranks under `spec`. Raises what a pass raises."""
        actor = ReopenableActor(spec.actor, spec.source, self.world)
        meter = Meter.for_device(self.world.device)
        rounds = self.selection.rounds
        replayer = Replayer(spec, self.world, actor, meter, self.tracker, self.weight_checker, rounds=rounds)
        passes: list[PassEvidence] = []
        try:
            for index, path in enumerate(self.selection.inputs[:num_passes]):
                own_pass, error = replayer.replay(index, path)
                if error is not None:
                    raise error
                passes += self.world.gather(own_pass)
        finally:
            actor.backend.close()
            del actor, replayer
            free_closed_backends()
        return passes


def make_rounding_variant(
    spec: ResolvedReplay, passes: Sequence[PassEvidence], world: World, *, has_dropout: bool, keeps_kernel: bool
) -> ResolvedReplay:
    """Return a spec that changes rounding only: another kernel, reversed rows, the job's dtype where it is coarser.

    All ranks must call this.

    A user's own model has one kernel, and on a CPU is run in fp32.

    With dropout the rows stay in order, since each row's masks are drawn after those of the rows before it.
    """
    job_dtypes = {dtype for _, recorded, _ in passes if recorded is not None for dtype in recorded.dtypes}
    coarsest = max(
        (DTYPES[dtype] for dtype in job_dtypes if dtype in DTYPES), key=_find_roundoff, default=spec.actor.dtype
    )
    dtype = max(spec.actor.dtype, coarsest, key=_find_roundoff)
    if spec.actor.has_user_model and spec.actor.dtype is dtype and spec.device.type == "cpu":
        # A CPU adds up the gradient of a LayerNorm's bias in the weights' dtype, over all tokens: rows in another order
        # are as far off from the sum, and fp32 is not.
        dtype = Dtype.FP32
    actor = replace(spec.actor, dtype=dtype)
    can_change = has_another_kernel(actor, keeps_kernel=keeps_kernel)
    chosen = _find_chosen_kernel(spec)
    is_sdpa = chosen in (Attention.AUTO, Attention.SDPA)
    kernel = Attention.EAGER if is_sdpa or not has_sdpa(spec.source.config) else Attention.SDPA
    actor = replace(actor, attention=kernel if can_change else chosen)
    if can_change and kernel == Attention.EAGER and _estimate_score_bytes(spec, passes) > MOST_SCORE_BYTES:
        actor = replace(actor, gradient_checkpointing=True)
    measure = replace(spec.measure, trace=False, details=False)
    inputs = replace(spec.inputs, reverse_rows=not has_dropout)
    return spec.derive_variant(world, why="rounding alone is to be other", actor=actor, inputs=inputs, measure=measure)


def _estimate_score_bytes(spec: ResolvedReplay, passes: Sequence[PassEvidence]) -> float:
    """Estimate what the eager kernel keeps of the largest pass for its backward: a score of each pair of tokens."""
    config = spec.source.config.get_text_config()
    num_heads = int(getattr(config, "num_attention_heads", None) or config.hidden_size)
    inputs = [record.input for record, _, _ in passes]
    num_pairs = max(section.fed_tokens**2 / (1 if spec.actor.packs else max(section.rows, 1)) for section in inputs)
    return num_pairs * num_heads * int(config.num_hidden_layers) * BYTES_PER_SCORE


def _find_chosen_kernel(spec: ResolvedReplay) -> str:
    """Return the kernel that was typed, or the job's or the model's; auto where this machine chose it."""
    return Attention.AUTO if spec.find_chooser(ATTENTION) is ChosenBy.MACHINE else spec.actor.attention


def has_another_kernel(actor: ActorSpec, *, keeps_kernel: bool) -> bool:
    return (
        not keeps_kernel
        and not actor.has_user_model
        and actor.parallel.ring == 1
        and not actor.parallel.sequence_parallel
    )


def keep_limits(
    floors: Mapping[str, NoiseFloor], spec: ResolvedReplay, variant: ResolvedReplay
) -> dict[str, NoiseFloor]:
    """Return those floors that hold for all rounding of a job, also that by other casts, which the variant keeps.

    A user's own model has no other kernel, and its rows in another order give the same numbers, but for the sums of
    gradients over rows in a 16-bit dtype. Their rounding is a part of a gradient's: a floor to assume at least.
    """
    if not variant.actor.has_user_model or spec.actor.dtype is variant.actor.dtype is Dtype.FP32:
        return dict(floors)
    of_gradients = (GRADIENT, name_signature_floor(""))
    return {name: replace(floor, is_least=True) for name, floor in floors.items() if name.startswith(of_gradients)}


def have_same_masks(
    spec: ResolvedReplay,
    passes: Sequence[PassEvidence],
    variant: ResolvedReplay,
    other_passes: Sequence[PassEvidence],
    dropout: Sequence[str],
) -> bool:
    """Tell whether a replay under `spec` and one under `variant` drew the same dropout masks, or none.

    dropout  the model's dropout settings that are not 0
    """
    actor, other_actor = spec.actor, variant.actor
    has_same_kernel = actor.attention == other_actor.attention
    return drew_same_masks(
        [(record, replayed) for record, _, replayed in passes],
        [(record, replayed) for record, _, replayed in other_passes],
        has_same_rows=spec.inputs.reverse_rows == variant.inputs.reverse_rows and actor.packs == other_actor.packs,
        draws_alike_on_gpu=actor.dtype == other_actor.dtype and (has_same_kernel or not may_drop_attention(dropout)),
    )


def draws_masks(passes: Sequence[PassEvidence]) -> bool:
    """Tell whether the replay drew random numbers in one of these passes."""
    return any(replayed.draws is not None and replayed.draws.has_any for _, _, replayed in passes)


def _find_roundoff(dtype: Dtype) -> float:
    return roundoff(str(TORCH_DTYPES[dtype]).removeprefix("torch."))


def count_passes_to_measure(spec: ResolvedReplay, num_inputs: int) -> int:
    size = spec.actor.resolved_grad_accumulation
    return min(num_inputs, max(size, MAX_PASSES // size * size))


def measure_floors(
    repeater: RunRepeater, passes: Sequence[PassEvidence], folder: Path
) -> tuple[dict[str, NoiseFloor], int]:
    """Return the floors by quantity, read from `folder` if measured before, and how many passes ran for them.

    There are none where the kernel has to be kept: rows in another order alone would say that hardly anything is
    rounded. Neither are there where the second replay drew other dropout masks, which change far more than rounding.
    All ranks must call this.
    """
    if repeater.keeps_kernel:
        return {}, 0
    num_passes = count_passes_to_measure(repeater.spec, len(repeater.selection.inputs))
    compared = [replayed_pass for replayed_pass in passes if replayed_pass.record.index < num_passes]
    key = _digest_measurement(repeater, compared)
    known_floors: dict[str, NoiseFloor] | None = repeater.world.broadcast_from_rank0(
        read_floors(folder, key) if repeater.world.rank == 0 else None
    )
    if known_floors is not None:
        return known_floors, 0
    variant = repeater.make_rounding_variant(compared)
    repeated = repeater.replay_inputs(variant, num_passes)
    has_masks = have_same_masks(repeater.spec, compared, variant, repeated, repeater.dropout)
    floors = keep_limits(compute_floors(compared, repeated), repeater.spec, variant) if has_masks else {}
    if repeater.world.rank == 0:
        write_floors(folder, key, floors)
    return floors, num_passes


def measure_step_floors(
    repeater: RunRepeater, passes: Sequence[PassEvidence]
) -> tuple[dict[int, dict[str, NoiseFloor]], int]:
    """Return the floors by pass where the optimizer steps: how far apart two replays are after all earlier steps.

    A few passes are measured, and those up to two steps behind the last change of what is trained: a moment that begins
    at 0 makes a first step of the whole learning rate, whatever the gradient's size, and of a gradient that is rounding
    it makes as large a step as of any other. Behind them a floor is taken to grow as the number of steps does: two
    trainings that differ in rounding part more slowly.

    There are none where the second replay drew other dropout masks.

    Also returns how many passes ran. All ranks must call this.
    """
    num_inputs = len(repeater.selection.inputs)
    num_passes = count_passes_to_measure(repeater.spec, num_inputs)
    if last_change := find_last_change(passes):
        num_passes = min(num_inputs, max(num_passes, last_change + 3 * repeater.spec.actor.resolved_grad_accumulation))
    variant = repeater.make_rounding_variant(passes)
    repeated_passes = repeater.replay_inputs(variant, num_passes)
    if not have_same_masks(repeater.spec, passes, variant, repeated_passes, repeater.dropout):
        return {}, num_passes
    num_steps = {record.index: record.result.num_steps for record, _, _ in passes}
    measured = {
        index: keep_limits(
            compute_floors(
                [replayed_pass for replayed_pass in passes if replayed_pass.record.index <= index], repeated_passes
            ),
            repeater.spec,
            variant,
        )
        for index in num_steps
        if index < num_passes
    }
    last = max(measured)
    # A pass has one loss and one norm, from which alone nobody knows how far the next may be off.
    of_all = {name: measured[last][name] for name in (LOSS, GRAD_NORM) if name in measured[last]}
    floors: dict[int, dict[str, NoiseFloor]] = {}
    for index, steps in num_steps.items():
        growth = max(1.0, steps / max(num_steps[last], 1))
        floors[index] = {
            name: replace(floor, value=floor.value * growth * (DRIFT if steps and name in DRIFTING else 1.0))
            for name, floor in {**measured.get(index, measured[last]), **of_all}.items()
        }
    return floors, num_passes


def find_last_change(passes: Sequence[PassEvidence]) -> int:
    """Return the index of the last pass before which the job began or ceased to train parameters; 0: there is none."""
    changes = [0]
    numbers: dict[int, int] = {}
    for record, recorded, _ in passes:
        if recorded is not None and recorded.trains:
            if numbers.setdefault(record.rank, recorded.num_frozen) != recorded.num_frozen:
                changes.append(record.index)
            numbers[record.rank] = recorded.num_frozen
    return max(changes)


def compute_floors(passes: Sequence[PassEvidence], other_passes: Sequence[PassEvidence]) -> dict[str, NoiseFloor]:
    """Return how far apart two replays of the same inputs are, by quantity.

    The passes are paired by index and rank. Each pair gives differences of its loss, of the mean log-prob of each row,
    of the tokens' log-probs, and, where a window ends, of the gradient norm and of sampled gradient elements on the
    scale of their parameter, and for each kind of parameters the root mean square of a signature's differences. A floor
    is the largest difference; of the tokens there is the root mean square besides.
    """
    differences: dict[str, list[float]] = {}
    other_by_place = {(record.index, record.rank): (record, replayed) for record, _, replayed in other_passes}
    for record, _, replayed in passes:
        if (record.index, record.rank) not in other_by_place:
            continue
        other_record, other_replayed = other_by_place[record.index, record.rank]
        result, other_result = record.result, other_record.result
        if result.loss is not None and other_result.loss is not None:
            differences.setdefault(LOSS, []).append(measure_difference(result.loss, other_result.loss))
        rows = zip(result.row_log_probs, other_result.row_log_probs, result.row_action_tokens, strict=True)
        differences.setdefault(LOG_PROBS, []).extend(
            measure_difference(log_prob / num_tokens, other_log_prob / num_tokens)
            for log_prob, other_log_prob, num_tokens in rows
            if num_tokens
        )
        tokens = zip(
            replayed.log_probs_at_recorded_positions, other_replayed.log_probs_at_recorded_positions, strict=False
        )
        differences.setdefault(TOKEN_LOG_PROBS, []).extend(
            measure_difference(log_prob, other_log_prob)
            for log_prob, other_log_prob in tokens
            if log_prob is not None and other_log_prob is not None
        )
        if result.grad_norm is not None and other_result.grad_norm is not None:
            differences.setdefault(GRAD_NORM, []).append(relative_difference(other_result.grad_norm, result.grad_norm))
        gradient, other_gradient = replayed.gradient, other_replayed.gradient
        if gradient is not None and other_gradient is not None:
            for sample in gradient.values.keys() & other_gradient.values.keys():
                parameter, _ = sample
                scale = compute_scale(gradient, parameter)
                elements = zip(gradient.values[sample], other_gradient.values[sample], strict=True)
                differences.setdefault(GRADIENT, []).extend(
                    abs(element - other_element) / scale if scale else 0.0 for element, other_element in elements
                )
            for kind, distances in measure_signature_distances(gradient, other_gradient).items():
                differences.setdefault(name_signature_floor(kind), []).extend(distances)
    floors = {
        quantity: NoiseFloor(value=max(values), num_values=len(values))
        for quantity, values in differences.items()
        if values
    }
    if token_differences := differences.get(TOKEN_LOG_PROBS):
        mean_square = sum(value * value for value in token_differences) / len(token_differences)
        floors[TOKENS_RMS] = NoiseFloor(value=math.sqrt(mean_square), num_values=len(token_differences))
    return {quantity: floor for quantity, floor in floors.items() if math.isfinite(floor.value)}


def make_fp32_variant(spec: ResolvedReplay, world: World) -> ResolvedReplay:
    measure = replace(spec.measure, trace=False, details=False)
    attention = _find_chosen_kernel(spec)
    if attention != Attention.AUTO and not find_kernel(attention).packed.limits.has_fp32:
        attention = Attention.AUTO
    actor = replace(spec.actor, dtype=Dtype.FP32, attention=attention)
    return spec.derive_variant(world, why="--second-opinion", actor=actor, measure=measure)


def is_floor_needed(repeater: RunRepeater, passes: Sequence[PassEvidence]) -> bool:
    """Is there a value that a coarse dtype could hide a fault in, or whose rounding grows from step to step?"""
    spec = repeater.spec
    has_claims = any(recorded is not None and recorded.claims for _, recorded, _ in passes)
    is_repeatable = not any(record.error for record, _, _ in passes) and not spec.inputs.reverse_rows
    has_steps = spec.measure.steps and any(
        recorded is not None and recorded.step_after is not None for _, recorded, _ in passes
    )
    # A user's model has one kernel, and with dropout the rows stay in order: two runs with the same numbers would say
    # that nothing is rounded.
    rounds_otherwise = has_steps or not spec.actor.has_user_model
    if repeater.has_dropout:
        rounds_otherwise = has_another_kernel(spec.actor, keeps_kernel=repeater.keeps_kernel)
    return has_claims and (has_coarse_dtype(spec, passes) or has_steps) and is_repeatable and rounds_otherwise


def has_coarse_dtype(spec: ResolvedReplay, passes: Sequence[PassEvidence]) -> bool:
    """Did the job or the replay compute in 16 bits? Then a floor narrows bounds, and else it only widens them."""
    dtypes = {dtype for _, recorded, _ in passes if recorded is not None for dtype in recorded.dtypes}
    return spec.actor.dtype in (Dtype.BF16, Dtype.FP16) or bool({"bfloat16", "float16"} & dtypes)


def _digest_measurement(repeater: RunRepeater, passes: Sequence[PassEvidence]) -> str:
    world, spec = repeater.world, repeater.spec.to_spec()
    actors = [spec.actor, repeater.make_rounding_variant(passes).to_spec().actor]
    measurement = [
        digest_weights(repeater.spec.source.weights),
        to_plain_config(repeater.spec.source.config),
        str([replace(actor, model=None, weights=None, blocks=None, head=repeater.spec.actor.head) for actor in actors]),
        str((repeater.dropout, "masks by the ends of the generators")),
        str((spec.measure.loss, spec.objective, spec.measure.window, spec.measure.backward)),
        str(None if (objective := Objective.open(spec)) is None else objective.sha256),
        str((world.world_size, world.device.type)),
        str(
            [
                (record.input.input_digest, recorded is not None and recorded.step_after is not None)
                for record, recorded, _ in passes
            ]
        ),
        list_versions(),
    ]
    return hashlib.blake2b(json.dumps(measurement, default=str).encode(), digest_size=12).hexdigest()


def read_floors(folder: Path, key: str) -> dict[str, NoiseFloor] | None:
    """Read an earlier measurement. Raises UsageError if the file is damaged."""
    values = _read_file(folder).get(key)
    try:
        return (
            None
            if values is None
            else from_json(dict[str, NoiseFloor], values, source=f"{folder / FLOORS_FILE}: {key}")
        )
    except UsageError as error:
        raise UsageError(f"{error.text}. Try: rm {folder / FLOORS_FILE}") from error


def _read_file(folder: Path) -> Mapping[str, object]:
    try:
        floors_by_key = json.loads((folder / FLOORS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return floors_by_key if isinstance(floors_by_key, dict) else {}


def write_floors(folder: Path, key: str, floors: Mapping[str, NoiseFloor]) -> None:
    """Write the floors. In a read-only folder nothing is kept, and the next run measures again."""
    try:
        write_atomically(
            folder / FLOORS_FILE, json.dumps({**_read_file(folder), key: to_json(floors)}, indent=1).encode()
        )
    except OSError:
        return
