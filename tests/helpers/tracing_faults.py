"""Faults at known places of a model of two layers, for one process: what `find_first_difference` has to name."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from actor_init import action_log_probs
from actor_init.backends.fsdp2 import FSDP2Backend
from actor_init.backends.protocol import Backend, open_backend
from actor_init.inputs.packing import ActorInputs, prepare_inputs
from replay.objective.objective import compute_negated_mean
from replay.tracing.trace_file import TensorKind

SHORT_INPUT = 19  # of the sample's: two rows of 200 tokens, the second padded on both sides
BORDER = 200  # of its packed row, where the second document begins
PLACE_OF_BORDER = (1, 14)  # row and token as captured

Found = tuple[
    TensorKind, str, str, int | None, tuple[int, int] | None
]  # kind, name, what, layer; row and token if known


def in_module(name: str, breaks: Callable[[nn.Module], object]) -> AbstractContextManager[Any]:
    """`breaks` the module, in place, before anything is traced."""

    def opened(*args: Any) -> Backend:
        backend = open_backend(*args)
        with torch.no_grad():
            breaks(backend.model.get_submodule(name))
        return backend

    return patch("replay.runner.replayer.open_backend", opened)


def fed(changes: Callable[[ActorInputs], dict[str, Any]]) -> AbstractContextManager[Any]:
    def wrong(*args: Any, **kwargs: Any) -> ActorInputs:
        inputs = prepare_inputs(*args, **kwargs)
        return replace(inputs, **changes(inputs))

    return patch("replay.runner.run_pass.prepare_inputs", wrong)


def counted(inputs: ActorInputs) -> dict[str, Any]:
    return {"position_ids": torch.arange(inputs.input_ids.shape[1]).unsqueeze(0)}


def swap_sign(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, args, output: -output)


def change_one_row(module: Any) -> None:
    module.weight.to_local()[3] *= 1.001


def change_border(module: nn.Module) -> None:
    def change(_: nn.Module, args: tuple[Tensor]) -> Tensor:
        changed = args[0].clone()
        changed[:, BORDER] *= 1.01
        return changed

    module.register_forward_pre_hook(change)


def scale_gradient(module: nn.Module) -> None:
    def scale(_: nn.Module, args: Any, output: Any) -> None:
        output.register_hook(lambda gradient: gradient * 1.05)

    module.register_forward_hook(scale)


@contextmanager
def reduced_twice() -> Iterator[None]:
    backward = FSDP2Backend.backward

    def twice(self: FSDP2Backend, loss: Tensor) -> None:
        backward(self, loss)
        gradient = self.model.get_parameter("model.layers.1.mlp.down_proj.weight").grad
        assert gradient is not None
        gradient *= 2

    with patch.object(FSDP2Backend, "backward", twice):
        yield


def wrong_below_the_inputs() -> AbstractContextManager[Any]:
    log_probs = action_log_probs.action_log_probs
    return patch(
        "actor_init.backends.fsdp2.action_log_probs",
        lambda model, inputs: log_probs(model, replace(inputs, **counted(inputs))),
    )


def loss_over_padding() -> AbstractContextManager[Any]:
    return patch(
        "replay.runner.replayer.compute_negated_mean",
        lambda log_probs, inputs: compute_negated_mean(log_probs, inputs) / 2,
    )


FAULTS: Mapping[str, tuple[Callable[[], AbstractContextManager[Any]], str, Found]] = {
    "a norm's sign": (
        lambda: in_module("model.layers.1.input_layernorm", swap_sign),
        "",
        (TensorKind.FORWARD, "model.layers.1.input_layernorm", "output", 1, None),
    ),
    "a stale row of a weight": (
        lambda: in_module("model.layers.1.mlp.up_proj", change_one_row),
        "",
        (TensorKind.PARAMETER, "model.layers.1.mlp.up_proj.weight", "weight", 1, None),
    ),
    "attention at a border alone": (
        lambda: in_module("model.layers.1.self_attn.o_proj", change_border),
        "",
        (TensorKind.FORWARD, "model.layers.1.self_attn.o_proj", "input", 1, PLACE_OF_BORDER),
    ),
    "a sum with the residual": (
        lambda: in_module("model.layers.1.post_attention_layernorm", change_border),
        "",
        (TensorKind.FORWARD, "model.layers.1.post_attention_layernorm", "input", 1, PLACE_OF_BORDER),
    ),
    "positions not reset": (lambda: fed(counted), "", (TensorKind.INPUT, "position_ids", "fed", None, PLACE_OF_BORDER)),
    "positions not reset, inside": (
        wrong_below_the_inputs,
        "",
        (TensorKind.FORWARD, "model.rotary_emb", "output", None, None),
    ),
    "mask off by one": (
        lambda: fed(lambda inputs: {"attention_mask_BS": torch.roll(_mask(inputs), 1, dims=1)}),
        "--no-packing",
        (TensorKind.INPUT, "attention_mask", "fed", None, None),
    ),
    "action mask off by one": (
        lambda: fed(lambda inputs: {"predictor_N": inputs.predictor_N - 1}),
        "",
        (TensorKind.INPUT, "action_mask", "fed", None, None),
    ),
    "a gradient scaled": (
        lambda: in_module("model.layers.0.mlp.up_proj", scale_gradient),
        "",
        (TensorKind.GRADIENT, "model.layers.0.mlp.up_proj", "output", 0, None),
    ),
    "a gradient reduced twice": (
        reduced_twice,
        "",
        (TensorKind.PARAMETER_GRADIENT, "model.layers.1.mlp.down_proj.weight", "gradient", 1, None),
    ),
    "loss over too many tokens": (loss_over_padding, "", (TensorKind.GRADIENT, "log_probs", "output", None, None)),
}


def _mask(inputs: ActorInputs) -> Tensor:
    assert inputs.attention_mask_BS is not None
    return inputs.attention_mask_BS
