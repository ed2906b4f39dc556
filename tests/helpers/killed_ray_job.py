"""A Ray Train job of two workers, whose rank 1 is killed in each of its two attempts.

python tests/helpers/killed_ray_job.py STORAGE FOLDER
"""

import os
import signal
import sys
from typing import Any

import torch
from ray import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn

from capture import recording


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        loss: Tensor = self.embedding(input_ids).sum()
        return loss


def train_function(settings: dict[str, Any]) -> None:
    model = Model()
    with recording(model, os.path.expandvars(settings["captures"]), flight_recorder=4) as recorder:
        for _ in range(6):
            model(torch.ones(2, 4, dtype=torch.long)).backward()
        recorder.flush()
        torch.distributed.barrier()  # both have recorded
        if train.get_context().get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()


def main() -> None:
    storage, captures = sys.argv[1:]
    TorchTrainer(
        train_function,
        train_loop_config={"captures": captures},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="killed", storage_path=storage, failure_config=FailureConfig(max_failures=1)),
    ).fit()


if __name__ == "__main__":
    main()
