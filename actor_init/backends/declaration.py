"""What a backend says of itself: plain data, without heavy imports, that checks, help, matrices and texts read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from actor_init.toggles import Compile, Dtype, OptimizerName, TpPlan


class AskedParallel(Protocol):
    """What is read of a ParallelSpec."""

    @property
    def tp(self) -> int: ...
    @property
    def ring(self) -> int: ...
    @property
    def tp_plan(self) -> TpPlan: ...
    @property
    def sequence_parallel(self) -> bool: ...


class Asked(Protocol):
    """What is read of an ActorSpec, which reads the declarations and so stands above them."""

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
    """What is read of a state that was saved."""

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
    """What --save-state writes under a backend, and where --load-state takes it over."""

    files: str  # whose format
    same: Sequence[str] = ()  # fields of the state that have to be as they were, beside those of every backend
    complaint: Callable[[Saved, int], str | None] = loads_anywhere  # why so many ranks cannot take it over


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A configuration of `replay suite`, called like its backend and `suffix`."""

    suffix: str = ""
    zero_stage: int | None = None
    tp: bool = False
    ring: bool = False
    is_standard: bool = True  # one that has to succeed, and to stay near the reference


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """What a backend is called, where it is, what it can do, and what it refuses."""

    name: str
    engine: str  # "module:class" of the `Backend`; imported when an actor is opened, not before
    libraries: Sequence[str] = ()  # that the engine imports while it opens
    help: str = ""  # of it, for --backend
    stages: Mapping[int, str] = field(default_factory=dict)  # of --zero-stage, in a word or two; none: all is whole
    stages_help: str = "nothing ever"  # for --zero-stage
    default_stage: int = 0
    default_stage_without_optimizer: int = 0
    tp: bool = False
    ring: bool = False
    own_options: frozenset[str] = frozenset()  # fields that only backends which list them take
    compilers: Mapping[Compile, Sequence[int]] = field(default_factory=dict)  # its own, and the stages they know
    states: States | None = None  # None: it neither saves nor loads any
    complaint: Callable[[Asked, str], str | None] = refuse_nothing  # why a spec cannot be had on a type of device
    accumulating_stages: Sequence[int] = ()  # whose gradients take a path of their own while they accumulate
    trainings: Sequence[Training] = ()  # of `replay suite`

    @property
    def shards(self) -> bool:
        return bool(self.stages)
