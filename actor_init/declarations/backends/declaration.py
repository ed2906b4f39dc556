"""Declare what a backend can do, as plain data without heavy imports, for checks, help, matrices and texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from actor_init.toggles import Compile, Dtype, OptimizerName, TpPlan


class AskedParallel(Protocol):
    """The fields of a ParallelSpec that declarations read."""

    @property
    def tp(self) -> int: ...
    @property
    def ring(self) -> int: ...
    @property
    def tp_plan(self) -> TpPlan: ...
    @property
    def sequence_parallel(self) -> bool: ...


class Asked(Protocol):
    """The fields of an ActorSpec that declarations read; ActorSpec imports the declarations and so cannot be imported
    here.
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
    def optimizer(self) -> OptimizerName: ...
    @property
    def num_accumulated(self) -> int: ...
    @property
    def max_norm(self) -> float | None: ...
    @property
    def deepspeed_config(self) -> Path | None: ...
    @property
    def parallel(self) -> AskedParallel: ...


class Saved(Protocol):
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


def refuse_nothing(spec: Asked, device_type: str) -> str | None:
    return None


def loads_anywhere(state: Saved, world_size: int) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """The files --save-state writes under a backend, and where --load-state can load them."""

    files: str  # the library whose format they have
    same: Sequence[str] = ()  # fields of the state that must be unchanged, besides those of every backend
    complaint: Callable[[Saved, int], str | None] = loads_anywhere  # why that many ranks cannot load it


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Bytes that a rank holds for each parameter, whatever it is fed."""

    weights: float = 0.0
    gradients: float = 0.0  # from backward on
    masters: float = 0.0
    moments: float = 0.0  # once a step was taken

    def bytes(self, *, gradients: bool) -> float:
        """Return the sum, with or without gradients."""
        return self.weights + self.masters + self.moments + (self.gradients if gradients else 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What one rank alone holds, and what of it data ranks would share, each an equal part."""

    alone: Held = field(default_factory=Held)
    shared: Held = field(default_factory=Held)


def size_of(dtype: Dtype) -> int:
    """Return the bytes of a number."""
    return 4 if dtype is Dtype.FP32 else 2


def moment_bytes(optimizer: OptimizerName, *, steps: bool) -> int:
    """Return what torch's optimizer holds for each parameter, in fp32; `steps`: has it taken one?"""
    return 8 if optimizer is OptimizerName.ADAMW and steps else 0


def whole_model(spec: Asked, steps: bool) -> Holding:
    """Return the holding of a backend that shares nothing and keeps weights and gradients in fp32."""
    return Holding(alone=Held(weights=4, gradients=4, moments=moment_bytes(spec.optimizer, steps=steps)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A configuration of `replay suite`, named after its backend and `suffix`."""

    suffix: str = ""
    zero_stage: int | None = None
    tp: bool = False
    ring: bool = False
    is_standard: bool = True  # must succeed, and stay near the reference


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """A backend's name, its engine, what it can do, and what it refuses."""

    name: str
    engine: str  # "module:class" of the `Backend`; imported only when an actor is opened
    libraries: Sequence[str] = ()  # that the engine imports while it opens
    help: str = ""  # of the backend, for --backend
    stages: Mapping[int, str] = field(default_factory=dict)  # of --zero-stage, described; empty: none
    stages_help: str = "nothing ever"  # for --zero-stage
    default_stage: int = 0
    default_stage_without_optimizer: int = 0
    tp: bool = False
    ring: bool = False
    splits_head: bool = False  # under tp: each rank holds a share of the head's vocabulary, and computes its logits
    own_options: frozenset[str] = frozenset()  # fields that only backends listing them take
    compilers: Mapping[Compile, Sequence[int]] = field(default_factory=dict)  # its own, and their stages
    states: States | None = None  # None: it neither saves nor loads state
    complaint: Callable[[Asked, str], str | None] = refuse_nothing  # why a spec is not possible on a type of device
    accumulating_stages: Sequence[int] = ()  # stages whose gradients take a separate code path while they accumulate
    holding: Callable[[Asked, bool], Holding] = whole_model  # the flag: does the optimizer step?
    trainings: Sequence[Training] = ()  # configurations of `replay suite`

    @property
    def shards(self) -> bool:
        return bool(self.stages)
