"""Describe the devices that runs in their own processes can use: GPUs, or CPU processes that stand in for them."""

from dataclasses import dataclass

PROCESSES_ON_A_CPU = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    num_devices: int
    has_gpus: bool

    @classmethod
    def here(cls, num_devices: int | None = None) -> "Machine":
        """Return this machine with all its devices, or with `num_devices`, which may be more than it has: see
        `is_here`.
        """
        import torch

        num_gpus = torch.cuda.device_count()
        return cls(num_devices=num_devices or num_gpus or PROCESSES_ON_A_CPU, has_gpus=num_gpus > 0)

    @property
    def is_here(self) -> bool:
        """Is this machine of the same kind, with at least as many GPUs?"""
        here = Machine.here()
        return self.has_gpus == here.has_gpus and (not self.has_gpus or self.num_devices <= here.num_devices)
