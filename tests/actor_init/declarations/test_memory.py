"""The memory of an actor is predicted from its settings: bytes of each parameter, and which of them are shared out."""

import pytest

from actor_init.declarations.backends import BACKENDS
from actor_init.spec import ActorSpec, Dtype

# Of each: weights, gradients, fp32 masters and moments, in total and of what ranks share out.
Bytes = tuple[float, float, float, float]
CASES: dict[tuple[str, int | None, str, str, bool], tuple[Bytes, Bytes]] = {
    ("deepspeed", 0, "bf16", "adamw", True): ((2, 2, 4, 8), (0, 0, 0, 0)),
    ("deepspeed", 1, "bf16", "adamw", True): ((2, 2, 4, 8), (0, 0, 4, 8)),
    ("deepspeed", 2, "bf16", "adamw", True): ((2, 2, 4, 8), (0, 2, 4, 8)),
    ("deepspeed", 3, "bf16", "adamw", True): ((2, 2, 4, 8), (2, 2, 4, 8)),
    ("deepspeed", 3, "fp32", "adamw", False): ((4, 4, 4, 0), (4, 4, 4, 0)),
    ("deepspeed", 1, "fp16", "lion", True): ((2, 2, 4, 4), (0, 0, 4, 4)),
    ("deepspeed", 0, "bf16", "none", True): ((2, 2, 0, 0), (0, 0, 0, 0)),
    # FSDP2 computes with a cast of its masters, and reduces in fp32.
    ("fsdp2", 3, "bf16", "adamw", True): ((0, 4, 4, 8), (0, 4, 4, 8)),
    ("fsdp2", 2, "bf16", "sgd", True): ((0, 4, 4, 0), (0, 4, 4, 0)),
    ("fsdp2", 3, "bf16", "none", True): ((2, 2, 0, 0), (2, 2, 0, 0)),
    ("fsdp2", 3, "fp32", "none", False): ((4, 4, 0, 0), (4, 4, 0, 0)),
    ("ddp", None, "bf16", "adamw", True): ((4, 4, 0, 8), (0, 0, 0, 0)),
    ("ddp", None, "fp32", "adamw", False): ((4, 4, 0, 0), (0, 0, 0, 0)),
    # What a user's optimizer keeps is not known.
    ("fsdp2", 3, "fp32", "mine.py:build", True): ((0, 4, 4, 8), (0, 4, 4, 8)),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_of_a_parameter_are_those_of_what_is_held(case: tuple[str, int | None, str, str, bool]) -> None:
    backend, stage, dtype, optimizer, steps = case
    spec = ActorSpec(backend=backend, zero_stage=stage, dtype=Dtype(dtype), optimizer=optimizer)
    memory = BACKENDS[backend].predict_memory(spec, steps)
    found = tuple(
        (part.weights, part.gradients, part.masters, part.moments) for part in (memory.total, memory.partitioned)
    )
    assert found == CASES[case]
    total = CASES[case][0]
    assert memory.total.bytes(gradients=True) == sum(total)
    assert memory.total.bytes(gradients=False) == sum(total) - total[1]


@pytest.mark.parametrize(("momentum", "size"), [(None, 0), (0.0, 0), (0.9, 4)])
def test_sgd_keeps_a_number_where_it_has_momentum(momentum: float | None, size: int) -> None:
    spec = ActorSpec(backend="fsdp2", optimizer="sgd", momentum=momentum)
    assert BACKENDS["fsdp2"].predict_memory(spec, True).total.moments == size
