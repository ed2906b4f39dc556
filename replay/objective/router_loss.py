"""Add to the loss of a pass what a mixture's own model adds to its loss: a coefficient times its routers' loss.

The model's modelling file has the function, `load_balancing_loss_func`, and its forward says by which attribute it is
multiplied. The function is called with the logits of the routers here, over the real tokens that are fed: packed or
padded, their mean is that of the job, which gave its attention mask or had no padding.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from actor_init.routes import RouterState
from capture.file_format.capture_file import CapturedCall

LOSS_FUNCTION = "load_balancing_loss_func"
COEFFICIENT = "aux_loss_coef"
ROUTER_LOGITS = "router_logits"


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLoss:
    """The loss of a model's routers.

    coefficient         the factor with which the model adds this loss to its own
    num_chosen          the number of experts to which a router sends each token
    logits_index        by the router's name: which of its outputs are the logits that `function` takes
    why_not_computable  why this loss cannot be computed here; None: it can
    """

    function: Callable[..., Tensor]
    coefficient: float
    num_experts: int
    num_chosen: int
    logits_index: Mapping[str, int]
    why_not_computable: str | None = None

    def without(self, why: str) -> Self:
        """Return the loss as one that cannot be computed, for this reason."""
        return replace(self, why_not_computable=why)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingLoopLoss:
    """The loss of a pass that a job's training loop computed itself. It tells whether the loop added the routers' loss.

    noted_value  what the loop gave to `recorder.note`; None: nothing
    bound        relative: how far rounding may move a loss from the noted one
    """

    noted_value: float | None
    bound: float

    def find_factor(self, loss: Tensor, log_probs_BA: Tensor, term: Tensor) -> Tensor:
        """Find how many times the job's loss holds `term`, one number on the device: 0, 1, or what the log-probs weigh.

        That is nan where the noted loss tells nothing: another formula than a sum of weighted log-probs, or a term that
        rounding hides. A loop notes its loss before or after it divides it by the passes of a step, as does what the
        log-probs weigh, and it adds the term before or after.

        loss  the sum of the log-probs [B, A], each times its weight, with its graph
        """
        unknown = torch.full_like(term.detach(), torch.nan)
        if self.noted_value is None or not loss.requires_grad:
            return unknown
        (gradient_BA,) = torch.autograd.grad(loss, log_probs_BA, retain_graph=True)
        loss, term, weight = loss.detach(), term.detach(), -gradient_BA.sum()
        once = torch.ones_like(weight)
        factors = torch.stack([torch.zeros_like(weight), once, weight])
        noted = torch.stack([once, weight]) * self.noted_value
        bounds = self.bound * noted.abs().clamp(min=1)
        fits = ((loss + factors[:, None] * term - noted).abs() <= bounds).any(dim=1)
        least = torch.where(fits, factors, torch.inf).min()
        most = torch.where(fits, factors, -torch.inf).max()
        # Where rounding is as large as the term, a loss with it and one without it both fit.
        is_told = torch.isclose(least, most, rtol=1e-3, atol=0.0) & (term.abs() > 2 * bounds.max())
        return torch.where(is_told, most, unknown)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLossTerm:
    """The routers' loss of one pass, as a term of the pass's loss.

    is_real_T           which of the fed tokens T are the capture's, and no padding
    scale               the factor that turns the scale of the job's loss into that of the replay's, a mean over its
                        labels
    training_loop_loss  tells whether the job's training loop added the term; None: the job's model itself added it
    """

    loss: RouterLoss
    is_real_T: Tensor
    scale: float = 1.0
    training_loop_loss: TrainingLoopLoss | None = None

    def compute(self, states: Mapping[str, RouterState]) -> Tensor:
        """Compute the term from the logits that the routers kept. Raises RuntimeError if one kept none."""
        logits = tuple(states[name].logits_TE for name in self.loss.logits_index)
        if any(tensor is None for tensor in logits):
            raise RuntimeError("a router of the model did not run, and its loss is that of all routers")
        value = self.loss.function(logits, self.loss.num_experts, self.loss.num_chosen, self.is_real_T[None])
        return value * (self.loss.coefficient * self.scale)


def asks_for_router_loss(call: CapturedCall, config: PretrainedConfig) -> bool:
    """Tell whether the job asked its model to add its routers' loss: by the call, or else by the config."""
    return computes_router_loss(call, config) and "labels" in call.tensors


def computes_router_loss(call: CapturedCall, config: PretrainedConfig) -> bool:
    """Tell whether the job's model returned its routers' loss, added to its own or for the loop to add."""
    setting = call.call_facts.get("output_router_logits")
    if setting is None:
        setting = getattr(config.get_text_config(), "output_router_logits", False)
    return bool(setting)


def find_router_loss(model: nn.Module) -> RouterLoss | None:
    """Find the loss that the model's forward adds; None if it adds none, or zero times one."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        if isinstance(code, CodeType) and LOSS_FUNCTION in code.co_names:
            return _read_router_loss(model, module, code, forward.__globals__[LOSS_FUNCTION])
    return None


def _read_router_loss(
    model: nn.Module, module: Any, code: CodeType, function: Callable[..., Tensor]
) -> RouterLoss | None:
    def read(name: str) -> Any:
        value = getattr(module, name, None)
        return getattr(module.config.get_text_config(), name, None) if value is None else value

    coefficient = next((read(name) for name in code.co_names if name.endswith(COEFFICIENT)), None)
    num_experts, num_chosen = read("num_experts"), read("num_experts_per_tok")
    if coefficient == 0:
        return None
    logits_index = dict(_list_recorded_routers(model))
    why_not_computable = None
    if not isinstance(coefficient, float | int) or not isinstance(num_experts, int) or not isinstance(num_chosen, int):
        why_not_computable = "its coefficient, its number of experts or of those a token are not known"
    elif "sqrt" in code.co_names:
        why_not_computable = "the model computes it from products of keys"
    elif not logits_index:
        why_not_computable = "which logits the model takes is not known"
    return RouterLoss(
        function=function,
        coefficient=float(coefficient or 0.0),
        num_experts=int(num_experts or 0),
        num_chosen=int(num_chosen or 0),
        logits_index=logits_index,
        why_not_computable=why_not_computable,
    )


def _list_recorded_routers(model: nn.Module) -> Iterator[tuple[str, int]]:
    """List the modules whose outputs transformers takes for the routers' logits, and which output of each."""
    recorders = _list_recorders(model)
    for name, module in model.named_modules():
        for recorder in recorders:
            target, layer = getattr(recorder, "target_class", recorder), getattr(recorder, "layer_name", None)
            if isinstance(target, type) and isinstance(module, target) and (layer or "") in name:
                yield name, getattr(recorder, "index", 0)


def _list_recorders(model: nn.Module) -> Sequence[Any]:
    for module in model.modules():
        recorders = (getattr(module, "_can_record_outputs", None) or {}).get(ROUTER_LOGITS)
        if recorders is not None:
            return recorders if isinstance(recorders, list) else [recorders]
    return []
