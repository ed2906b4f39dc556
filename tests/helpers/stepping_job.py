"""Jobs of two ranks whose optimizer steps are recorded, one after the other: torchrun stepping_job.py FOLDER CASE...

A case is `ddp`, `fsdp2`, or `zero<stage>` with `-bf16`, `-accumulating`, `-clipping`, `-subgroups` behind it. They
train at learning rate 0, so that every gradient is that of the first weights. Each records into FOLDER/CASE.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from capture import recording
from tests.trainers.common import make_batches, make_model

MAX_NORM = 0.5
NUM_BATCHES = 4


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0)


def train_in_torch(folder: Path, case: str) -> None:
    model: Any = make_model(folder, saves=False)
    if case.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = optimizer_of(model)
    window = 2 if "accumulating" in case else 1
    with recording(model, folder / case, reproduce=True):
        for number, batch in enumerate(make_batches(NUM_BATCHES)):
            is_last = (number + 1) % window == 0
            with model.no_sync() if case.startswith("ddp") and not is_last else nullcontext():
                (model(**batch).loss / window).backward()
            if is_last:
                if "clipping" in case:
                    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()


def train_in_deepspeed(folder: Path, case: str) -> None:
    import deepspeed

    model = make_model(folder, saves=False)
    stage = {"stage": int(case.removeprefix("zero")[0])} | ({"sub_group_size": 5000} if "subgroups" in case else {})
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2 if "accumulating" in case else 1,
        "gradient_clipping": MAX_NORM if "clipping" in case else 0.0,
        "zero_optimization": stage,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": "bf16" in case},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=settings)
    with recording(engine, folder / case, reproduce=True):
        for batch in make_batches(NUM_BATCHES):
            engine.backward(engine(**batch).loss)
            engine.step()


def main(folder: Path, cases: list[str]) -> None:
    import deepspeed

    # compiled at first use otherwise, under a lock in the home folder that a killed job leaves behind
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    for case in cases:
        (train_in_deepspeed if case.startswith("zero") else train_in_torch)(folder, case)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
