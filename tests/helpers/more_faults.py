"""Fifteen faults that shapes, small parameters and directions show: each is found by `replay parity --matrix quick`.

What loss, log-probs and the gradient's length cannot show, or what no ordinary batch does. Each is put into a cell that
the quick matrix has, under the model that it takes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import PreTrainedModel

from actor_init.inputs.packing import ActorInputs
from actor_init.parallel import split_linear
from actor_init.world import World
from replay.agreement.matrix import EDGE_DOCUMENTS, EDGE_ROWS, Setting
from tests.helpers.faults import Fault, _edited, _other_inputs

Change = Callable[[Tensor], Tensor]


class _Changed(torch.autograd.Function):
    """A tensor as it is, whose gradient is what `change` makes of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Change) -> Tensor:
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradient), None


def _changed(tensor: Tensor, change: Change) -> Tensor:
    found: Tensor = _Changed.apply(tensor, change)
    return found


def _other_gradient(module_name: str, own_name: str, change: Change) -> AbstractContextManager[Any]:
    """The module's parameter gets the gradient that `change` makes of its own."""

    def edit(model: PreTrainedModel) -> None:
        module: Any = model.get_submodule(module_name)
        forward = module.forward

        def changed(*args: Any, **kwargs: Any) -> Any:
            other = {own_name: _changed(module.get_parameter(own_name), change)}
            module.forward = forward
            try:
                return functional_call(module, other, args, kwargs)
            finally:
                module.forward = changed

        module.forward = changed

    return _edited(edit)


def _own_parameters(change: Callable[[Any, Tensor], Tensor]) -> AbstractContextManager[Any]:
    """Linear layers that tp splits compute with what `change` makes of their bias."""
    own = split_linear.read_local_parameters

    def changed(linear: Any) -> tuple[Tensor, Tensor | None]:
        weight, bias = own(linear)
        return weight, None if bias is None else change(linear, bias)

    return patch.object(split_linear, "read_local_parameters", changed)


def _is_split_by_rows(linear: Any) -> bool:
    weight: DTensor = linear.weight
    return weight.placements[0].is_shard(1)


@contextmanager
def bias_added_tp_times(world: World) -> Iterator[None]:
    with _own_parameters(lambda linear, bias: bias * 2 if _is_split_by_rows(linear) else bias):
        yield


@contextmanager
def bias_gradient_summed_over_tp(world: World) -> Iterator[None]:
    """What every tp rank has whole is added up over them."""

    def doubled(linear: Any, bias: Tensor) -> Tensor:
        return _changed(bias, lambda gradient: gradient * 2) if _is_split_by_rows(linear) else bias

    with _own_parameters(doubled):
        yield


@contextmanager
def norm_gradient_halved_on_tp(world: World) -> Iterator[None]:
    """A norm's gradient is averaged over the tp ranks that should add it up."""
    with _other_gradient("model.layers.1.input_layernorm", "weight", lambda gradient: gradient / 2):
        yield


@contextmanager
def query_gradient_transposed(world: World) -> Iterator[None]:
    """The gradient has the right norm and a wrong direction."""
    with _other_gradient("model.layers.1.self_attn.q_proj", "weight", lambda gradient: gradient.T.contiguous()):
        yield


@contextmanager
def norm_weight_ignored(world: World) -> Iterator[None]:
    def edit(model: PreTrainedModel) -> None:
        norm: Any = model.get_submodule("model.layers.0.post_attention_layernorm")
        forward = norm.forward
        norm.forward = lambda hidden: forward(hidden) / norm.weight

    with _edited(edit):
        yield


@contextmanager
def gradient_of_one_rank_alone(world: World) -> Iterator[None]:
    """One small parameter's gradient is the first data rank's."""

    def first(gradient: Tensor) -> Tensor:
        return gradient * (2 if world.data_rank == 0 else 0)

    with _other_gradient("model.layers.0.input_layernorm", "weight", first):
        yield


@contextmanager
def bucket_reduced_twice(world: World) -> Iterator[None]:
    with _other_gradient("model.layers.0.self_attn.k_proj", "weight", lambda gradient: gradient * 2):
        yield


@contextmanager
def reduced_in_bf16(world: World) -> Iterator[None]:
    """Gradients travel in bf16 where fp32 was meant."""
    from actor_init.declarations.backends.deepspeed_config import build_config

    def narrow(*args: Any) -> dict[str, Any]:
        return {**build_config(*args), "communication_data_type": "bf16"}

    with patch("actor_init.backends.deepspeed.build_config", narrow):
        yield


@contextmanager
def accumulation_divided_twice(world: World) -> Iterator[None]:
    from actor_init.backends.fsdp2 import FSDP2Backend

    backward = FSDP2Backend.backward

    def divided(self: FSDP2Backend, loss: Tensor) -> None:
        backward(self, loss / (self.spec.grad_accumulation or 1))

    with patch.object(FSDP2Backend, "backward", divided):
        yield


