"""Declare what a backend can do, as plain data without heavy imports, for checks, help, matrices and texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from actor_init.declarations.optimizers import OPTIMIZERS
from actor_init.declarations.optimizers.declaration import OptimizerOptions
from actor_init.option_values import Compile, Dtype, TpPlan


class ParallelSettings(Protocol):
    """The fields of a ParallelSpec that declarations read."""

    @property
    def tp(self) -> int: ...
    @property
    def ring(self) -> int: ...
    @property
    def tp_plan(self) -> TpPlan: ...
    @property
    def sequence_parallel(self) -> bool: ...


class ActorSettings(OptimizerOptions, Protocol):
    """The fields of an ActorSpec that declarations read.

    ActorSpec takes its choices and its help from the declarations, so they cannot import it: that would be a circle.
    """

    @property
    def backend(self) -> str: ...
    @property
    def dtype(self) -> Dtype: ...
    @property
    def zero_stage(self) -> int | None: ...
    @property
    def resolved_zero_stage(self) -> int: ...
    @property
    def compile(self) -> Compile: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def has_optimizer(self) -> bool: ...
    @property
    def resolved_grad_accumulation(self) -> int: ...
    @property
    def max_norm(self) -> float | None: ...
    @property
    def deepspeed_config(self) -> Path | None: ...
    @property
    def parallel(self) -> ParallelSettings: ...


class SavedStateFacts(Protocol):
    """The fields of a saved state that declarations read."""

    @property
    def zero_stage(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def num_steps(self) -> int: ...


def find_no_obstacle(spec: ActorSettings, device_type: str) -> str | None:
    """Run every spec on every device: the default of `BackendDeclaration.find_obstacle`."""
    return None


def gives_whole_parameters(spec: ActorSettings) -> bool:
    """Return False: the default of `BackendDeclaration.cuts_parameters`."""
    return False


def find_no_load_obstacle(state: SavedStateFacts, world_size: int) -> str | None:
    """Load every state on any number of ranks: the default of `StateFormat.find_obstacle`."""
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFormat:
    """The files --save-state writes under a backend, and where --load-state can load them.

    library        the library whose format they have
    fixed_fields   fields of the state that must be the same where it is loaded, besides those of every backend
    find_obstacle  returns why so many ranks cannot load a state; None if they can
    """

    library: str
    fixed_fields: Sequence[str] = ()
    find_obstacle: Callable[[SavedStateFacts, int], str | None] = find_no_load_obstacle


@dataclass(frozen=True, kw_only=True, slots=True)
class BytesPerParameter:
    """Bytes of memory that each parameter of the model takes, whatever the model is fed.

    gradients  from the first backward on
    masters    fp32 copies of the weights, which the optimizer steps
    moments    of the optimizer, from its first step on
    """

    weights: float = 0.0
    gradients: float = 0.0
    masters: float = 0.0
    moments: float = 0.0

    def bytes(self, *, gradients: bool) -> float:
        """Return the sum, with or without gradients."""
        return self.weights + self.masters + self.moments + (self.gradients if gradients else 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedMemory:
    """The memory of the model's weights, gradients and optimizer, and how much of it the backend shards.

    total        on a single rank, which holds everything
    partitioned  the part of `total` that several data ranks split into equal shares; each holds all the rest
    """

    total: BytesPerParameter = field(default_factory=BytesPerParameter)
    partitioned: BytesPerParameter = field(default_factory=BytesPerParameter)


def element_size(dtype: Dtype) -> int:
    """Return the bytes of a number."""
    return 4 if dtype is Dtype.FP32 else 2


def moment_size(spec: ActorSettings, *, steps: bool) -> int:
    """Return the bytes of state that the optimizer keeps for each parameter; none before its first step.

    What a user's own optimizer keeps is not known, and is taken for what Adam does.

    steps  the optimizer has taken a step
    """
    if not steps or not spec.has_optimizer:
        return 0
    return OPTIMIZERS[spec.optimizer].moments(spec) if spec.optimizer in OPTIMIZERS else 8


def unsharded_fp32_memory(spec: ActorSettings, steps: bool) -> ShardedMemory:
    """Return the memory under a backend that shards nothing and keeps weights and gradients in fp32."""
    moments = moment_size(spec, steps=steps)
    return ShardedMemory(total=BytesPerParameter(weights=4, gradients=4, moments=moments))


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteTraining:
    """A configuration of `replay suite`, named after its backend and `suffix`.

    is_standard  it must succeed, and stay near the reference
    """

    suffix: str = ""
    zero_stage: int | None = None
    tp: bool = False
    ring: bool = False
    is_standard: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendDeclaration:
    """A backend's name, its engine, what it can do, and what it refuses.

    engine               "module:class" of the `Backend`; imported only when an actor is opened
    libraries            packages that the engine imports while it opens
    help                 what --help says of the backend under --backend
    stages               values of --zero-stage, each with what it shards; empty: the backend has no stages
    stages_help          what --help says of them under --zero-stage
    splits_head          under tp each rank holds a share of the head's vocabulary, and computes its logits
    exclusive_options    fields of a spec that only the backends that list them take
    compilers            compilers that the backend brings, and the stages under which they work
    state_format         None: the backend neither saves nor loads state
    find_obstacle        returns why a spec cannot run on a type of device; None if it can
    accumulating_stages  stages whose gradients take a separate code path while they accumulate
    predict_memory       returns what the actor holds; its second argument: does the optimizer step?
    suite_trainings      configurations of `replay suite`
    cuts_parameters      tells whether the optimizer is given pieces of parameters as plain tensors
    clips_by_any_rule    gradients can be clipped as a step's settings say, and not to one norm alone
    rounds_masters       the fp32 masters are made of weights in --dtype, and so begin rounded to it
    """

    name: str
    engine: str
    libraries: Sequence[str] = ()
    help: str = ""
    stages: Mapping[int, str] = field(default_factory=dict)
    stages_help: str = "nothing ever"
    default_stage: int = 0
    default_stage_without_optimizer: int = 0
    tp: bool = False
    ring: bool = False
    splits_head: bool = False
    clips_by_any_rule: bool = False
    exclusive_options: frozenset[str] = frozenset()
    compilers: Mapping[Compile, Sequence[int]] = field(default_factory=dict)
    state_format: StateFormat | None = None
    find_obstacle: Callable[[ActorSettings, str], str | None] = find_no_obstacle
    accumulating_stages: Sequence[int] = ()
    predict_memory: Callable[[ActorSettings, bool], ShardedMemory] = unsharded_fp32_memory
    suite_trainings: Sequence[SuiteTraining] = ()
    cuts_parameters: Callable[[ActorSettings], bool] = gives_whole_parameters
    rounds_masters: bool = False

    @property
    def shards(self) -> bool:
        return bool(self.stages)
