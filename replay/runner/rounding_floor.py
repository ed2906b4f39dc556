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
from actor_init.model import strip_config
from actor_init.optimizer import TORCH_DTYPES
from actor_init.spec import ActorSpec, Attention, Dtype, UsageError
from actor_init.world import World
from capture.file_format.atomic_write import write_atomically
from replay.objective.objective import Objective
from replay.options.resolved import ATTENTION, By, ResolvedReplay
from replay.resolution.job_defaults import DTYPES
from replay.resolution.selection import Selection
from replay.runlog.writer import versions
from replay.runner.checkpoint import digest_of_weights
from replay.runner.meter import Meter
from replay.runner.replayer import ReopenedActor, Replayer
from replay.tolerances.difference import relative_difference, roundoff
from replay.tolerances.job import GRAD_NORM, GRADIENT, LOG_PROBS, LOSS, TOKENS, TOKENS_RMS, Floor, bound_of, difference
from replay.verdict.findings import Setting, dtypes_of
from replay.verdict.gradient_findings import scale_of
from replay.verdict.judge import Pass
from replay.verdict.weight_check import SameWeights
from replay.watch.progress import Tracker

NUM_PASSES = 4  # at least, of each data rank, in whole windows
FILE = "rounding.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Again:
    """Everything needed to replay some of a run's inputs once more."""

    world: World
    spec: ResolvedReplay
    selection: Selection
    tracker: Tracker
    has_dropout: bool

    def other_order(self, passes: Sequence[Pass]) -> ResolvedReplay:
        return other_order(self.spec, passes, has_dropout=self.has_dropout, keeps_kernel=self.keeps_kernel)

    @property
    def why_one_kernel(self) -> str | None:
        """Say why each replay has to have one attention kernel; None if another one changes rounding alone."""
        if self.selection.padding_predicts and not self.spec.actor.packs:
            return "another attention kernel computes other logits at the padding that predicts a label"
        if _asked(self.spec) == Attention.EAGER and not has_sdpa(self.spec.source.config):
            return "the model has no other attention kernel"
        return None

    @property
    def keeps_kernel(self) -> bool:
        return self.why_one_kernel is not None

    def passes(self, spec: ResolvedReplay, num_passes: int) -> list[Pass]:
        """Replay the first `num_passes` inputs of all ranks under `spec`. Raises what their forward or backward
        raises.
        """
        actor = ReopenedActor(spec.actor, spec.source, self.world)
        meter = Meter.for_device(self.world.device)
        rounds = self.selection.rounds
        same_weights = SameWeights(spec.source)
        replayer = Replayer(spec, self.world, actor, meter, self.tracker, same_weights, rounds=rounds)
        replayed: list[Pass] = []
        try:
            for index, path in enumerate(self.selection.inputs[:num_passes]):
                own, error = replayer.replay(index, path)
                if error is not None:
                    raise error
                replayed += self.world.gather(own)
        finally:
            actor.backend.close()
            del actor, replayer
            free_closed_backends()
        return replayed


def other_order(
    spec: ResolvedReplay, passes: Sequence[Pass], *, has_dropout: bool, keeps_kernel: bool
) -> ResolvedReplay:
    """Return a spec that changes rounding only: another kernel, reversed rows, the job's dtype where it is coarser.

    With dropout the rows stay in order, since each row's masks are drawn after those of the rows before it.
    """
    job = {dtype for _, recorded, _ in passes if recorded is not None for dtype in recorded.dtypes}
    coarser = max((DTYPES[one] for one in job if one in DTYPES), key=_roundoff, default=spec.actor.dtype)
    actor = replace(spec.actor, dtype=max(spec.actor.dtype, coarser, key=_roundoff))
    is_plain = has_another_kernel(actor, keeps_kernel=keeps_kernel)
    asked = _asked(spec)
    kernel = Attention.EAGER if asked in (Attention.AUTO, Attention.SDPA) else Attention.SDPA
    other = replace(actor, attention=kernel if is_plain else asked, gradient_checkpointing=kernel == Attention.EAGER)
    measure = replace(spec.measure, trace=False, details=False)
    inputs = replace(spec.inputs, reverse_rows=not has_dropout)
    return spec.variant(why="rounding alone is to be other", actor=other, inputs=inputs, measure=measure)


