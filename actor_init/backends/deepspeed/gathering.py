"""Gather whole weights and gradients of a model under DeepSpeed, one at a time, from ZeRO's and AutoTP's parts."""

from collections.abc import Iterator
from contextlib import nullcontext

from torch import Tensor, nn

from actor_init.backends.deepspeed.autotp import whole_over_tp


def whole(tensor: Tensor) -> Tensor:
    """Return a whole copy of a parameter or buffer. All ranks must call this."""
    import deepspeed

    is_partitioned = hasattr(tensor, "ds_id")  # false below stage 3, and for buffers
    with deepspeed.zero.GatheredParameters([tensor]) if is_partitioned else nullcontext():
        return whole_over_tp(tensor, tensor)


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, whole(parameter)


def whole_gradients(model: nn.Module, loss_scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield gradients as reduced and averaged; parameters without one are skipped."""
    from deepspeed.utils import safe_get_full_grad

    for name, parameter in model.named_parameters():
        gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
        if gradient is not None:
            yield name, whole_over_tp(parameter, gradient).float() / loss_scale
