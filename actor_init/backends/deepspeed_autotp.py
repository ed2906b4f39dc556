"""What DeepSpeed's tensor parallelism, AutoTP, is asked for, and what it needs done around it."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel

from actor_init.spec import UsageError
from actor_init.tensor_parallel import check_divisible

SPLIT_STYLES = {"colwise", "colwise_rep", "colwise_gather_output", "rowwise"}
SUMMED_STYLE = "replicated_with_grad_allreduce"
WHOLE_STYLE = "embedding_rowwise"  # AutoTP leaves embeddings whole


def autotp_config(tp: int) -> dict[str, Any]:
    """The section for DeepSpeed's config; empty without tensor parallelism.

    The vocabulary-parallel head, its default for tied embeddings, would leave each rank with logits of its own part.
    """
    return {"tensor_parallel": {"autotp_size": tp, "vocab_parallel_lm_head": False}} if tp > 1 else {}


def check_autotp(model: PreTrainedModel, tp: int) -> None:
    """Raises UsageError unless AutoTP splits `model` as transformers plans it, and sums every gradient that it has to.

    Without a plan it would guess by names; it knows Linears alone, and sums the gradients of parameters called weight.
    """
    if tp == 1:
        return
    check_divisible(model.config, tp)
    plan: Mapping[str, str] = model.tp_plan or {}
    if not plan:
        raise UsageError(f"transformers has no tensor parallel plan for {type(model).__name__}. Try: --tp 1")
    for pattern, style in plan.items():
        if style not in {*SPLIT_STYLES, SUMMED_STYLE, WHOLE_STYLE}:
            raise UsageError(f"AutoTP does not know the style {style}, which the plan gives {pattern}. Try: --tp 1")
    for name, _ in model.named_parameters():
        if _style(plan, name):
            raise UsageError(f"AutoTP splits modules, and the plan names the parameter {name}. Try: --tp 1")
    for name, module in model.named_modules():
        style = _style(plan, name)
        if style in SPLIT_STYLES and not isinstance(module, nn.Linear):
            raise UsageError(f"AutoTP splits Linears, and {name} is a {type(module).__name__}. Try: --tp 1")
        if style == SUMMED_STYLE and [own for own, _ in module.named_parameters()] != ["weight"]:
            raise UsageError(f"AutoTP would not sum every gradient of {name} over its ranks. Try: --tp 1")


def split_linears(model: PreTrainedModel, prefix: str) -> Iterator[nn.Module]:
    """The Linears below `prefix` that AutoTP will split: all that the plan splits, but a head tied to the embedding."""
    embedding = model.get_input_embeddings()
    for name, module in model.named_modules():
        is_below = not prefix or name.startswith(f"{prefix}.")
        if is_below and _style(model.tp_plan or {}, name) in SPLIT_STYLES and module.weight is not embedding.weight:
            yield module


def norm_over_tp(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> Tensor:
    """The norm of their gradients over `group`: parts that ranks hold of a parameter all count, what is whole once."""
    from deepspeed.runtime.utils import is_model_parallel_parameter

    split = [p.grad for p in parameters if p.grad is not None and is_model_parallel_parameter(p)]
    whole = [p.grad for p in parameters if p.grad is not None and not is_model_parallel_parameter(p)]
    squared = get_total_norm(split).float().square().to(whole[0].device)
    dist.all_reduce(squared, group=group)
    return torch.sqrt(squared + get_total_norm(whole).float().square())


def _style(plan: Mapping[str, str], name: str) -> str | None:
    return next((style for pattern, style in plan.items() if fnmatch(name, pattern)), None)
