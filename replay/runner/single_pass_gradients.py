"""Measure the gradient of each pass of a window alone, where the window's gradient is wrong and nothing says why."""

from collections.abc import Sequence
from dataclasses import replace

from actor_init.backends.protocol import free_closed_backends
from actor_init.world import World
from capture.file_format.gradient_signature import GradientSignature
from replay.options.option_parsing import describe_error
from replay.options.resolved import ResolvedReplay
from replay.options.spec import StepMode, WindowWeights
from replay.resolution.windows import InputRound
from replay.runner.meter import Meter
from replay.runner.observers import GradientSampler
from replay.runner.replayer import ReopenableActor, Replayer
from replay.runner.rounding_floor import RunRepeater
from replay.tolerances.job_bounds import GRADIENT_QUANTITIES
from replay.verdict.causes.cause import Sureness
from replay.verdict.gradient_mix import SinglePassGradient
from replay.verdict.judge import PassEvidence
from replay.verdict.outcomes import Outcome, Verdict
from replay.verdict.recorded_pass import WEIGHTING

# Each costs a forward and a backward.
MAX_PASSES = 16


def find_window_to_take_apart(verdict: Verdict, passes: Sequence[PassEvidence]) -> list[int]:
    """Return the indices of the window whose gradient is the first wrong number; empty where that is not needed.

    It is not where a cause is sure already, or where the window is of one pass.
    """
    first = verdict.first
    is_sure = any(cause.sureness is Sureness.IS for cause in verdict.causes)
    if first is None or first.first_index is None or is_sure or verdict.outcome is Outcome.CANNOT_TELL:
        return []
    if not any(finding.name in (*GRADIENT_QUANTITIES, WEIGHTING) for finding in first.findings):
        return []
    members = [
        record
        for record, _, _ in passes
        if first.first_index <= record.index <= first.index and record.input.trains and record.error is None
    ]
    num_passes = len({(record.index, record.data_rank) for record in members})
    return sorted({record.index for record in members}) if 1 < num_passes <= MAX_PASSES else []


def measure_single_pass_gradients(
    repeater: RunRepeater, passes: Sequence[PassEvidence], verdict: Verdict
) -> tuple[tuple[SinglePassGradient, ...], str | None]:
    """Replay each pass of the first wrong window alone and return its gradient; empty where that tells nothing.

    Also returns why it could not be measured, if it could not. All ranks must call this. On several ranks it raises
    what a pass raises.
    """
    try:
        return _measure_window(repeater, passes, verdict), None
    except Exception as error:
        # On several ranks the others wait for this one in a collective, so the run has to end.
        if repeater.world.world_size > 1:
            raise
        return (), describe_error(error)


def _measure_window(
    repeater: RunRepeater, passes: Sequence[PassEvidence], verdict: Verdict
) -> tuple[SinglePassGradient, ...]:
    indices = find_window_to_take_apart(verdict, passes)
    # Only a window before the replay's first step has the weights that the replay begins with.
    steps_before = repeater.spec.measure.steps and any(
        record.index < indices[0] and record.result.grad_norm is not None for record, _, _ in passes if indices
    )
    rounds = repeater.selection.rounds
    if not indices or steps_before or len(rounds) <= indices[-1]:
        return ()
    signatures = _list_signatures(passes, indices)
    if not signatures:
        return ()
    spec = _make_single_pass_spec(repeater.spec, repeater.world)
    actor = ReopenableActor(spec.actor, spec.source, repeater.world)
    single_pass_gradients: list[SinglePassGradient] = []
    try:
        for index in indices:
            for data_rank in range(repeater.world.num_data_ranks):
                single_pass_gradients += _measure(
                    repeater, spec, actor, passes, signatures, index, data_rank, len(indices)
                )
    finally:
        actor.backend.close()
        del actor
        free_closed_backends()
    return tuple(single_pass_gradients)


def _make_single_pass_spec(spec: ResolvedReplay, world: World) -> ResolvedReplay:
    """Return a spec in which each pass is a window of its own, weighed by tokens."""
    actor = replace(spec.actor, grad_accumulation=1)
    measure = replace(spec.measure, trace=False, details=False, step=StepMode.OFF, window=WindowWeights.TOKENS)
    return spec.derive_variant(world, why="each pass's gradient is measured alone", actor=actor, measure=measure)


def _list_signatures(passes: Sequence[PassEvidence], indices: Sequence[int]) -> list[GradientSignature]:
    """List the signatures that any rank of the job recorded of the window's gradient, each place once."""
    by_place: dict[tuple[str, int], GradientSignature] = {}
    for record, recorded, _ in passes:
        if record.index in indices and recorded is not None and recorded.step_after is not None:
            for signature in recorded.step_after.signatures:
                by_place.setdefault((signature.name, signature.start), signature)
    return list(by_place.values())


def _measure(
    repeater: RunRepeater,
    spec: ResolvedReplay,
    actor: ReopenableActor,
    passes: Sequence[PassEvidence],
    signatures: Sequence[GradientSignature],
    index: int,
    data_rank: int,
    num_rounds: int,
) -> list[SinglePassGradient]:
    """Measure the gradient of one pass of one data rank. The other data ranks' passes run too, and weigh nothing."""
    world, weight_checker = repeater.world, repeater.weight_checker
    rounds = [
        replace(_keep_tokens_of(input_round, data_rank) if place == index else input_round, num_in_window=0)
        for place, input_round in enumerate(repeater.selection.rounds)
    ]
    replayer = Replayer(
        spec, world, actor, Meter.for_device(world.device), repeater.tracker, weight_checker, rounds=rounds
    )
    by_name: dict[str, list[GradientSignature]] = {}
    for signature in signatures:
        for name in weight_checker.match_to_parameters([signature]):
            by_name.setdefault(name, []).append(signature)
    sampler = GradientSampler(actor.backend, {}, by_name)
    _, error = replayer.replay(index, repeater.selection.inputs[index], [sampler])
    if error is not None:
        raise error
    found = next(
        (
            (record, recorded)
            for record, recorded, _ in passes
            if (record.index, record.data_rank) == (index, data_rank) and recorded is not None
        ),
        None,
    )
    if sampler.samples is None or found is None:
        return []
    record, recorded = found
    return [
        SinglePassGradient(
            index=index,
            data_rank=data_rank,
            rank=recorded.rank or 0,
            forward=recorded.forward_number,
            # The backend averages over the passes of the window and the data ranks.
            weight=record.result.weight / (num_rounds * world.num_data_ranks),
            gradient=sampler.samples,
        )
    ]


def _keep_tokens_of(input_round: InputRound, data_rank: int) -> InputRound:
    """Return the round as if only one data rank's pass had tokens: the others then weigh 0, and it weighs them all."""
    counts = [num_tokens if rank == data_rank else 0 for rank, num_tokens in enumerate(input_round.num_tokens)]
    return replace(input_round, num_tokens=counts)
