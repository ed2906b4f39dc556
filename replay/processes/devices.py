"""Where runs in processes of their own can be: on GPUs, or in processes that stand in for them on a CPU."""

from dataclasses import dataclass

PROCESSES_ON_A_CPU = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    num_devices: int
    has_gpus: bool

    @classmethod
    def here(cls, num_devices: int | None = None) -> "Machine":
        """This machine, or so many devices of it, which may be more than it has: see `is_here`."""
        import torch

        found = torch.cuda.device_count()
        return cls(num_devices=num_devices or found or PROCESSES_ON_A_CPU, has_gpus=found > 0)

    @property
    def is_here(self) -> bool:
        """Is this machine of that kind, and has it as many GPUs?"""
        here = Machine.here()
        return self.has_gpus == here.has_gpus and (not self.has_gpus or self.num_devices <= here.num_devices)
