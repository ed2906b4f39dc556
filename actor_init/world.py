"""Determine this process's rank, device and mesh from the launcher's environment."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from actor_init.spec import ParallelSpec, UsageError

MESH_AXES = ("data", "ring", "tp")
DecisionT = TypeVar("DecisionT")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """One process among `world_size`, and its coordinates on the mesh ("data", "ring", "tp").

    Ranks that differ only along "ring" and "tp" work on the same micro-batch; they have the same `data_rank`.

    weights_mesh  ("shard", "tp"): weights are sharded over data and ring ranks as one axis
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    weights_mesh: DeviceMesh

    @classmethod
    @contextmanager
    def from_env(cls, parallel: ParallelSpec) -> Iterator["World"]:
        """Open the launcher's process group, or one of a single process, and close it at the end.

        A group that is open already, as in a worker of Ray Train, is used and left open.

        Uses CUDA with NCCL if there is a GPU, else the CPU with gloo. Raises UsageError if the launcher started more
        processes on this machine than it has GPUs, or a number that is not a multiple of tp x ring.
        """
        with _set_local_rank() as local_rank:
            rank = int(os.environ.get("RANK", 0))
            world_size = int(os.environ.get("WORLD_SIZE", 1))
            num_model_ranks = parallel.tp * parallel.ring
            if world_size % num_model_ranks:
                raise UsageError(
                    f"{world_size} processes were started, but tp {parallel.tp} x ring {parallel.ring} needs a "
                    f"multiple of {num_model_ranks}. Try: torchrun --nproc-per-node {num_model_ranks} -m replay ..."
                )
            device = _choose_device(local_rank)
            with _open_process_group(device, rank, world_size):
                shape = (world_size // num_model_ranks, parallel.ring, parallel.tp)
                mesh = init_device_mesh(device.type, shape, mesh_dim_names=MESH_AXES)
                weights_shape = (world_size // parallel.tp, parallel.tp)
                weights_mesh = init_device_mesh(device.type, weights_shape, mesh_dim_names=("shard", "tp"))
                yield cls(rank=rank, world_size=world_size, device=device, mesh=mesh, weights_mesh=weights_mesh)

    @property
    def data_rank(self) -> int:
        return self.mesh.get_local_rank("data")

    @property
    def num_data_ranks(self) -> int:
        return self.mesh["data"].size()

    @property
    def ring_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group("ring")

    def barrier(self) -> None:
        """Wait, in the device's stream, until every rank has called this."""
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(1, device=self.device))

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank. Pickles: for small plain data outside the timed part."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast_from_rank0(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


def compute_on_rank0(world: World, decide: Callable[[], DecisionT]) -> DecisionT:
    """Return on every rank what `decide` returns on rank 0, or raise there the UsageError that rank 0 raises."""
    answer: DecisionT | UsageError | None = None
    if world.rank == 0:
        try:
            answer = decide()
        except UsageError as error:
            answer = error
    answer = world.broadcast_from_rank0(answer)
    if isinstance(answer, UsageError):
        raise answer
    decision: DecisionT = answer
    return decision


def try_on_all_ranks(world: World, attempt: Callable[[], DecisionT]) -> DecisionT:
    """Return what `attempt` returns on this rank. A UsageError that it raises on any rank is raised on every rank.

    It has the number of the first rank that raised it, unless all did. All ranks must call this.
    """
    decisions: list[DecisionT] = []
    refusal: UsageError | None = None
    try:
        decisions.append(attempt())
    except UsageError as error:
        refusal = error
    refusals = [(rank, other) for rank, other in enumerate(world.gather(refusal)) if other is not None]
    if not refusals:
        return decisions[0]
    rank, first_refusal = refusals[0]
    if len(refusals) == world.world_size:
        raise refusal or first_refusal
    raise UsageError(f"on rank {rank}: {first_refusal.text}") from refusal


@contextmanager
def _set_local_rank() -> Iterator[int]:
    """Yield this process's number on its machine. LOCAL_RANK says it meanwhile, which DeepSpeed reads.

    A process that no launcher started does not keep the variable: accelerate, which finds it there, would wait for the
    address of a process group.
    """
    is_missing = "LOCAL_RANK" not in os.environ
    try:
        yield int(os.environ.setdefault("LOCAL_RANK", "0"))
    finally:
        if is_missing:
            os.environ.pop("LOCAL_RANK", None)


@contextmanager
def _open_process_group(device: torch.device, rank: int, world_size: int) -> Iterator[None]:
    """Open the launcher's process group, or one of a single process, unless one is open already."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl":
        # NCCL's flight recorder keeps so many collectives, for `replay hang`.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if dist.is_initialized():
        yield
        return
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, rank=rank, world_size=world_size)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _choose_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
        raise UsageError(
            f"{local_world_size} processes were started on a machine with {num_gpus} GPU{'s' * (num_gpus > 1)}. "
            f"Try: deepspeed --num_gpus={num_gpus} --module replay ..., "
            f"or torchrun --nproc-per-node {num_gpus} -m replay ..."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
