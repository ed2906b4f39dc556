"""Check what DeepSpeed's tensor parallelism, AutoTP, can split, and work around its gaps."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from transformers import PreTrainedModel

from actor_init.parallel.tensor_parallel import check_divisible
from actor_init.schedule_and_norm import compute_total_norm
from actor_init.spec import UsageError
from capture.facts import Setting

SPLIT_STYLES = {"colwise", "colwise_rep", "colwise_gather_output", "rowwise"}
SUMMED_STYLE = "replicated_with_grad_allreduce"
# AutoTP leaves embeddings whole.
WHOLE_STYLE = "embedding_rowwise"
# The first release with the setting vocab_parallel_lm_head.
FIRST_DEEPSPEED = "0.19.0"


def check_autotp(model: PreTrainedModel, tp: int) -> None:
    """Raise UsageError unless AutoTP can apply transformers' plan for `model` completely."""
    if tp == 1:
        return
    check_version(version("deepspeed"))
    check_divisible(model.config, tp)
    for complaint in _find_obstacles(model, model.tp_plan or {}):
        raise UsageError("AutoTP", f"cannot split {type(model).__name__}: {complaint}", f"Try: {Setting('tp', 1)}")


def check_version(installed: str) -> None:
    """Raise UsageError for a DeepSpeed whose AutoTP has no setting that leaves the head's logits whole."""
    if TorchVersion(installed) < FIRST_DEEPSPEED:
        why = f"under deepspeed needs DeepSpeed {FIRST_DEEPSPEED} or later, and {installed} is installed"
        advice = f"Try: {Setting('backend', 'fsdp2')}, or pip install 'deepspeed>={FIRST_DEEPSPEED}'"
        raise UsageError(Setting("tp"), why, advice)


def _find_obstacles(model: PreTrainedModel, plan: Mapping[str, str]) -> Iterator[str]:
    """Yield what AutoTP would guess, or what would give wrong gradients silently."""
    if not plan:
        yield "transformers has no tensor parallel plan for it"
    for pattern, style in plan.items():
        if style not in {*SPLIT_STYLES, SUMMED_STYLE, WHOLE_STYLE}:
            yield f"it does not know the style {style}, which the plan gives {pattern}"
    styles = {name: known for name, _ in model.named_modules() if (known := _find_style(plan, name))}
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style in SPLIT_STYLES and not isinstance(module, nn.Linear):
            yield f"it splits Linears, and {name} is a {type(module).__name__}"
        if style == SUMMED_STYLE and [parameter_name for parameter_name, _ in module.named_parameters()] != ["weight"]:
            yield f"it sums the gradient of a weight over its ranks, and {name} has other parameters"
    # Between two split Linears each rank has a part of the activations, and so of a whole parameter's gradient.
    owners_of_split = {_parent_name(name) for name, style in styles.items() if style in {"colwise", "rowwise"}}
    for name, _ in model.named_parameters():
        if _parent_name(name) not in styles and not owners_of_split.isdisjoint(
            {_parent_name(name), _parent_name(_parent_name(name))}
        ):
            yield f"the plan does not say what becomes of {name} beside Linears that are split"


def _parent_name(name: str) -> str:
    return name.rpartition(".")[0]


def list_split_linears(model: PreTrainedModel, prefix: str) -> Iterator[nn.Module]:
    """Yield the Linears below `prefix` that AutoTP will split: all in the plan, except a head tied to the embedding."""
    embedding = model.get_input_embeddings()
    for name, module in model.named_modules():
        is_below = not prefix or name.startswith(f"{prefix}.")
        if (
            is_below
            and _find_style(model.tp_plan or {}, name) in SPLIT_STYLES
            and module.weight is not embedding.weight
        ):
            yield module


def mark_split_gradients(model: nn.Module) -> None:
    """Copy AutoTP's marks from split parameters to their gradients.

    Without ZeRO, DeepSpeed's bf16 and fp16 optimizer looks for the mark on the gradients, does not find it, and leaves
    all but the first tp rank out of the norm for clipping: https://github.com/deepspeedai/DeepSpeed/issues/1839.
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter

    for parameter in model.parameters():
        gradient: Any = parameter.grad
        if gradient is not None and is_model_parallel_parameter(parameter):
            gradient.tensor_model_parallel = True


def compute_norm_over_tp(model: nn.Module, group: dist.ProcessGroup) -> Tensor:
    """Return the norm of marked gradients over `group`: all parts of split parameters count, whole ones count once."""
    from deepspeed.runtime.utils import is_model_parallel_parameter

    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    squares = torch.stack(
        [
            compute_total_norm(
                [gradient for gradient in gradients if is_model_parallel_parameter(gradient) is is_split]
            )
            .float()
            .square()
            for is_split in (True, False)
        ]
    )
    dist.all_reduce(squares[0], group=group)
    return squares.sum().sqrt()


def gather_over_tp(parameter: Any, values: Tensor) -> Tensor:
    """Return a copy of `values`, a parameter's or its gradient's, gathered where AutoTP has split the parameter.

    All ranks must call this.
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter

    whole = values.detach().clone()
    if is_model_parallel_parameter(parameter):
        parameter.gather_params([whole])
    return whole


def _find_style(plan: Mapping[str, str], name: str) -> str | None:
    return next((style for pattern, style in plan.items() if fnmatch(name, pattern)), None)
