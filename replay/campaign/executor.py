"""Choose where planned runs run: in processes on this machine, or on a Ray cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from actor_init.spec import UsageError
from capture.facts import Setting
from replay.campaign.training import RayTrainings
from replay.on_ray.cluster import Cluster, open_cluster
from replay.on_ray.task_runner import RayTaskRunner
from replay.options.ray_options import RayOptions
from replay.output.text import pluralise
from replay.processes.launch import list_gpus
from replay.processes.pool import PROCESSES_ON_A_CPU, Machine, RunHere, RunTasks


class Executor(Protocol):
    """Where planned runs run."""

    def choose_machine(self, num_devices: int | None) -> Machine:
        """Return the devices that planned runs may use. Raises UsageError if there are fewer.

        num_devices  None: all GPUs of this machine, or of Ray's largest node; on a CPU, PROCESSES_ON_A_CPU processes
        """

    def check_machine(self, machine: Machine, folder: Path) -> None:
        """Raise UsageError if the campaign in `folder`, begun on `machine`, cannot continue here."""

    def make_runner(self, root: Path, machine: Machine, at_once: int | None) -> RunTasks:
        """Return what runs tasks whose logs lie below `root`.

        at_once  processes on each GPU at the same time, or tasks on a CPU; None: one task at a time on this machine,
                 and on Ray as many tasks as there is room for, with one process on each GPU
        """

    def make_resumable_runner(self, root: Path, machine: Machine, storage: str) -> RunTasks:
        """Return what runs tasks whose logs lie below `root`, one after another, and goes on with one that broke off.

        storage  folder or URI where tasks keep the states from which they go on
        """

    def gives_whole_machine(self, machine: Machine, at_once: int | None) -> bool:
        """Does each planned run get the machine for itself, so that its times mean something?"""


class ThisMachine:
    """Runs planned runs in processes on this machine."""

    def choose_machine(self, num_devices: int | None) -> Machine:
        machine, all_devices = Machine.detect(num_devices), Machine.detect()
        if not machine.is_part_of(all_devices):
            raise UsageError(
                Setting("processes", num_devices),
                f"is too much: this machine has {pluralise(all_devices.num_devices, 'GPU')}",
                f"Try: {Setting('processes', all_devices.num_devices)}",
            )
        return machine

    def check_machine(self, machine: Machine, folder: Path) -> None:
        if not machine.is_part_of(this_machine := Machine.detect()):
            raise UsageError(
                Setting("continue_", folder),
                f"was begun on {machine.text}, and here is {this_machine.text}",
                "Go on there",
            )

    def make_runner(self, root: Path, machine: Machine, at_once: int | None) -> RunTasks:
        gpus = list_gpus(machine.num_devices) if at_once and machine.has_gpus else []
        return RunHere(at_once=at_once or 1, gpus=gpus)

    def make_resumable_runner(self, root: Path, machine: Machine, storage: str) -> RunTasks:
        # A replay on this machine finds the states itself: its spec has --save-state and --resume.
        return self.make_runner(root, machine, None)

    def gives_whole_machine(self, machine: Machine, at_once: int | None) -> bool:
        return (at_once or 1) * (machine.num_devices if at_once and machine.has_gpus else 1) == 1


@dataclass(frozen=True, slots=True)
class OnRay:
    """Runs planned runs on the nodes of a Ray cluster."""

    cluster: Cluster

    def choose_machine(self, num_devices: int | None) -> Machine:
        has_gpus = self.cluster.resource == "GPU"
        default = self.cluster.slots_on_largest_node if has_gpus else min(PROCESSES_ON_A_CPU, self.cluster.num_slots)
        self.cluster.refuse_too_many(num_devices or default)
        return Machine(num_devices=num_devices or default, has_gpus=has_gpus)

    def check_machine(self, machine: Machine, folder: Path) -> None:
        largest = Machine(num_devices=self.cluster.num_slots, has_gpus=self.cluster.resource == "GPU")
        if largest.has_gpus != machine.has_gpus or machine.num_devices > largest.num_devices:
            raise UsageError(
                Setting("continue_", folder),
                f"was begun on {machine.text}, and the cluster has {largest.text}",
                "Go on there",
            )

    def make_runner(self, root: Path, machine: Machine, at_once: int | None) -> RunTasks:
        return RayTaskRunner(self.cluster, root, at_once=at_once or 1)

    def make_resumable_runner(self, root: Path, machine: Machine, storage: str) -> RunTasks:
        return RayTrainings(self.cluster, root, storage)

    def gives_whole_machine(self, machine: Machine, at_once: int | None) -> bool:
        return False


@contextmanager
def open_executor(ray: RayOptions | None, num_ranks: int = PROCESSES_ON_A_CPU) -> Iterator[Executor]:
    """Connect to the Ray cluster that the options name, or use this machine.

    num_ranks  the most ranks that a planned run has on a cluster without GPUs
    """
    if ray is None:
        yield ThisMachine()
    else:
        with open_cluster(ray.address, num_ranks) as cluster:
            yield OnRay(cluster)
