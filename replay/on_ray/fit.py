"""Run Ray Train in a process and a Ray job of its own: when it ends, Ray ends the workers and frees their
places.

`python -m replay.on_ray.fit FILE`, with a pickled Fit in FILE, writes the exit code and what there is to say into
FILE.json.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay.report.text import one_line
from replay.runner.states import KEPT

MOST_FAILURES = 3  # of workers or nodes, before a training is given up
FAILED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    address: str  # of the cluster
    rank: Callable[[Mapping[str, Any]], int]  # what each worker runs
    job: Mapping[str, Any]  # what it runs with
    storage: str
    name: str
    num_ranks: int
    on_gpus: bool

    def run(self) -> tuple[int, str]:
        """Train to the end, and return the exit code and what there is to say about it."""
        import ray
        from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # it prints what goes to a redirected stream a second time
        ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
        trainer = TorchTrainer(
            self.rank,
            train_loop_config=dict(self.job),
            scaling_config=ScalingConfig(num_workers=self.num_ranks, use_gpu=self.on_gpus),
            torch_config=TorchConfig(backend="nccl" if self.on_gpus else "gloo"),
            run_config=RunConfig(
                name=self.name,
                storage_path=self.storage,
                failure_config=FailureConfig(max_failures=MOST_FAILURES),
                checkpoint_config=CheckpointConfig(num_to_keep=KEPT),
            ),
        )
        try:
            return int(trainer.fit().return_value), ""
        except Exception as error:
            return FAILED, f"Ray Train gave up, at most {MOST_FAILURES} failures are allowed: {one_line(str(error))}"


def answer_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.json")


if __name__ == "__main__":
    from ray import cloudpickle

    path = Path(sys.argv[1])
    answer_file(path).write_text(json.dumps(cloudpickle.loads(path.read_bytes()).run()))
