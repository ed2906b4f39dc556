"""Define the interface of an actor under a backend, and open one."""

import gc
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actor_init.declarations.backends import find_backend_declaration, find_obstacle
from actor_init.declarations.optimizers import find_missing_package
from actor_init.inputs.packing import ActorInputs
from actor_init.model import ModelSource
from actor_init.schedule_and_norm import Progress, StepSettings
from actor_init.spec import ActorSpec, Kernels, UsageError
from actor_init.weights import OnProgress, ignore_progress
from actor_init.world import World
from capture.facts import Setting

# How often garbage is collected after a failure. Two collections suffice for what is known.
NUM_COLLECTIONS = 3


class Backend(Protocol):
    """An actor, sharded and ready to run passes."""

    @classmethod
    def open(
        cls, spec: ActorSpec, source: ModelSource, world: World, on_progress: OnProgress = ignore_progress
    ) -> Self:
        """Build, shard, load and return the actor, ready. Raises UsageError if `spec` is not possible here.

        Call `on_progress` during long work: a replay treats silence as a hang.
        """
        ...

    def forward(self, inputs: ActorInputs, *, train_mode: bool) -> Tensor:
        """Return action log-probs [B, A], fp32, a plain tensor. `train_mode` says nothing of autograd."""
        ...

    def skip_passes(self, num_passes: int) -> None:
        """Count this many passes of the window that do not run, so that it ends as many passes earlier.

        `backward` still divides by --grad-accumulation.

        num_passes  negative: count as many fewer. That takes back an earlier call, if no pass of its window ran
        """
        ...

    def backward(self, loss: Tensor) -> None:
        """Add `loss`'s gradient, averaged over the data ranks and the accumulation window."""
        ...

    def end_window(self, *, step: bool, settings: StepSettings | None = None) -> float:
        """End an accumulation window after its last backward: take the norm, clip and step if `step`, and clear the
        gradients.

        settings  of this step, which may leave it out; None: as the spec says

        Returns the global gradient norm before clipping; inf if fp16 overflowed.
        """
        ...

    def facts(self) -> Mapping[str, str | int]:
        """Return the resolved settings, for run.json."""
        ...

    @property
    def model(self) -> PreTrainedModel:
        """The modules that run, under the names that Hugging Face gives them."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter by name, whole, in the compute dtype. All ranks must iterate, one at a time."""
        ...

    def masters(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield these parameters by name, whole, as the optimizer steps them: in fp32 where it has fp32 masters.

        All ranks must iterate over the same names.
        """
        ...

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's whole gradient by name, averaged, fp32, without the loss scale; skips those without
        one.

        All ranks must iterate, between the last backward of a window and `end_window`, which may change what is
        yielded: whoever keeps it copies it.
        """
        ...

    def optimizer_states(self, names: Collection[str]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """Yield what the optimizer holds of these parameters, whole, by the name of the state; skips those without any.

        All ranks must iterate over the same names, between two steps. A backend yields nothing where it cannot be had.
        """
        ...

    def loss_scale(self) -> float:
        """The factor backward applies to the loss first; 1 except in fp16."""
        ...

    def save_model(self, folder: Path) -> None:
        """Write the weights that the model computes with into the empty `folder`, as Hugging Face does; see saving/.

        All ranks must call this; weights are gathered one by one, and rank 0 writes. Raises OSError.
        """
        ...

    def save_state(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and loss scale into the empty `folder`, each rank its own share.

        All ranks must call this, between two accumulation windows. Raises what the library raises.
        """
        ...

    def load_state(self, folder: Path) -> None:
        """Load what `save_state` wrote; state_file.py has checked that this is possible here.

        All ranks must call this, before the first pass. Unpickles. Raises what the library raises.
        """
        ...

    def progress(self) -> Progress:
        """The optimizer's progress."""
        ...

    def count_state_bytes(self) -> int:
        """Count the bytes of what this rank's optimizer keeps of its steps: moments."""
        ...

    def close(self) -> None:
        """Free the actor's memory."""
        ...


def open_backend(
    spec: ActorSpec, source: ModelSource, world: World, on_progress: OnProgress = ignore_progress
) -> Backend:
    """Open the actor that `spec` describes, with defaults for options that were not given.

    Raises UsageError if it is not possible here.
    """
    spec = spec.with_defaults()
    declaration = find_backend_declaration(spec.backend)
    if complaint := find_obstacle(spec, world.device.type):
        raise UsageError(complaint)
    if refusal := find_missing_package(spec.optimizer):
        raise refusal
    module, name = declaration.engine.split(":")
    engine: type[Backend] = getattr(import_module(module), name)
    backend = engine.open(spec, source, world, on_progress)
    if spec.kernels is Kernels.FUSED and "kernels" not in backend.facts():
        backend.close()
        fused = Setting("kernels", Kernels.FUSED)
        raise UsageError(fused, f"is not there for {spec.backend}", f"Try: {fused.with_value(Kernels.MODEL)}")
    return backend


def free_closed_backends(*, after_failed_pass: bool = False) -> None:
    """Free the memory of backends that were closed and are no longer referenced.

    A model is in reference cycles. After a forward that failed under FSDP2, autograd keeps a part of the model in C++,
    where Python's collector does not see it, and drops this part when the rest is collected. So one collection is not
    enough then.
    """
    for _ in range(NUM_COLLECTIONS if after_failed_pass else 1):
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
