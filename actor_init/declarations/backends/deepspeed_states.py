"""Decide whether so many ranks can load a state that DeepSpeed saved."""

from actor_init.declarations.backends.declaration import Saved
from actor_init.toggles import OptimizerName


def is_partitioned_over(state: Saved, world_size: int) -> bool:
    """Can DeepSpeed load the files unchanged on that many ranks? Stage 0 partitions nothing."""
    return not state.zero_stage or state.world_size == world_size


def why_not_on(state: Saved, world_size: int) -> str | None:
    """Return why DeepSpeed's universal format cannot load `state` on so many ranks; None if it can, or need not."""
    if is_partitioned_over(state, world_size):
        return None
    reasons = {
        f"is one of {state.optimizer}, not adamw": state.optimizer != OptimizerName.ADAMW,
        "has taken no step": not state.num_steps,
        "is split over tp as well": state.tp > 1,
    }
    for reason, holds in reasons.items():
        if holds:
            return (
                f"was partitioned over {state.world_size} ranks by ZeRO stage {state.zero_stage}, and here are "
                f"{world_size}. DeepSpeed's universal format does not take a state that {reason}. "
                f"Try: torchrun --nproc-per-node {state.world_size} replay ..."
            )
    return None
