"""Run Ray Train in a process and a Ray job of its own: when it ends, Ray ends the workers and frees their places.

`python -m replay.on_ray.fit FILE`, with a pickled Fit in FILE, writes the exit code and what there is to say into
FILE.json.
"""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from replay.options.option_parsing import in_flags
from replay.options.spec import KEPT_STATES
from replay.output.text import one_line

if TYPE_CHECKING:
    from replay.on_ray.cluster import Cluster  # which imports torch

FAILED = 1
END_SECONDS = 5.0  # for Ray Train to end its workers


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    rank: Callable[[Mapping[str, Any]], int]  # what each worker runs
    job: Mapping[str, Any]  # what it runs with
    storage: str
    name: str
    num_ranks: int
    most_failures: int = 0  # of workers or nodes, before Ray Train gives up

    def run(self, address: str, kind: str) -> tuple[int, str]:
        """Run Ray Train to the end. Returns the exit code of rank 0, or FAILED and the first line of the error.

        address  of the cluster
        kind     what each rank takes: GPU or CPU
        """
        import ray
        from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # it prints what goes to a redirected stream a second time
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        trainer = TorchTrainer(
            self.rank,
            train_loop_config=dict(self.job),
            scaling_config=ScalingConfig(num_workers=self.num_ranks, use_gpu=kind == "GPU"),
            torch_config=TorchConfig(backend="nccl" if kind == "GPU" else "gloo"),
            run_config=RunConfig(
                name=self.name,
                storage_path=self.storage,
                failure_config=FailureConfig(max_failures=self.most_failures),
                checkpoint_config=CheckpointConfig(num_to_keep=KEPT_STATES),
            ),
        )
        try:
            return int(trainer.fit().return_value), ""
        except Exception as error:
            return FAILED, one_line(in_flags(error))


class Fitting:
    """A Ray Train that runs in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], answer: Path) -> None:
        self._process = process
        self._answer = answer

    def is_over(self, seconds: float) -> bool:
        """Wait for its end, at most so long."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None

    def outcome(self) -> tuple[int, str]:
        """Return what `Fit.run` did, once it is over."""
        if not self._answer.is_file():
            return FAILED, f"its process ended with exit code {self._process.returncode}"
        exit_code, error = json.loads(self._answer.read_text())
        return exit_code, error


@contextmanager
def fitting(fit: Fit, cluster: "Cluster") -> Iterator[Fitting]:
    """Start Ray Train in a process of its own, and end it at the end."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "fit"
        address = cluster.ray.get_runtime_context().gcs_address
        file.write_bytes(cluster.ray.cloudpickle.dumps((fit, address, cluster.kind)))
        command = [sys.executable, "-m", "replay.processes.supervisor", "replay.on_ray.fit", str(file)]
        with subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal goes to the driver alone
        ) as process:
            try:
                yield Fitting(process, _answer_file(file))
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)  # Ray Train ends its workers
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(END_SECONDS)
                process.kill()


def _answer_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.json")


if __name__ == "__main__":
    from ray import cloudpickle

    path = Path(sys.argv[1])
    pickled, *where = cloudpickle.loads(path.read_bytes())
    _answer_file(path).write_text(json.dumps(pickled.run(*where)))
