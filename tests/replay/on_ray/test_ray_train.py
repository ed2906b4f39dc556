"""Ray Train is begun again where another process took the port that it had chosen, and for no other reason."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from replay.on_ray.ray_train import NUM_PORTS, RayTrainJob

PORT_TAKEN = "The server socket has failed to listen on any local network address. code: -98, name: EADDRINUSE"


@pytest.mark.parametrize(
    ("errors", "outcome", "num_trainers"),
    [
        ([], (3, ""), 1),
        ([PORT_TAKEN, PORT_TAKEN], (3, ""), 3),
        ([PORT_TAKEN] * NUM_PORTS, (1, PORT_TAKEN), NUM_PORTS),
        (["a worker died"], (1, "a worker died"), 1),
    ],
)
def test_a_port_that_was_taken_is_another_beginning(
    errors: Sequence[str], outcome: tuple[int, str], num_trainers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []

    class Trainer:
        """Stands for Ray Train's: fails with the next error, and ends well behind the last."""

        def __init__(self, *_: Any, **settings: Any) -> None:
            begun.append(settings["run_config"].name)

        def fit(self) -> SimpleNamespace:
            if len(begun) <= len(errors):
                raise RuntimeError(errors[len(begun) - 1])
            return SimpleNamespace(return_value=3)

    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("ray.train.torch.TorchTrainer", Trainer)
    job = RayTrainJob(run_rank=lambda _: 0, job={}, storage="/tmp/storage", name="ddp", num_ranks=2)

    code, error = job.run("192.0.2.1:6379", "CPU")

    assert (code, error.removeprefix("RuntimeError: ")) == outcome
    assert begun == ["ddp"] * num_trainers
