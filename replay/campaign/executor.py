"""Choose where the runs of parity and suite are made: in processes on this machine, or in cells on a Ray cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from actor_init.spec import UsageError
from replay.campaign.training import Trainings
from replay.on_ray.cluster import Cluster, open_cluster
from replay.on_ray.task_runner import RayTaskRunner
from replay.options.ray_options import RayOptions
from replay.output.text import pluralise
from replay.processes.launch import list_gpus
from replay.processes.pool import PROCESSES_ON_A_CPU, Machine, RunHere, RunTasks


class Executor(Protocol):
    def machine(self, num_devices: int | None, option: str) -> Machine:
        """Return the devices that runs may use. Raises UsageError, which names `option`, if there are fewer."""

    def refuse_other(self, machine: Machine, folder: Path) -> None:
        """Raise UsageError if the runs in `folder`, made on `machine`, cannot go on here."""

    def runner(self, root: Path, machine: Machine, at_once: int | None) -> RunTasks:
        """Return what runs tasks whose logs lie below `root`; `at_once` is that of `run_children`; None: as usual."""

    def trainer(self, root: Path, machine: Machine, storage: str | None) -> RunTasks:
        """Return what trains tasks whose logs lie below `root`, one after another.

        storage  where the tasks keep the states that they go on from; None: they keep none
        """

    def runs_alone(self, machine: Machine, at_once: int | None) -> bool:
        """Does one run at a time have the machine for itself, so that its times mean something?"""


class ThisMachine:
    def machine(self, num_devices: int | None, option: str) -> Machine:
        machine, here = Machine.detect(num_devices), Machine.detect()
        if not machine.is_part_of(here):
            raise UsageError(
                f"{option} {num_devices}, and this machine has {pluralise(here.num_devices, 'GPU')}. "
                f"Try: {option} {here.num_devices}"
            )
        return machine

    def refuse_other(self, machine: Machine, folder: Path) -> None:
        if not machine.is_part_of(here := Machine.detect()):
            raise UsageError(f"--continue {folder} was begun on {machine.text}, and here is {here.text}. Go on there")

    def runner(self, root: Path, machine: Machine, at_once: int | None) -> RunTasks:
        gpus = list_gpus(machine.num_devices) if at_once and machine.has_gpus else []
        return RunHere(at_once=at_once or 1, gpus=gpus)

    def trainer(self, root: Path, machine: Machine, storage: str | None) -> RunTasks:
        return self.runner(root, machine, None)

    def runs_alone(self, machine: Machine, at_once: int | None) -> bool:
        return (at_once or 1) * (machine.num_devices if at_once and machine.has_gpus else 1) == 1


@dataclass(frozen=True, slots=True)
class OnRay:
    cluster: Cluster

    def machine(self, num_devices: int | None, option: str) -> Machine:
        has_gpus = self.cluster.resource == "GPU"
        usual = self.cluster.slots_on_largest_node if has_gpus else min(PROCESSES_ON_A_CPU, self.cluster.num_slots)
        self.cluster.refuse_too_many(num_devices or usual, option)
        return Machine(num_devices=num_devices or usual, has_gpus=has_gpus)

    def refuse_other(self, machine: Machine, folder: Path) -> None:
        here = Machine(num_devices=self.cluster.num_slots, has_gpus=self.cluster.resource == "GPU")
        if here.has_gpus != machine.has_gpus or machine.num_devices > here.num_devices:
            raise UsageError(
                f"--continue {folder} was begun on {machine.text}, and the cluster has {here.text}. Go on there"
            )

    def runner(self, root: Path, machine: Machine, at_once: int | None) -> RunTasks:
        return RayTaskRunner(self.cluster, root, at_once=at_once or 1)

    def trainer(self, root: Path, machine: Machine, storage: str | None) -> RunTasks:
        return self.runner(root, machine, None) if storage is None else Trainings(self.cluster, root, storage)

    def runs_alone(self, machine: Machine, at_once: int | None) -> bool:
        return False


@contextmanager
def executor(ray: RayOptions | None, num_ranks: int = PROCESSES_ON_A_CPU) -> Iterator[Executor]:
    """Open a Ray cluster as `open_cluster` does, for runs of at most `num_ranks` on a CPU, or use this machine."""
    if ray is None:
        yield ThisMachine()
    else:
        with open_cluster(ray.address, num_ranks) as cluster:
            yield OnRay(cluster)