@contextmanager
def last_of_window_alone(world: World) -> Iterator[None]:
    """Each backward of a window writes over the gradients of those before it, as large as they are together."""
    from actor_init.backends.ddp import DDPBackend

    backward = DDPBackend.backward

    def overwriting(self: DDPBackend, loss: Tensor) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        backward(self, loss * (self.spec.grad_accumulation or 1))

    with patch.object(DDPBackend, "backward", overwriting):
        yield


@contextmanager
def checkpoint_cut(world: World) -> Iterator[None]:
    """A checkpointed block detaches what comes into it."""

    def edit(model: PreTrainedModel) -> None:
        block: Any = model.get_submodule("model.layers.1")
        forward = block.forward

        def cut(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return forward(hidden_states.detach(), *args, **kwargs)

        block.forward = cut

    with _edited(edit):
        yield


@contextmanager
def checkpoint_recomputes_otherwise(world: World) -> Iterator[None]:
    """What backward computes again is in bf16, as without the autocast of the first time."""

    def edit(model: PreTrainedModel) -> None:
        module: Any = model.get_submodule("model.layers.1.mlp")
        forward = module.forward

        def narrow(hidden: Tensor) -> Any:
            is_again = torch._C._current_graph_task_id() != -1
            return forward(hidden.bfloat16().float() if is_again else hidden)

        module.forward = narrow

    with _edited(edit):
        yield


@contextmanager
def short_documents_go_on(world: World) -> Iterator[None]:
    """The border behind a document of 1 token is lost: the next one goes on from it."""

    def merged(inputs: ActorInputs) -> ActorInputs:
        if inputs.cu_seq_lens is None:
            return inputs
        borders = inputs.cu_seq_lens.tolist()
        position_ids = inputs.position_ids.clone()
        for (first, end), (_, next_end) in pairwise(pairwise(borders)):
            if end - first == 1:
                position_ids[0, end:next_end] += position_ids[0, first] + 1
        return replace(inputs, position_ids=position_ids)

    with _other_inputs(merged):
        yield


@contextmanager
def empty_rows_counted(world: World) -> Iterator[None]:
    """The mean counts a token for every row, also where it has none to score."""

    def averaged(log_probs_BA: Tensor, inputs: ActorInputs) -> Tensor:
        return -log_probs_BA.sum() / inputs.action_mask_BA.sum(dim=1).clamp(min=1).sum()

    with patch("replay.runner.replayer.compute_negated_mean", averaged):
        yield


@contextmanager
def rows_beyond_32_unmasked(world: World) -> Iterator[None]:
    def unmasked(inputs: ActorInputs) -> ActorInputs:
        if inputs.attention_mask_BS is None:
            return inputs
        mask_BS = inputs.attention_mask_BS.clone()
        mask_BS[32:] = True
        return replace(inputs, attention_mask_BS=mask_BS)

    with _other_inputs(unmasked):
        yield


BIASES = "llama, biases"
EXACT: Setting = {"dtype": "fp32", "attention": "sdpa"}
STAGES: Mapping[int, Setting] = {
    stage: {"backend": "deepspeed", "zero_stage": stage, **EXACT, "data": 2} for stage in range(4)
}
TP: Setting = {"backend": "fsdp2", **EXACT, "tp": 2}
PACKED: Setting = {"backend": "deepspeed", **EXACT, "packing": True}
PADDED: Setting = {"backend": "deepspeed", **EXACT, "packing": False}
CHECKPOINTED = {"gradient_checkpointing": True}
ACCUMULATED = {"grad_accumulation": 2}
MORE_FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(breaks=bias_added_tp_times, cell=TP, model=BIASES),
        Fault(breaks=bias_gradient_summed_over_tp, cell=TP, model=BIASES),
        Fault(breaks=norm_gradient_halved_on_tp, cell=TP, model=BIASES),
        Fault(breaks=query_gradient_transposed, cell=PACKED),
        Fault(breaks=norm_weight_ignored, cell=STAGES[3]),
        Fault(breaks=gradient_of_one_rank_alone, cell={**STAGES[2], "backend": "fsdp2"}),
        Fault(breaks=bucket_reduced_twice, cell=STAGES[2]),
        Fault(breaks=reduced_in_bf16, cell=STAGES[1]),
        Fault(breaks=accumulation_divided_twice, cell={"backend": "fsdp2", **EXACT, **ACCUMULATED}),
        Fault(breaks=last_of_window_alone, cell={"backend": "ddp", **EXACT, **ACCUMULATED}),
        Fault(breaks=checkpoint_cut, cell={"backend": "fsdp2", **EXACT, **CHECKPOINTED}),
        Fault(breaks=checkpoint_recomputes_otherwise, cell={"backend": "ddp", **EXACT, **CHECKPOINTED}),
        Fault(breaks=short_documents_go_on, cell=PACKED, group=EDGE_DOCUMENTS),
        Fault(breaks=empty_rows_counted, cell=PADDED, group=EDGE_ROWS),
        Fault(breaks=rows_beyond_32_unmasked, cell=PADDED, group=EDGE_ROWS),
    )
}
