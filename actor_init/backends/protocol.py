"""What an actor under a backend can be asked for, and how one is opened."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol, Self

from torch import Tensor
from transformers import PreTrainedModel

from actor_init.backends import declaration_of
from actor_init.inputs.packing import ActorInputs
from actor_init.model import ModelSource
from actor_init.optimizer import Progress
from actor_init.spec import ActorSpec, UsageError
from actor_init.weights import OnProgress, unheard
from actor_init.world import World


class Backend(Protocol):
    """An actor, sharded and ready to take passes."""

    @classmethod
    def open(cls, spec: ActorSpec, source: ModelSource, world: World, on_progress: OnProgress = unheard) -> Self:
        """Build, shard, load and return the actor, ready. Raises UsageError if `spec` cannot be had here.

        `on_progress` is to be called while this takes long: a replay takes silence for a hang.
        """
        ...

    def forward(self, inputs: ActorInputs, *, trains: bool) -> Tensor:
        """Action log-probs [B, A], fp32, a plain tensor. `trains` is the model's train or eval mode, not autograd's."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add `loss`'s gradient, averaged over the data ranks and the accumulation window."""
        ...

    def end_window(self, *, step: bool) -> float:
        """After the last backward of an accumulation window: step if asked, leave no gradient behind.

        Returns the global gradient norm before clipping; inf where fp16 overflowed.
        """
        ...

    def facts(self) -> Mapping[str, str | int]:
        """What was resolved, for run.json."""
        ...

    @property
    def model(self) -> PreTrainedModel:
        """The modules that run, under the names that Hugging Face gives them."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter by name, whole, in the compute dtype. For all ranks to take, one at a time."""
        ...

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's whole gradient by name, averaged, fp32, without the loss scale; none where there is none.

        For all ranks to take, one at a time, between the last backward of a window and `end_window`.
        """
        ...

    def loss_scale(self) -> float:
        """What backward multiplies the loss by before all else; 1 but for fp16."""
        ...

    def save_model(self, folder: Path) -> None:
        """Write the weights that the model computes with into the empty `folder`, as Hugging Face does; see saving.py.

        For all ranks to call; they are gathered one by one, and rank 0 writes. Raises OSError.
        """
        ...

    def save_state(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and loss scale into the empty `folder`, each rank its own share.

        For all ranks to call, between two accumulation windows. Raises what the library raises.
        """
        ...

    def load_state(self, folder: Path) -> None:
        """Take over what `save_state` wrote; state_file.py says beforehand whether that is possible here.

        For all ranks to call, before the first pass. Unpickles. Raises what the library raises.
        """
        ...

    def progress(self) -> Progress:
        """How far the optimizer has come."""
        ...

    def close(self) -> None:
        """Free the actor's memory."""
        ...


def open_backend(spec: ActorSpec, source: ModelSource, world: World, on_progress: OnProgress = unheard) -> Backend:
    """The actor that `spec` describes, with defaults for what it leaves open.

    Raises UsageError if it cannot be had here.
    """
    spec = spec.settled()
    declaration = declaration_of(spec.backend)
    if complaint := declaration.complaint(spec, world.device.type):
        raise UsageError(complaint)
    module, name = declaration.engine.split(":")
    engine: type[Backend] = getattr(import_module(module), name)
    return engine.open(spec, source, world, on_progress)
