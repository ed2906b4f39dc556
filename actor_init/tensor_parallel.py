"""Tensor parallelism for FSDP2: transformers' own plan for a model, carried out with DTensor over the tp axis."""

from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.func import functional_call
from transformers import PretrainedConfig, PreTrainedModel

from actor_init.spec import UsageError


def check_divisible(config: PretrainedConfig, tp: int) -> None:
    """Raises UsageError unless tp divides the heads and the key-value heads."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % tp or key_value_heads % tp:
        possible = [str(n) for n in range(1, key_value_heads + 1) if not (heads % n or key_value_heads % n)]
        raise UsageError(
            f"--tp {tp} does not divide the model's {heads} heads and {key_value_heads} key-value heads. "
            f"Try: --tp with one of {', '.join(possible)}"
        )


def shard_over_tp(model: PreTrainedModel, mesh: DeviceMesh, *, prefix: str = "", but: Collection[str] = ()) -> None:
    """Replace the parameters below `prefix`, and below none of `but`, by the shards that the model's plan gives them.

    They are whole until then, and equal on every rank. Tied embeddings stay whole. Raises UsageError where the model
    has no plan, or one with a style that is not known here.
    """
    names = [name for name, _ in model.named_modules() if _is_below(name, prefix)]
    styles = {
        name: _style(name, style)
        for name in names
        if not any(_is_below(name, other) for other in but) and (style := _planned(model, name)) is not None
    }
    parallelize_module(model, mesh, styles, src_data_rank=None)  # no broadcast: all ranks hold the same


def _is_below(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def _planned(model: PreTrainedModel, name: str) -> str | None:
    plan: Mapping[str, str] = model.tp_plan or {}
    if not plan:
        raise UsageError(f"transformers has no tensor parallel plan for {type(model).__name__}. Try: --tp 1")
    tied = {model.get_input_embeddings(), model.get_output_embeddings()}
    if model.config.get_text_config().tie_word_embeddings and model.get_submodule(name) in tied:
        return None
    return next((style for pattern, style in plan.items() if fnmatch(name, pattern)), None)


def _style(name: str, style: str) -> ParallelStyle:
    match style:
        case "colwise":
            return ColwiseParallel()
        case "rowwise":
            return RowwiseParallel()
        case "embedding_rowwise":
            return RowwiseParallel(input_layouts=Replicate())
        case "colwise_gather_output":
            return ColwiseParallel(output_layouts=Replicate())
        case "replicated_with_grad_allreduce":
            return ReplicatedOverHeads()
        case other:
            raise UsageError(
                f"the tensor parallel plan gives {name} the style {other}, which is not known. Try: --tp 1"
            )


class ReplicatedOverHeads(ParallelStyle):
    """Whole parameters that act on a rank's own heads alone: their gradient is the sum over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        forward = module.forward

        def summed(*args: Any, **kwargs: Any) -> Any:
            module.forward = forward
            try:
                own = {name: sum_gradient(p, group) for name, p in module.named_parameters()}
                return functional_call(module, own, args, kwargs)
            finally:
                module.forward = summed

        module.forward = summed
        return module


def sum_gradient(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`tensor` itself, whose gradient is summed over `group`."""
    summed: Tensor = _SumGradient.apply(tensor, group)  # type: ignore[no-untyped-call]
    return summed


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
