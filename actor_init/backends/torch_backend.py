"""Hold what the backends over torch's own optimizer share: the loss scale, states, progress and the end of an actor."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from actor_init.model import ModelSource
from actor_init.saving import state_file
from actor_init.schedule_and_norm import Progress, count_state_bytes
from actor_init.spec import ActorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBackend:
    """The parts of an actor that do not depend on how it is sharded.

    Nothing here shards, gathers or casts: the sharding backends are compared with DDP, so it shares no such code with
    them.

    kernels  what was fused; None: nothing
    """

    spec: ActorSpec
    model: PreTrainedModel
    source: ModelSource
    optimizer: Optimizer | None
    schedule: LambdaLR | None
    scaler: torch.amp.GradScaler
    attention: str
    kernels: str | None

    def skip_passes(self, num_passes: int) -> None:
        """Count passes that do not run, which makes no difference where each backward averages over the ranks."""

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss / self.spec.resolved_grad_accumulation))

    def loss_scale(self) -> float:
        return self.scaler.get_scale()

    def save_state(self, folder: Path) -> None:
        assert self.optimizer is not None
        assert self.schedule is not None
        state_file.save_state(folder, self.model, self.optimizer, self.schedule, self.scaler)

    def load_state(self, folder: Path) -> None:
        assert self.optimizer is not None
        assert self.schedule is not None
        state_file.load_state(folder, self.model, self.optimizer, self.schedule, self.scaler)

    def progress(self) -> Progress:
        return Progress.from_schedule(self.schedule)

    def count_state_bytes(self) -> int:
        return count_state_bytes(self.optimizer)

    def close(self) -> None:
        self.model.zero_grad(set_to_none=True)
