"""Run Ray Train in a process and a Ray job of its own: when it ends, Ray ends the workers and frees their places.

`python -m replay.on_ray.ray_train FILE`, with a pickled RayTrainJob in FILE, writes the exit code and the error
into FILE.json.
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
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from replay.options.option_parsing import format_error_with_flags
from replay.options.spec import NUM_KEPT_STATES
from replay.output.text import join_lines

if TYPE_CHECKING:
    # It imports torch, for which neither the process that only waits for Ray Train nor a test may wait.
    from replay.on_ray.cluster import Cluster

FAILED_EXIT_CODE = 1
# The time that Ray Train gets to end its workers.
END_SECONDS = 5.0
# Ray Train chooses a free port, which rank 0 binds a while later. Where another process takes it in between, Ray Train
# gives up, however many failures are allowed: DefaultFailurePolicy (Ray 2.60) tries none but its own two errors of a
# start again. So Ray Train is begun again, so many times in all.
NUM_PORTS = 3
PORT_IS_TAKEN = "EADDRINUSE"


@dataclass(frozen=True, kw_only=True, slots=True)
class RayTrainJob:
    # What each worker calls, with `job`.
    run_rank: Callable[[Mapping[str, Any]], int]
    job: Mapping[str, Any]
    storage: str
    name: str
    num_ranks: int
    # Ray Train gives up after so many failures of workers or nodes.
    max_failures: int = 0

    def run(self, address: str, resource: str) -> tuple[int, str]:
        """Run Ray Train to the end. Returns the exit code of rank 0, or FAILED and the first line of the error.

        address   of the cluster
        resource  what each rank takes: GPU or CPU
        """
        import ray
        from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        # Ray Train's patch of `print` prints what goes to a redirected stream a second time.
        os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        # A trainer of the same name and storage goes on from the states of the one before.
        begin_trainer = partial(
            TorchTrainer,
            self.run_rank,
            train_loop_config=dict(self.job),
            scaling_config=ScalingConfig(num_workers=self.num_ranks, use_gpu=resource == "GPU"),
            torch_config=TorchConfig(backend="nccl" if resource == "GPU" else "gloo"),
            run_config=RunConfig(
                name=self.name,
                storage_path=self.storage,
                failure_config=FailureConfig(max_failures=self.max_failures),
                checkpoint_config=CheckpointConfig(num_to_keep=NUM_KEPT_STATES),
            ),
        )
        return fit_on_a_free_port(lambda: begin_trainer().fit().return_value)


def fit_on_a_free_port(fit: Callable[[], Any]) -> tuple[int, str]:
    """Begin Ray Train with `fit`, and again as long as another process had taken the port that it had chosen.

    Returns what `fit` returns, the exit code of rank 0, or FAILED and the first line of the error that it raises.
    """
    for num_left in reversed(range(NUM_PORTS)):
        try:
            return int(fit()), ""
        except Exception as error:
            if not num_left or PORT_IS_TAKEN not in str(error):
                return FAILED_EXIT_CODE, join_lines(format_error_with_flags(error))
    raise AssertionError("the last one returns its outcome")


class RayTrainProcess:
    """A Ray Train that runs in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], answer: Path) -> None:
        self._process = process
        self._answer = answer

    def wait(self, seconds: float) -> bool:
        """Wait for its end, at most so long. Return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None

    def read_outcome(self) -> tuple[int, str]:
        """Return what `RayTrainJob.run` returned, once it is over."""
        if not self._answer.is_file():
            return FAILED_EXIT_CODE, f"its process ended with exit code {self._process.returncode}"
        exit_code, error = json.loads(self._answer.read_text())
        return exit_code, error


@contextmanager
def start_ray_train(train_job: RayTrainJob, cluster: "Cluster") -> Iterator[RayTrainProcess]:
    """Start Ray Train in a process of its own, and end it at the end."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "fit"
        address = cluster.ray.get_runtime_context().gcs_address
        file.write_bytes(cluster.ray.cloudpickle.dumps((train_job, address, cluster.resource)))
        command = [sys.executable, "-m", "replay.processes.supervisor", "replay.on_ray.ray_train", str(file)]
        # In a session of its own, so that Ctrl-C in a terminal goes to the driver alone.
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            try:
                yield RayTrainProcess(process, _name_answer_file(file))
            finally:
                if process.poll() is None:
                    # On SIGINT Ray Train ends its workers.
                    process.send_signal(signal.SIGINT)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(END_SECONDS)
                process.kill()


def _name_answer_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.json")


if __name__ == "__main__":
    from ray import cloudpickle

    path = Path(sys.argv[1])
    train_job, address, resource = cloudpickle.loads(path.read_bytes())
    _name_answer_file(path).write_text(json.dumps(train_job.run(address, resource)))