def _asked(spec: ResolvedReplay) -> str:
    """Return the kernel that was typed, or the job's or the model's; auto where this machine chose it."""
    return Attention.AUTO if spec.chosen_by(ATTENTION) is By.MACHINE else spec.actor.attention


def has_another_kernel(actor: ActorSpec, *, keeps_kernel: bool) -> bool:
    return (
        not keeps_kernel and not actor.is_custom and actor.parallel.ring == 1 and not actor.parallel.sequence_parallel
    )


def have_same_masks(floors: Mapping[str, Floor], setting: Setting, passes: Sequence[Pass]) -> bool:
    """Tell whether two replays of a model with dropout drew the same masks: what is between them is rounding.

    Another mask moves a token's log-prob by far more than the formula allows for rounding.
    """
    dtypes = {dtype for _, recorded, _ in passes if recorded is not None for dtype in dtypes_of(recorded, setting)}
    floor = floors.get(TOKENS)
    return floor is not None and floor.value <= bound_of(TOKENS, sorted(dtypes), setting.num_layers, 1)


def _roundoff(dtype: Dtype) -> float:
    return roundoff(str(TORCH_DTYPES[dtype]).removeprefix("torch."))


def num_passes_for(spec: ResolvedReplay, num_inputs: int) -> int:
    size = spec.actor.num_accumulated
    return min(num_inputs, max(size, -(-NUM_PASSES // size) * size))


def measured(again: Again, passes: Sequence[Pass], folder: Path) -> dict[str, Floor]:
    """Return the floors by quantity, read from `folder` if measured before. All ranks must call this.

    None where the kernel has to be kept: rows in another order alone would say that hardly anything is rounded.
    """
    if again.keeps_kernel:
        return {}
    number = num_passes_for(again.spec, len(again.selection.inputs))
    first = [one for one in passes if one[0].index < number]
    key = _key(again, first)
    known: dict[str, Floor] | None = again.world.from_first(_known(folder, key) if again.world.rank == 0 else None)
    if known is None:
        floors = floors_of(first, again.passes(again.other_order(first), number))
        if again.world.rank == 0:
            _write(folder, key, floors)
        return floors
    return known


def grown(again: Again, passes: Sequence[Pass]) -> dict[int, dict[str, Floor]]:
    """Return the floors by pass under --step: how far apart two replays are after all earlier steps.

    All ranks must call this.
    """
    others = again.passes(again.other_order(passes), len(again.selection.inputs))
    indices = sorted({record.index for record, _, _ in passes})
    return {index: floors_of([one for one in passes if one[0].index <= index], others) for index in indices}


def floors_of(passes: Sequence[Pass], others: Sequence[Pass]) -> dict[str, Floor]:
    """Return how far apart two replays of the same inputs are, by quantity."""
    apart: dict[str, list[float]] = {}
    by_index_and_rank = {(record.index, record.rank): (record, replayed) for record, _, replayed in others}
    for record, _, replayed in passes:
        if (record.index, record.rank) not in by_index_and_rank:
            continue
        other, replayed_again = by_index_and_rank[record.index, record.rank]
        if record.result.loss is not None and other.result.loss is not None:
            apart.setdefault(LOSS, []).append(difference(record.result.loss, other.result.loss))
        rows = zip(
            record.result.row_log_probs, other.result.row_log_probs, record.result.row_action_tokens, strict=True
        )
        apart.setdefault(LOG_PROBS, []).extend(
            difference(here / tokens, there / tokens) for here, there, tokens in rows if tokens
        )
        tokens = zip(replayed.token_log_probs, replayed_again.token_log_probs, strict=False)
        apart.setdefault(TOKENS, []).extend(
            difference(here, there) for here, there in tokens if here is not None and there is not None
        )
        if record.result.grad_norm is not None and other.result.grad_norm is not None:
            apart.setdefault(GRAD_NORM, []).append(relative_difference(other.result.grad_norm, record.result.grad_norm))
        one, two = replayed.gradient, replayed_again.gradient
        if one is not None and two is not None:
            for key in one.values.keys() & two.values.keys():
                scale = scale_of(one, key[0])
                pairs = zip(one.values[key], two.values[key], strict=True)
                apart.setdefault(GRADIENT, []).extend(abs(a - b) / scale if scale else 0.0 for a, b in pairs)
    floors = {name: Floor(value=max(values), num_values=len(values)) for name, values in apart.items() if values}
    if tokens_apart := apart.get(TOKENS):
        rms = math.sqrt(sum(one * one for one in tokens_apart) / len(tokens_apart))
        floors[TOKENS_RMS] = Floor(value=rms, num_values=len(tokens_apart))
    return {name: one for name, one in floors.items() if math.isfinite(one.value)}


def in_fp32(spec: ResolvedReplay) -> ResolvedReplay:
    measure = replace(spec.measure, trace=False, details=False)
    attention = _asked(spec)
    if attention != Attention.AUTO and not find_kernel(attention).packed.limits.has_fp32:
        attention = Attention.AUTO
    actor = replace(spec.actor, dtype=Dtype.FP32, attention=attention)
    return spec.variant(why="--second-opinion", actor=actor, measure=measure)


def is_worth_it(again: Again, passes: Sequence[Pass]) -> bool:
    """Is there a value that a coarse dtype could hide a fault in, or whose rounding grows from step to step?"""
    spec = again.spec
    dtypes = {dtype for _, recorded, _ in passes if recorded is not None for dtype in recorded.dtypes}
    has_claims = any(recorded is not None and recorded.claims for _, recorded, _ in passes)
    is_coarse = spec.actor.dtype in (Dtype.BF16, Dtype.FP16) or bool({"bfloat16", "float16"} & dtypes)
    is_repeatable = not any(record.error for record, _, _ in passes) and not spec.inputs.reverse_rows
    has_steps = spec.measure.step and any(one is not None and one.optimizer is not None for _, one, _ in passes)
    # a user's model has one kernel, and with dropout rows stay in order: twice the same numbers would say that nothing
    # is rounded
    is_another = has_steps or not spec.actor.is_custom
    if again.has_dropout:
        is_another = has_another_kernel(spec.actor, keeps_kernel=again.keeps_kernel)
    return has_claims and (is_coarse or has_steps) and is_repeatable and is_another


def _key(again: Again, passes: Sequence[Pass]) -> str:
    world, spec = again.world, again.spec.to_spec()
    actors = [spec.actor, again.other_order(passes).to_spec().actor]
    measured = [
        digest_of_weights(again.spec.source.weights),
        strip_config(again.spec.source.config),
        str([replace(actor, model=None, weights=None, blocks=None) for actor in actors]),
        str(again.has_dropout),
        str((spec.measure.loss, spec.objective, spec.measure.window, spec.measure.backward)),
        str(None if (objective := Objective.of(spec)) is None else objective.sha256),
        str((world.world_size, world.device.type)),
        str(
            [
                (record.input.input_digest, recorded is not None and recorded.optimizer is not None)
                for record, recorded, _ in passes
            ]
        ),
        versions(),
    ]
    return hashlib.blake2b(json.dumps(measured, default=str).encode(), digest_size=12).hexdigest()


def _known(folder: Path, key: str) -> dict[str, Floor] | None:
    """Read an earlier measurement. Raises UsageError if the file is damaged."""
    values = _read(folder).get(key)
    try:
        return None if values is None else from_json(dict[str, Floor], values, source=f"{folder / FILE}: {key}")
    except UsageError as error:
        raise UsageError(f"{error.text}. Try: rm {folder / FILE}") from error


def _read(folder: Path) -> Mapping[str, object]:
    try:
        known = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(folder: Path, key: str, floors: Mapping[str, Floor]) -> None:
    """Write the floors. In a read-only folder nothing is kept, and the next run measures again."""
    try:
        write_atomically(folder / FILE, json.dumps({**_read(folder), key: to_json(floors)}, indent=1).encode())
    except OSError:
        return
