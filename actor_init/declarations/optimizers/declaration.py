"""Declare what an optimizer family is: the classes that step alike, their settings, and where they can step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# Settings of a recorded group that say nothing of a step's numbers, or that the recorder has added.
RECORDER_KEYS = ("num_parameters", "optimizer", "library", "parameters")


class OptimizerOptions(Protocol):
    """The fields of an ActorSpec that declarations of optimizers read."""

    @property
    def base_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float | None: ...
    @property
    def beta1(self) -> float | None: ...
    @property
    def beta2(self) -> float | None: ...
    @property
    def eps(self) -> float | None: ...
    @property
    def momentum(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class JobGroup:
    """A group of a job's optimizer, as a capture has it.

    class_name  of the optimizer
    library     the package that the class is of, `__main__` for one of the job's script; None: not recorded
    settings    of the group, as torch's `param_groups` have them
    """

    class_name: str
    library: str | None
    settings: Mapping[str, Any]

    def is_of(self, *libraries: str) -> bool:
        """Tell whether the class is of one of these packages; one whose package was not recorded may be."""
        return self.library is None or self.library in libraries


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSetting:
    """One setting of a family's groups.

    name     as `param_groups` and captures have it
    default  that of the class; a job whose capture lacks the setting stepped with it
    options  fields of an ActorSpec that set it: two for a pair; none where a recording alone can
    """

    name: str
    default: Any
    options: Sequence[str] = ()

    def read_options(self, spec: OptimizerOptions) -> Any:
        """Return what the options say, with the default for what was not given."""
        if not self.options:
            return self.default
        defaults = self.default if len(self.options) > 1 else (self.default,)
        given = [getattr(spec, option) for option in self.options]
        values = tuple(default if value is None else value for value, default in zip(given, defaults, strict=True))
        return values if len(self.options) > 1 else values[0]


def _recognise_nothing(group: JobGroup) -> bool:
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerDeclaration:
    """A family of optimizers that compute the same step, and the value of --optimizer that chooses it.

    engine          "module:class" of the class that steps here; imported only when an actor is opened. Of several the
                    first whose package is installed
    help            what --help says of it, where the value alone does not say enough
    settings        of its groups, but for the learning rate
    recognise       tells whether a job's group was stepped as this family steps
    state           names of what it keeps of a parameter, but for the count: a set for each kind of parameter
    moments         bytes of state for each parameter, from the first step on; None: less than a hundredth
    has_fused       the class has torch's fused kernel
    is_elementwise  an element's step depends on that element alone, so it is the same in any shard
    step_dtype      what it rounds a step to, where that is coarser than the weights; empty: nothing
    companion       the `option_value` of the family that steps on what `steps_matrices` leaves out
    steps_matrices  it steps on matrices inside the layers alone: neither vectors nor embedding and head
    """

    option_value: str
    engine: Sequence[str]
    recognise: Callable[[JobGroup], bool] = _recognise_nothing
    settings: Sequence[GroupSetting] = field(default_factory=tuple)
    help: str = ""
    state: Sequence[frozenset[str]] = ()
    moments: Callable[[OptimizerOptions], int] = lambda spec: 0
    has_fused: bool = False
    is_elementwise: bool = True
    step_dtype: str = ""
    companion: str | None = None
    steps_matrices: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """The fields of an ActorSpec that are settings of this family, but for the learning rate."""
        return tuple(option for setting in self.settings for option in setting.options)

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that have a class of this family."""
        return tuple(dict.fromkeys(engine.partition(".")[0].partition(":")[0] for engine in self.engine))

    def read_options(self, spec: OptimizerOptions) -> dict[str, Any]:
        """Return the keyword arguments of the class, with its defaults for options that were not given."""
        return {
            "lr": spec.base_rate,
            **{setting.name: setting.read_options(spec) for setting in self.settings},
        }

    def read_job_settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the class as the job's group had them, with defaults for what it lacks.

        Raises KeyError for a group without a learning rate.
        """
        settings = {"lr": group["lr"]}
        for setting in self.settings:
            value = group.get(setting.name, setting.default)
            settings[setting.name] = tuple(value) if isinstance(value, list) else value
        return settings

    def list_unknown_settings(self, group: Mapping[str, Any]) -> list[str]:
        """List the settings of a job's group that are neither this family's nor without effect on its numbers."""
        known = {"lr", "initial_lr", *(setting.name for setting in self.settings), *RECORDER_KEYS, *WITHOUT_EFFECT}
        return [name for name in group if name not in known and WHERE_IT_IS_OFF.get(name) != group[name]]


# Settings that choose between ways to compute the same numbers, or that belong to another algorithm of the class.
WITHOUT_EFFECT = (
    *("foreach", "fused", "capturable", "differentiable", "step", "decoupled_weight_decay", "adam_w_mode"),
    *("use_muon", "name", "min_8bit_size", "block_wise", "optim_bits", "is_paged"),
)
# Settings that a class of the family has beside torch's, and their values where they change nothing.
WHERE_IT_IS_OFF: Mapping[str, Any] = {"bias_correction": True, "percentile_clipping": 100, "max_unorm": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """The parameters that a replay steps with the same settings.

    family    a value of --optimizer
    settings  keyword arguments of the family's class
    names     the parameters' names in the replay
    is_fused  the job stepped them with torch's fused kernel
    """

    family: str
    settings: Mapping[str, Any]
    names: frozenset[str]
    is_fused: bool = False
