"""The optimizer that both backends hand their master weights to."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from actor_init.spec import ActorSpec, Dtype, OptimizerName

TORCH_DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP32: torch.float32, Dtype.FP16: torch.float16}


def make_optimizer(spec: ActorSpec, parameters: Iterable[Any]) -> Optimizer | None:
    """torch's own AdamW (fused on CUDA) or SGD over parameters or groups of them, as torch takes them.

    Its state is allocated at the first step, as in training.
    """
    match spec.optimizer:
        case OptimizerName.NONE:
            return None
        case OptimizerName.SGD:
            return torch.optim.SGD(parameters, lr=spec.learning_rate)
        case OptimizerName.ADAMW:
            return torch.optim.AdamW(
                parameters, lr=spec.learning_rate, fused=True if torch.cuda.is_available() else None
            )
