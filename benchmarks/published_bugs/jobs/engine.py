"""DeepSpeed's engine with some config: python engine.py CONFIG_JSON FOLDER (after it --local_rank may stand)."""

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

from benchmarks.published_bugs.jobs.common import make_batches, make_model


def main(config: dict[str, Any], folder: Path) -> None:
    # compiled at first use otherwise, under a lock in the home folder that a killed job leaves behind
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    model = make_model(folder)
    num_windows, accumulated = 2, config.get("gradient_accumulation_steps", 1)
    scaled_by_caller = config.pop("scaled_by_caller", False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
            **config,
        },
    )
    for batch in make_batches(num_windows * accumulated):
        loss = engine(**batch).loss
        if scaled_by_caller:  # as transformers' Trainer does it
            engine.backward(loss / accumulated, scale_wrt_gas=False)
        else:
            engine.backward(loss)
        engine.step()
        print("norm", engine.get_global_grad_norm())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
