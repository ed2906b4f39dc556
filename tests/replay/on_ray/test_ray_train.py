"""Ray Train is begun again where another process took the port that it had chosen, and for no other reason."""

from collections.abc import Sequence

import pytest

from replay.on_ray.ray_train import NUM_PORTS, fit_on_a_free_port

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
    errors: Sequence[str], outcome: tuple[int, str], num_trainers: int
) -> None:
    num_begun = 0

    def fit() -> int:
        """Fail with the next error, and end well behind the last."""
        nonlocal num_begun
        num_begun += 1
        if num_begun <= len(errors):
            raise RuntimeError(errors[num_begun - 1])
        return 3

    code, error = fit_on_a_free_port(fit)

    assert (code, error.removeprefix("RuntimeError: ")) == outcome
    assert num_begun == num_trainers
