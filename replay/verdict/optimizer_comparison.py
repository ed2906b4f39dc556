"""Compare the optimizer that a job stepped with to the one that --step steps with."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from actor_init.declarations.optimizers import OPTIMIZERS, explain_unknown_class, read_job_group, recognise_group
from actor_init.declarations.optimizers.declaration import JobGroup
from actor_init.declarations.optimizers.user_function import USER_FUNCTION, drop_unknown
from actor_init.spec import ActorSpec
from capture.file_format.optimizer_step import OptimizerStep, parse_numbers
from replay.options.option_parsing import format_error_with_flags

# Among the settings that a replay follows: groups are stepped by the families that the job stepped them by.
FAMILY = "family"
# Among them where the job clips by another rule than to a 2-norm, and the replay does so too.
CLIPPING = "clipping"
LABELS = {"lr": "learning rate", "weight_decay": "weight decay"}


def list_setting_differences(
    step: OptimizerStep,
    spec: ActorSpec,
    number: int,
    norms: tuple[float | None, float | None] | None = None,
    *,
    loaded_counts: Sequence[int] | None = None,
    setting_names_from_job: Container[str] = (),
) -> list[str]:
    """List how the job's step differs from the replay's step `number`, as `weight decay 10 in the job, 0.01 here`.

    Settings that the job's optimizer does not have are passed over.

    norms          of the gradient in the job and here, as far as they are known; None: the replay's will be the job's
    loaded_counts  the steps counted by the state that the replay began with; None: it began without one
    setting_names_from_job  names, by torch, of the settings that the replay takes from each of the job's steps
    """
    if step.optimizer is None:
        return ["the job's optimizer was not recorded"]
    texts = (
        text for group in step.settings for text in _compare_group(group, step, spec, number, setting_names_from_job)
    )
    differences = list(dict.fromkeys(texts))
    if not step.settings:
        differences += _compare_classes(step.optimizer, step.library, spec)
    if number == 0 and (difference := _compare_states(step, loaded_counts)) is not None:
        differences.append(difference)
    follows_clipping = CLIPPING in setting_names_from_job
    if not follows_clipping and (step.max_norm or None) != (spec.max_norm or None) and _may_clip(step, spec, norms):
        differences.append(
            f"clipped to {format_value(step.max_norm)} in the job, to {format_value(spec.max_norm)} here"
        )
    return differences


def _compare_states(step: OptimizerStep, loaded_counts: Sequence[int] | None) -> str | None:
    """Compare what the job's optimizer held before its first recorded step to what the replay's begins with."""
    if loaded_counts is None:
        return "moments of steps before in the job, none here" if step.has_state else None
    counts = " and ".join(map(str, loaded_counts))
    if step.has_state is False:
        return f"no state in the job, that of {counts or 'earlier'} steps here"
    if step.state_steps and loaded_counts and tuple(loaded_counts) != tuple(step.state_steps):
        return f"the state of {' and '.join(map(str, step.state_steps))} steps in the job, of {counts} here"
    return None


def _may_clip(step: OptimizerStep, spec: ActorSpec, norms: tuple[float | None, float | None] | None) -> bool:
    """Tell whether one of the two limits may change the step. A limit above the gradient's norm does not."""
    job_norm, replay_norm = (None if step.is_part_of_norm else step.grad_norm,) * 2 if norms is None else norms
    if step.num_clipped is not None:
        # The job clipped some parameters alone, perhaps in the first of several clippings: their norm is not known.
        job_norm = None
    return _limit_may_clip(step.max_norm, job_norm) or _limit_may_clip(spec.max_norm, replay_norm)


def _limit_may_clip(max_norm: float | None, norm: float | None) -> bool:
    """Tell whether a limit may change a gradient of this norm; where the norm is not known, every finite limit may."""
    if not max_norm or max_norm == math.inf:
        return False
    return norm is None or not norm <= max_norm


def _compare_classes(class_name: str, library: str | None, spec: ActorSpec) -> list[str]:
    """Compare the class alone, of a step whose groups were not recorded."""
    family = recognise_group(read_job_group({}, class_name, library))
    is_same = spec.custom_optimizer is not None or (family is not None and family.option_value == spec.optimizer)
    return [] if is_same else [f"{class_name} in the job, {_describe_own(spec)} here"]


def _compare_group(
    settings: Mapping[str, Any],
    step: OptimizerStep,
    spec: ActorSpec,
    number: int,
    setting_names_from_job: Container[str],
) -> Iterator[str]:
    """Yield the differences of one of the job's parameter groups."""
    group = read_job_group(settings, step.optimizer or "", step.library)
    if spec.custom_optimizer is not None:
        # The user's function is there to be the job's optimizer, as a loss of their own is the job's loss. What was
        # typed for it may still be another setting than the job's.
        yield from _compare_settings(*_read_typed_settings(settings, spec, number), setting_names_from_job)
        return
    family = recognise_group(group)
    own = OPTIMIZERS.get(spec.optimizer)
    if family is None and own is not None and group.class_name.lower().startswith(own.option_value.split("-")[0]):
        yield format_error_with_flags(explain_unknown_class(group))
        return
    is_family = family is not None and own is not None and family.option_value in (own.option_value, own.companion)
    if family is None or not (is_family or FAMILY in setting_names_from_job):
        yield f"{_describe_class(group, spec)} in the job, {_describe_own(spec)} here"
        return
    replay_settings = family.read_options(spec) if family is own else _read_typed_of_companion(spec)
    if number < spec.lr_warmup_steps:
        replay_settings["lr"] = spec.base_rate * number / spec.lr_warmup_steps
    job_settings = family.read_job_settings({"lr": replay_settings["lr"], **settings})
    yield from _compare_settings(job_settings, replay_settings, setting_names_from_job)
    for name in family.list_unknown_settings(settings):
        yield f"{name} {format_value(settings[name])} in the job, which {family.option_value} here does not have"


