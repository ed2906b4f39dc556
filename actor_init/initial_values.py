"""Compute the values that a model's class gives its buffers and vectors, where transformers cannot give them later.

From 5.0 on transformers' `_init_weights` fills them again on a model that was built on the meta device. Before, they
are computed in the constructors alone; so the model is built once more, with its matrices on the meta device and the
rest on the CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

INIT_FILLS_BUFFERS = int(transformers.__version__.partition(".")[0]) >= 5


def build_with_values(config: PretrainedConfig, *, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model with buffers and vectors on the CPU, as its class sets them, and matrices on the meta device."""
    with torch.random.fork_rng(devices=[]), _matrices_on_meta():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=attention, dtype=dtype)
    assert isinstance(model, PreTrainedModel)
    return model


def copy_buffers(source: nn.Module, target: nn.Module, device: torch.device) -> None:
    """Give `target` the buffers of `source`, and tensors that it holds as plain attributes, on `device`.

    Rotary embeddings keep their frequencies as both.
    """
    for name, buffer in source.named_buffers(recurse=False):
        setattr(target, name, buffer.to(device))
    for name, value in vars(source).items():
        if isinstance(value, Tensor):
            setattr(target, name, value.to(device))


@contextmanager
def _matrices_on_meta() -> Iterator[None]:
    """Move each parameter of two or more dimensions to the meta device as it is registered: none is filled."""
    register = nn.Module.register_parameter

    def register_small(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.ndim > 1:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", register_small):
        yield
