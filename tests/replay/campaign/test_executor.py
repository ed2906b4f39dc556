"""Where planned runs run: how many devices they may use, and where a campaign may go on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actor_init.spec import UsageError
from replay.campaign.executor import OnRay, ThisMachine
from replay.on_ray.cluster import Cluster
from replay.options.option_parsing import format_error_with_flags
from replay.processes.pool import Machine


def make_cluster(*node_slots: int, resource: str = "GPU") -> OnRay:
    """A cluster of nodes with so many GPUs or CPUs."""
    nodes = [
        {
            "NodeID": str(number),
            "NodeManagerHostname": f"host{number}",
            "Alive": True,
            "Resources": {"CPU": 64.0} | ({resource: float(slots)}),
        }
        for number, slots in enumerate(node_slots)
    ]
    return OnRay(Cluster(SimpleNamespace(nodes=lambda: nodes)))


@pytest.mark.parametrize(
    ("node_slots", "num_devices", "expected"),
    [
        ([4, 8], None, 8),  # the largest node's
        ([8, 4], None, 8),
        ([4, 8], 3, 3),
        ([4, 8], 12, 12),
    ],
)
def test_planned_runs_on_ray_use_the_largest_node_or_as_many_gpus_as_are_asked_for(
    node_slots: list[int], num_devices: int | None, expected: int
) -> None:
    machine = make_cluster(*node_slots).choose_machine(num_devices)
    assert machine == Machine(num_devices=expected, has_gpus=True)


def test_more_gpus_than_the_cluster_has_are_refused() -> None:
    with pytest.raises(UsageError) as refusal:
        make_cluster(4, 8).choose_machine(13)
    assert format_error_with_flags(refusal.value) == (
        "--processes 13 needs as many GPUs, and the cluster has 12 on 2 nodes. Try: --processes 12"
    )


@pytest.mark.parametrize(("cpus", "expected"), [(1, 1), (8, 2)])
def test_on_a_cluster_without_gpus_runs_have_two_processes_if_there_is_room(cpus: int, expected: int) -> None:
    machine = make_cluster(cpus, resource="CPU").choose_machine(None)
    assert machine == Machine(num_devices=expected, has_gpus=False)


@pytest.mark.parametrize(
    ("begun_on", "here"),
    [
        (Machine(num_devices=12, has_gpus=True), None),
        (Machine(num_devices=13, has_gpus=True), "was begun on 13 GPUs, and the cluster has 12 GPUs. Go on there"),
        (Machine(num_devices=2, has_gpus=False), "was begun on a CPU, and the cluster has 12 GPUs. Go on there"),
    ],
)
def test_a_campaign_goes_on_on_a_cluster_of_the_same_kind_that_is_as_large(begun_on: Machine, here: str | None) -> None:
    cluster = make_cluster(4, 8)
    if here is None:
        cluster.check_machine(begun_on, Path("logs/x"))
        return
    with pytest.raises(UsageError) as refusal:
        cluster.check_machine(begun_on, Path("logs/x"))
    assert format_error_with_flags(refusal.value) == f"--continue logs/x {here}"


@pytest.mark.parametrize(
    ("at_once", "has_gpus", "num_devices", "expected"),
    [(None, True, 8, 1), (None, False, 2, 1), (3, False, 2, 3), (2, True, 8, 2)],
)
def test_runs_here_go_one_by_one_unless_several_are_asked_for(
    at_once: int | None, has_gpus: bool, num_devices: int, expected: int, tmp_path: Path
) -> None:
    machine = Machine(num_devices=num_devices, has_gpus=has_gpus)
    runner = cast(Any, ThisMachine().make_runner(tmp_path, machine, at_once))
    assert runner.at_once == expected
    assert bool(runner.gpus) is bool(at_once and has_gpus)
    assert ThisMachine().gives_whole_machine(machine, at_once) is (at_once is None)
    # What goes on from a state runs alone, whatever is asked for.
    assert cast(Any, ThisMachine().make_resumable_runner(tmp_path, machine, "")).at_once == 1
