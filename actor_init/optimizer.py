"""The optimizer that both backends hand their master weights to."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from actor_init.spec import ActorSpec, Dtype, OptimizerName

TORCH_DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP32: torch.float32, Dtype.FP16: torch.float16}


def make_optimizer(spec: ActorSpec, parameters: Iterable[nn.Parameter]) -> Optimizer | None:
    """torch's own AdamW (fused on CUDA) or SGD; its state is allocated at the first step, as in training."""
    match spec.optimizer:
        case OptimizerName.NONE:
            return None
        case OptimizerName.SGD:
            return torch.optim.SGD(parameters, lr=spec.learning_rate)
        case OptimizerName.ADAMW:
            chosen = list(parameters)
            on_cuda = chosen[0].is_cuda
            return torch.optim.AdamW(chosen, lr=spec.learning_rate, fused=True if on_cuda else None)