def _read_typed_of_companion(spec: ActorSpec) -> dict[str, Any]:
    """Return what options set of the optimizer that steps beside Muon: its rate, and a weight decay that was typed."""
    decay = {} if spec.weight_decay is None else {"weight_decay": spec.weight_decay}
    return {"lr": spec.base_rate, **decay}


def _compare_settings(
    job_settings: Mapping[str, Any], replay_settings: Mapping[str, Any], setting_names_from_job: Container[str]
) -> Iterator[str]:
    for name, replay_value in replay_settings.items():
        if name not in setting_names_from_job and not _is_same(job_settings[name], replay_value):
            label = LABELS.get(name, name)
            yield f"{label} {format_value(job_settings[name])} in the job, {format_value(replay_value)} here"


def _read_typed_settings(
    settings: Mapping[str, Any], spec: ActorSpec, number: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a job's group, as far as a user's function can be given it, and the same with what was typed."""
    job = drop_unknown(USER_FUNCTION.read_job_settings({"lr": None, **settings}))
    typed = USER_FUNCTION.read_options(spec) | {"lr": spec.learning_rate}
    if number < spec.lr_warmup_steps:
        typed["lr"] = spec.base_rate * number / spec.lr_warmup_steps
    return job, {name: _fill(typed[name], value) for name, value in job.items()}


def _fill(typed: Any, job: Any) -> Any:
    """Return what was typed, with the job's in the place of what was not."""
    if isinstance(typed, tuple):
        return tuple(map(_fill, typed, job))
    return job if typed is None else typed


def _describe_class(group: JobGroup, spec: ActorSpec) -> str:
    """Name the job's class, and its package where the replay's class has the same name."""
    if group.class_name != _describe_own(spec):
        return group.class_name
    return f"{group.class_name} of {group.library or 'another package'}"


def _describe_own(spec: ActorSpec) -> str:
    """Name the class that the replay steps with."""
    family = OPTIMIZERS.get(spec.optimizer)
    return spec.optimizer if family is None else family.engine[0].partition(":")[2]


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Sequence) and isinstance(other, Sequence):
        return len(value) == len(other) and all(_is_same(a, b) for a, b in zip(value, other, strict=True))
    if isinstance(value, int | float) and isinstance(other, int | float):
        return math.isclose(value, other, rel_tol=1e-6, abs_tol=1e-30)
    return bool(value == other)


def describe_clippings(clippings: Sequence[tuple[float | None, float]]) -> str:
    """Describe clippings by their orders and limits, as `element by element to 0.01, then to a 2-norm of 1`."""
    return ", then ".join(
        f"element by element to {limit:g}" if order is None else f"to a {order:g}-norm of {limit:g}"
        for order, limit in clippings
    )


def describe_difference_of_ranks(steps: Sequence[tuple[int, OptimizerStep]]) -> str | None:
    """Describe a setting in which two ranks stepped a parameter differently; None if none are known to have.

    steps  one step of the job, by rank
    """
    for rank, step in steps[1:]:
        first_rank, first_step = steps[0]
        for groups in product(first_step.settings, step.settings):
            names = _list_differing_settings(*groups)
            if names and _have_common_parameters(*map(_read_members, (first_step, step), groups)):
                values = [format_value(group.get(names[0])) for group in groups]
                label = LABELS.get(names[0], names[0])
                return f"{label} {values[0]} on rank {first_rank}, {values[1]} on rank {rank}"
    return None


def _list_differing_settings(group: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """List the settings in which two groups differ."""
    names = dict.fromkeys([*group, *other])
    return [
        name for name in names if name not in ("num_parameters", "parameters") and group.get(name) != other.get(name)
    ]


def _read_members(step: OptimizerStep, group: Mapping[str, Any]) -> frozenset[int] | None:
    """Return the numbers of a group's parameters, none where they are not known; None: it has all of them."""
    if "parameters" not in group and len(step.settings) == 1:
        return None
    return frozenset(parse_numbers(group.get("parameters", "")))


def _have_common_parameters(members: frozenset[int] | None, others: frozenset[int] | None) -> bool:
    if members is None or others is None:
        return members != frozenset() and others != frozenset()
    return not members.isdisjoint(others)


def format_value(value: Any) -> str:
    """Format a setting of an optimizer for people."""
    if value is None:
        return "nothing"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"({', '.join(map(format_value, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def find_step_dtype(steps: Iterable[OptimizerStep]) -> str | None:
    """Find the dtype that one of the job's optimizers rounds its steps to, whatever the weights' dtype is."""
    groups = (read_job_group(group, step.optimizer or "", step.library) for step in steps for group in step.settings)
    families = (recognise_group(group) for group in groups)
    return next((family.step_dtype for family in families if family is not None and family.step_dtype), None)
