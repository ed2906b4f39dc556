"""List mistakes of a job's own code: of attention, rotations, norms and MLPs that the recording states to be others.

A recording that states another function, forward or class tells where to look. The mistakes that people make there are
few, and each is tried: one that gives the job's numbers is what the code does.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from actor_init.declarations.attention.plain import SDPA_FORM
from replay.runner.trial_changes import ModelTrial
from replay.verdict.causes.cause import CauseName
from replay.verdict.model_facts import ModelDifference, ModelDifferenceKind

Kind = ModelDifferenceKind
CODE_KINDS = (Kind.CLASS, Kind.FORWARD, Kind.FUNCTION, Kind.ATTENTION_FUNCTION)
ROTATION = "apply_rotary_pos_emb"
Attend = Callable[..., tuple[Tensor, Any]]


def list_code_trials(model: PreTrainedModel, differences: Sequence[ModelDifference]) -> Iterator[ModelTrial]:
    """Yield the mistakes of the code that the recording states to be another one. The same on every rank."""
    stated = [difference for difference in differences if difference.kind in CODE_KINDS]
    places = [difference.where.lower() for difference in stated]
    has_attention = any("attn" in place or "attention_forward" in place or "dot_product" in place for place in places)
    has_attention |= any(difference.kind is Kind.ATTENTION_FUNCTION for difference in stated)
    if has_attention:
        yield from _list_attention_trials(model)
    if any(ROTATION in place or "rotate_half" in place or "attn" in place for place in places):
        yield from _list_rotation_trials(model)
    if any("norm" in place for place in places):
        yield from _list_norm_trials()
    if any("mlp" in place or "act_fn" in place for place in places):
        yield from _list_mlp_trials()


def _make_trial(
    name: str,
    says: str,
    where: str,
    cause: CauseName,
    change: Callable[[PreTrainedModel], AbstractContextManager[None]],
) -> ModelTrial:
    return ModelTrial(
        name=name,
        cause=cause,
        says=says,
        try_next=f"mend {where} in the job's code",
        change=change,
        is_of_stated_code=True,
    )


# Attention


def _list_attention_trials(model: PreTrainedModel) -> Iterator[ModelTrial]:
    if getattr(model.config, "_attn_implementation", None) != SDPA_FORM.name:
        return
    mistakes: Sequence[tuple[str, str, Callable[[Attend], Attend]]] = (
        ("unscaled scores", "does not divide its scores by the root of the heads' size", partial(_scale, 0.5)),
        ("scores by size", "divides its scores by the heads' size, not by its root", partial(_scale, -0.5)),
        ("interleaved heads", "has query heads read key-value heads in turn, not in groups", _interleave),
        ("added mask", "adds a mask of 0 and 1 to its scores, which masks nothing", _add_mask),
    )
    for name, says, change in mistakes:
        yield _make_trial(
            name, f"the job's attention {says}", "attention", CauseName.KERNEL, partial(_change_attention, change)
        )


@contextmanager
def _change_attention(change: Callable[[Attend], Attend], model: PreTrainedModel) -> Iterator[None]:
    """Let torch's sdpa be another function within this context, in every model."""
    attend = AttentionInterface()[SDPA_FORM.name]
    AttentionInterface.register(SDPA_FORM.name, change(attend))
    try:
        yield
    finally:
        AttentionInterface.register(SDPA_FORM.name, attend)


