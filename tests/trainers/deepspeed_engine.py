"""DeepSpeed's engine, two ranks on CPUs: python deepspeed_engine.py FOLDER STAGE"""

import sys
from pathlib import Path

import deepspeed
import torch

from tests.trainers.common import make_batches, make_model, write_losses


def main(folder: Path, stage: int) -> None:
    # compiled at first use otherwise, under a lock in the home folder that a killed job leaves behind
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    model = make_model(folder)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    losses = []
    for batch in make_batches():
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    write_losses(folder, losses)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[-2]), int(sys.argv[-1]))  # deepspeed puts --local_rank in front
