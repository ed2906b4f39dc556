"""Which devices runs in processes of their own have, and whether they are here."""

import pytest

from replay.processes.pool import Machine

ON_A_CPU, ON_TWO_GPUS, ON_FOUR_GPUS = (
    Machine(num_devices=n, has_gpus=gpus) for n, gpus in ((8, False), (2, True), (4, True))
)


@pytest.mark.parametrize(
    ("num_gpus", "asked", "found"),
    [(0, None, (2, False)), (0, 8, (8, False)), (3, None, (3, True)), (3, 2, (2, True)), (3, 4, (4, True))],
)
def test_it_is_what_is_asked_for_or_all_there_is(num_gpus: int, asked: int | None, found: tuple[int, bool]) -> None:
    machine = Machine.detect(asked, num_gpus=num_gpus)
    assert (machine.num_devices, machine.has_gpus) == found


@pytest.mark.parametrize(("num_gpus", "here"), [(0, ON_A_CPU), (1, None), (3, ON_TWO_GPUS)])
def test_gpus_are_here_if_there_are_as_many_and_processes_on_a_cpu_where_there_are_none(
    num_gpus: int, here: Machine | None
) -> None:
    detected = Machine.detect(num_gpus=num_gpus)
    assert [machine for machine in (ON_A_CPU, ON_TWO_GPUS, ON_FOUR_GPUS) if machine.is_part_of(detected)] == [here] * (
        here is not None
    )
