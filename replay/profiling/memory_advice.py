"""Predict the peak of a pass under options that need less memory, from what held its peak."""

from collections.abc import Sequence
from dataclasses import dataclass

from actor_init.spec import ActorSpec, OptimizerName
from replay.profiling.records import Holder, HolderKind, Saving

NUM_SAVINGS = 3
MASTER_BYTES = 4  # of an fp32 weight or gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSize:
    """What the predictions need to know of a model and a pass besides its holders."""

    num_layers: int
    block_share: float  # of the parameters that are in blocks
    compute_bytes: int  # of a number in the compute dtype
    weight_bytes: int  # of a number of the weights that the model holds
    residual_bytes: int  # of what a block gets: tokens times width, in the compute dtype


def savings(holders: Sequence[Holder], spec: ActorSpec, size: PassSize) -> list[Saving]:
    """Return the options that save most, each with the peak it is predicted to have, in bytes, the lowest first.

    Checkpointing keeps what each block got, and one block's activations at a time. Without an optimizer weights and
    gradients are in the compute dtype, and there are no masters or states. Fewer layers have their share of weights,
    gradients, states and activations. A second rank holds half of the weights, gradients and states.
    """
    held = {kind: sum(one.num_bytes for one in holders if one.kind is kind) for kind in HolderKind}
    peak = sum(held.values())
    weights, gradients, states = (
        held[kind] for kind in (HolderKind.WEIGHTS, HolderKind.GRADIENTS, HolderKind.OPTIMIZER)
    )
    activations = held[HolderKind.ACTIVATIONS]
    found: list[Saving] = []
    if not spec.gradient_checkpointing:
        kept = activations / size.num_layers + size.num_layers * size.residual_bytes
        found.append(Saving(option="--gradient-checkpointing", peak_bytes=int(peak - activations + kept)))
    if spec.optimizer is not OptimizerName.NONE:
        slimmer = weights * (1 - size.compute_bytes / size.weight_bytes)
        slimmer += gradients * (1 - size.compute_bytes / MASTER_BYTES) if size.weight_bytes == MASTER_BYTES else 0
        found.append(Saving(option="--optimizer none", peak_bytes=int(peak - states - slimmer)))
    if size.num_layers > 1:
        half = size.num_layers // 2
        gone = (1 - half / size.num_layers) * ((weights + gradients + states) * size.block_share + activations)
        found.append(Saving(option=f"--num-layers {half}", peak_bytes=int(peak - gone)))
    shards = spec.resolved_zero_stage == 3
    halved = (weights + gradients + states) / 2
    ranks = "twice as many ranks" if shards else "twice as many ranks and --zero-stage 3"
    found.append(Saving(option=ranks, peak_bytes=int(peak - halved)))
    if spec.whole_logits:
        found.append(Saving(option="no --whole-logits", peak_bytes=peak - held[HolderKind.HEAD]))
    return sorted((one for one in found if one.peak_bytes < peak), key=lambda one: one.peak_bytes)[:NUM_SAVINGS]