def _scale(power: float, attend: Attend) -> Attend:
    def attend_scaled(module: nn.Module, query: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        return attend(module, query * query.shape[-1] ** power, *args, **options)

    return attend_scaled


def _interleave(attend: Attend) -> Attend:
    def attend_interleaved(
        module: nn.Module, query: Tensor, key: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        num_heads, num_groups = query.shape[1], key.shape[1]
        # A head's place in the order in which it is in the group that it is to read.
        order_H = torch.arange(num_heads, device=query.device).view(-1, num_groups).T.flatten()
        output, weights = attend(module, query[:, order_H], key, *args, **options)
        return output[:, :, order_H.argsort()], weights

    return attend_interleaved


def _add_mask(attend: Attend) -> Attend:
    def attend_all(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        visible_SS = torch.ones(query.shape[2], key.shape[2], dtype=query.dtype, device=query.device).tril()
        return attend(module, query, key, value, visible_SS[None, None], **{**options, "is_causal": False})

    return attend_all


# Rotations


def _list_rotation_trials(model: PreTrainedModel) -> Iterator[ModelTrial]:
    files = {type(module).__module__ for module in model.modules()}
    files = {file for file in files if hasattr(sys.modules.get(file), ROTATION)}
    mistakes: Sequence[tuple[str, str, Callable[..., tuple[Tensor, Tensor]]]] = (
        ("interleaved rotation", "rotates neighbouring elements, not those of the two halves", _rotate_neighbours),
        ("reversed rotation", "rotates the other way", _rotate_back),
        ("queries rotated back", "rotates queries the other way than keys", _rotate_apart),
        ("queries alone rotated", "rotates queries and not keys", _rotate_queries),
        ("nothing rotated", "rotates nothing", lambda query, key, *_, **__: (query, key)),
    )
    for name, says, rotate in mistakes if files else ():
        yield _make_trial(
            name,
            f"the job's code of positions {says}",
            f"the rotation ({ROTATION})",
            CauseName.POSITIONS,
            partial(_replace_rotation, sorted(files), rotate),
        )


@contextmanager
def _replace_rotation(files: Sequence[str], rotate: Callable[..., Any], model: PreTrainedModel) -> Iterator[None]:
    """Let these files rotate by another function within this context."""
    own = {file: getattr(sys.modules[file], ROTATION) for file in files}
    try:
        for file in files:
            setattr(sys.modules[file], ROTATION, rotate)
        yield
    finally:
        for file, function in own.items():
            setattr(sys.modules[file], ROTATION, function)


def _turn_halves(tensor: Tensor) -> Tensor:
    first, second = tensor.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _turn_neighbours(tensor: Tensor) -> Tensor:
    return torch.stack((-tensor[..., 1::2], tensor[..., ::2]), dim=-1).flatten(-2)


def _rotate_neighbours(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
    cos, sin = cos[:, None], sin[:, None]
    return query * cos + _turn_neighbours(query) * sin, key * cos + _turn_neighbours(key) * sin


def _rotate_back(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return query * cos - _turn_halves(query) * sin, key * cos - _turn_halves(key) * sin


def _rotate_apart(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return query * cos - _turn_halves(query) * sin, key * cos + _turn_halves(key) * sin


def _rotate_queries(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return query * cos[:, None] + _turn_halves(query) * sin[:, None], key


# Norms and MLPs, whose modules are told by what they hold


def _list_norm_trials() -> Iterator[ModelTrial]:
    mistakes: Sequence[tuple[str, str, Callable[[nn.Module, Tensor], Tensor]]] = (
        ("centred norm", "subtract the mean first, as LayerNorm does", lambda norm, x: _normalise(norm, x - _mean(x))),
        ("norm without weight", "do not multiply by their weights", lambda norm, x: _normalise(norm, x, times=None)),
        ("norm of 1 + weight", "multiply by 1 + weight", lambda norm, x: _normalise(norm, x, added=1.0)),
        *(
            (f"eps of {eps:g}", f"have an eps of {eps:g}", partial(_normalise_by, eps))
            for eps in (1e-8, 1e-6, 1e-5, 1e-3, 1e-2)
        ),
    )
    for name, says, compute in mistakes:
        yield _make_trial(
            name,
            f"the job's norms {says}",
            "the norms",
            CauseName.MODEL_CODE,
            partial(_replace_forwards, _is_norm, compute),
        )


def _is_norm(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), Tensor) and hasattr(module, "variance_epsilon")


def _mean(tensor: Tensor) -> Tensor:
    return tensor.mean(dim=-1, keepdim=True)


def _normalise(
    norm: Any, tensor: Tensor, *, times: float | None = 1.0, added: float = 0.0, eps: float | None = None
) -> Tensor:
    """Compute a root-mean-square norm in fp32; `times` None leaves its weight out."""
    value = tensor.float()
    value = value * torch.rsqrt(_mean(value.square()) + (norm.variance_epsilon if eps is None else eps))
    return value.to(tensor.dtype) if times is None else (norm.weight + added) * value.to(tensor.dtype)


def _normalise_by(eps: float, norm: Any, tensor: Tensor) -> Tensor:
    return _normalise(norm, tensor, eps=eps)


def _list_mlp_trials() -> Iterator[ModelTrial]:
    activations: Sequence[tuple[str, Callable[[Tensor], Tensor]]] = (
        ("no activation", lambda gate: gate),
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu by tanh", partial(F.gelu, approximate="tanh")),
        ("relu", F.relu),
    )
    mistakes: list[tuple[str, str, Callable[[Any, Tensor], Tensor]]] = [
        (
            "gate and up swapped",
            "apply the activation to up_proj, not to gate_proj",
            lambda mlp, x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x)),
        ),
        *((f"mlp by {name}", f"have {name}", partial(_gate_by, activate)) for name, activate in activations),
    ]
    for name, says, compute in mistakes:
        yield _make_trial(
            name,
            f"the job's MLPs {says}",
            "the MLPs",
            CauseName.MODEL_CODE,
            partial(_replace_forwards, _is_gated_mlp, compute),
        )


def _is_gated_mlp(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))


def _gate_by(activate: Callable[[Tensor], Tensor], mlp: Any, tensor: Tensor) -> Tensor:
    output: Tensor = mlp.down_proj(activate(mlp.gate_proj(tensor)) * mlp.up_proj(tensor))
    return output


@contextmanager
def _replace_forwards(
    is_meant: Callable[[nn.Module], bool], compute: Callable[[nn.Module, Tensor], Tensor], model: PreTrainedModel
) -> Iterator[None]:
    """Let the forwards of some modules compute something else within this context. Raises ValueError without any."""
    modules = [module for module in model.modules() if is_meant(module)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no such modules")
    # A job's or an engine's own forward stands in the instance; else the class has it.
    forwards = [(module, vars(module).get("forward")) for module in modules]
    try:
        for module in modules:
            module.forward = partial(compute, module)
        yield
    finally:
        for module, forward in forwards:
            if forward is None:
                del module.forward
            else:
                module.forward = forward
