"""Find the job's optimizer steps that a replay can follow: it takes each with the settings that it had in the job.

A setting that was typed takes the place of the job's in every step, as a learning rate does.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actor_init.declarations.backends import find_backend_declaration, find_backends, list_whole_backend
from actor_init.declarations.optimizers import (
    OPTIMIZERS,
    explain_unknown_class,
    find_missing_package,
    read_job_group,
    recognise_group,
)
from actor_init.declarations.optimizers.declaration import OptimizerDeclaration, ParameterGroup
from actor_init.declarations.optimizers.user_function import USER_FUNCTION, drop_unknown
from actor_init.schedule_and_norm import Clipping, StepSettings
from actor_init.spec import ActorSpec, OptimizerName
from capture.facts import Setting
from capture.file_format.optimizer_step import OptimizerStep, merge_equal_settings, parse_numbers
from replay.output.text import pluralise
from replay.resolution.job_windows import JobWindow
from replay.verdict.job_clipping import infer_own_clipping_limit
from replay.verdict.optimizer_comparison import CLIPPING, FAMILY, describe_clippings, describe_difference_of_ranks
from replay.verdict.recorded_pass import match_parameter_name


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowedSteps:
    """The job's steps that a replay follows: it takes them as the job did, up to the first that it cannot take so.

    optimizer       the job's, by its value of --optimizer; a function of the user's own if that was typed
    max_norm        what was typed, else the norm that the job clipped to; None: neither clips
    groups          of the optimizer, with the settings of the first step
    settings        of each step, by the index of the pass that ends its window
    setting_names_from_job  names, by torch, of the settings that each step takes from the job's (others were typed);
                    FAMILY is among them where no optimizer was typed
    job_code_clip_norm  the norm that the job clipped to with code of its own, inferred from its recorded gradients: it
                    called no function, such as clip_grad_norm_, that a recording sees. None: it did not clip so
    why_no_more     why the windows after these are not followed; empty: all are followed
    """

    optimizer: str
    max_norm: float | None
    groups: Sequence[ParameterGroup]
    settings: Mapping[int, StepSettings]
    setting_names_from_job: frozenset[str]
    job_code_clip_norm: float | None = None
    why_no_more: str = ""


def find_followed_steps(
    windows: Sequence[JobWindow], actor: ActorSpec, names: Collection[str], job_names: Sequence[str]
) -> FollowedSteps | str:
    """Find the steps to follow; a text, which may have marks of settings, says why there are none.

    windows    of the replay
    actor      with the settings that were typed
    names      of this model's parameters, one that has several names under each
    job_names  of the job's parameters, by their numbers; empty: not recorded
    """
    if not windows:
        return "no window of the job's is full"
    followed: list[JobWindow] = []
    reason: str | None = None
    for window in windows:
        reason = _explain_unfollowable(window, followed, actor, job_names)
        if reason is not None:
            break
        followed.append(window)
    if reason is not None and not followed:
        return reason
    group_lists = [_merge_groups(window.steps) for window in followed]
    members, group_places = _divide_parameters(group_lists, names, job_names)
    families = [_find_family(group_lists[0][places[0]], followed[0].steps[0], actor) for places in group_places]
    main = next((family for family in families if family.companion is not None), families[0])
    job_code_clip_norm = (
        infer_own_clipping_limit([window.steps for window in followed]) if actor.max_norm is None else None
    )
    clippings = _read_clippings(followed[0]) if actor.max_norm is None else ()
    limit = None if clippings else _read_limit(followed[0].steps[0]) or job_code_clip_norm
    return FollowedSteps(
        optimizer=main.option_value,
        max_norm=limit if actor.max_norm is None else actor.max_norm,
        job_code_clip_norm=job_code_clip_norm,
        groups=[
            ParameterGroup(
                family=family.option_value,
                settings=_read_settings(family, group_lists[0][places[0]], actor, with_typed=True),
                names=member_names,
                is_fused=group_lists[0][places[0]].get("fused") is True,
            )
            for family, places, member_names in zip(families, group_places, members, strict=True)
        ],
        settings={
            window.last_index: StepSettings(
                groups=[
                    _read_settings(family, groups[places[step_number]], actor, with_typed=False)
                    for family, places in zip(families, group_places, strict=True)
                ],
                clippings=[Clipping(order=order, limit=limit) for order, limit in clippings],
            )
            for step_number, (window, groups) in enumerate(zip(followed, group_lists, strict=True))
        },
        setting_names_from_job=frozenset(
            [
                *([FAMILY] if actor.optimizer == OptimizerName.AUTO else []),
                *([] if _is_rate_typed(actor) else ["lr"]),
                *([CLIPPING] if clippings else []),
                *(setting.name for setting in main.settings if not _is_typed(setting.options, actor)),
            ]
        ),
        why_no_more=reason or "",
    )


def explain_missing_start(window: JobWindow) -> str | None:
    """Say why the optimizer's state at the first step is not known; None if it had none yet."""
    states = {step.has_state for step in window.steps}
    if states == {False}:
        return None
    if None in states:
        return "whether the recording begins with the optimizer's first step was not recorded"
    if window.number:
        return f"the inputs begin with step {window.number + 1}, and the optimizer's state before it is not given"
    return "the optimizer had a state when the recording began, which is not given"


def _explain_unfollowable(
    window: JobWindow, followed: Sequence[JobWindow], actor: ActorSpec, job_names: Sequence[str]
) -> str | None:
    """Say why the job's step after a window cannot be taken here, behind those that are followed; None if it can."""
    first_window = followed[0] if followed else window
    step_name = "a step" if window.number is None else f"step {window.number + 1}"
    if not window.steps and any(window.number == other.number for other in followed):
        return f"the passes behind step {followed[-1].place + 1} here are in no step of the job"
    if not window.steps and window.number and not any(job_pass.step for job_pass in window.passes):
        return f"no step was recorded behind the passes after step {window.number}"
    if not window.steps:
        return f"not all passes of {step_name} were recorded, or they are not all replayed"
    if window.number is None or first_window.number is None or window.number - first_window.number != window.place:
        return f"{step_name} does not follow the step before"
    if any(step.optimizer is None for step in window.steps):
        return f"the optimizer of {step_name} was not recorded"
    groups = _merge_groups(window.steps)
    if not groups or any("lr" not in group for group in groups):
        return f"the settings of {step_name} were not recorded"
    if (why := _explain_other_settings(window, step_name)) is not None:
        return why
    if len(groups) > 1 and (not job_names or any("parameters" not in group for group in groups)):
        return f"the optimizer has {pluralise(len(groups), 'group')}, and their parameters were not recorded"
    if actor.custom_optimizer is None:
        for group in groups:
            if (why := _explain_group(group, window.steps[0], actor)) is not None:
                return why
    return None if actor.max_norm is not None else _explain_clipping(window, first_window, step_name, actor)


def _explain_group(settings: Mapping[str, Any], step: OptimizerStep, actor: ActorSpec) -> str | None:
    """Say why a group of the job cannot be stepped here; None if it can."""
    group = read_job_group(settings, step.optimizer or "", step.library)
    family = recognise_group(group)
    if family is None:
        return explain_unknown_class(group, list_whole_backend(actor))
    if actor.optimizer != OptimizerName.AUTO:
        typed_family = OPTIMIZERS.get(actor.optimizer)
        if typed_family is None or family.option_value not in (typed_family.option_value, typed_family.companion):
            return f"the job stepped with {group.class_name}, and {Setting('optimizer', actor.optimizer)} was given"
    if unknown := family.list_unknown_settings(settings):
        value = settings[unknown[0]]
        return f"{group.class_name} had {unknown[0]} {value}, which {family.option_value} here does not have"
    if (refusal := find_missing_package(family.option_value)) is not None:
        return refusal.text
    return None


def _explain_clipping(window: JobWindow, first_window: JobWindow, step_name: str, actor: ActorSpec) -> str | None:
    clippings = _read_clippings(first_window)
    if any(step.clips_otherwise and not step.clippings for step in window.steps):
        return f"the gradient of {step_name} was clipped by another rule than to a norm, and that was not recorded"
    if any(step.clippings != clippings for step in window.steps):
        return f"the gradient of {step_name} was clipped by another rule than the first step's"
    if clippings:
        if find_backend_declaration(actor.backend).clips_by_any_rule:
            return None
        backend = Setting("backend", find_backends(lambda other: other.clips_by_any_rule)[0])
        what = describe_clippings(clippings)
        return f"the gradient of {step_name} was clipped {what}, which the backend does not do. Try: {backend}"
    limits = {_read_limit(step) for step in window.steps}
    if any(step.num_clipped is not None and _read_limit(step) is not None for step in window.steps):
        return f"only a part of the gradient of {step_name} was clipped"
    if limits != {_read_limit(first_window.steps[0])}:
        return f"the gradient of {step_name} was clipped to another norm than the first step's"
    return None


def _read_clippings(window: JobWindow) -> Sequence[tuple[float | None, float]]:
    """Return the clippings of a window's step, one of which is by another rule than to a 2-norm; none where none is."""
    return window.steps[0].clippings if window.steps else ()


def _read_limit(step: OptimizerStep) -> float | None:
    """Return the norm that a step's gradient was clipped to; None: to none."""
    return None if not step.max_norm or step.max_norm == math.inf else step.max_norm


def _merge_groups(steps: Sequence[OptimizerStep]) -> list[dict[str, Any]]:
    return list(merge_equal_settings([group for step in steps for group in step.settings]))


def _explain_other_settings(window: JobWindow, step_name: str) -> str | None:
    """Say that two ranks of the job stepped a parameter with different settings; None if none are known to have."""
    ranks = list(dict.fromkeys(job_pass.rank for job_pass in window.passes))
    difference = describe_difference_of_ranks(list(zip(ranks, window.steps, strict=False)))
    return None if difference is None else f"the ranks' optimizers have other settings in {step_name}: {difference}"


def _find_family(settings: Mapping[str, Any], step: OptimizerStep, actor: ActorSpec) -> OptimizerDeclaration:
    if actor.custom_optimizer is not None:
        return replace(USER_FUNCTION, option_value=actor.optimizer)
    family = recognise_group(read_job_group(settings, step.optimizer or "", step.library))
    assert family is not None, "_explain_group refuses such a group"
    return family


def _divide_parameters(
    group_lists: Sequence[Sequence[Mapping[str, Any]]], names: Collection[str], job_names: Sequence[str]
) -> tuple[list[frozenset[str]], list[tuple[int, ...]]]:
    """Divide the parameters into sets whose members are in one group at each step.

    group_lists  the groups of each step

    Returns the names of each set, and for each step the place of the set's group among the step's groups. A parameter
    that the job gave to no optimizer is in the first set: it is trained here, and then seen to have moved, unlike the
    job's.
    """
    places_by_number: dict[int, list[int]] = {}
    for step_number, groups in enumerate(group_lists):
        if len(groups) > 1:
            for place, group in enumerate(groups):
                for number in parse_numbers(group["parameters"]):
                    places_by_number.setdefault(number, [0] * len(group_lists))[step_number] = place
    if not places_by_number:
        return [frozenset(names)], [(0,) * len(group_lists)]
    members: dict[tuple[int, ...], set[str]] = {}
    for number in sorted(places_by_number):
        name = match_parameter_name(job_names[number], names) if number < len(job_names) else None
        if name is not None:
            members.setdefault(tuple(places_by_number[number]), set()).add(name)
    group_places = list(members) or [(0,) * len(group_lists)]
    grouped = {name for group_names in members.values() for name in group_names}
    members.setdefault(group_places[0], set()).update(name for name in names if name not in grouped)
    return [frozenset(members[places]) for places in group_places], group_places


def _read_settings(
    family: OptimizerDeclaration, group: Mapping[str, Any], actor: ActorSpec, *, with_typed: bool
) -> dict[str, Any]:
    """Return the settings of a step for one group: the job's, and with `with_typed` what was typed in their places.

    Otherwise a typed setting is left out: the optimizer has had it from the beginning, and a rate has its schedule.
    """
    settings = family.read_job_settings(group)
    if _is_rate_typed(actor):
        settings.pop("lr")
        if with_typed:
            settings["lr"] = actor.base_rate
    for setting in family.settings:
        if not _is_typed(setting.options, actor):
            continue
        job_value = settings.pop(setting.name)
        if with_typed and len(setting.options) > 1:
            typed = (getattr(actor, option) for option in setting.options)
            settings[setting.name] = tuple(
                job if value is None else value for value, job in zip(typed, job_value, strict=True)
            )
        elif with_typed:
            settings[setting.name] = getattr(actor, setting.options[0])
    return settings if actor.custom_optimizer is None else drop_unknown(settings)


def _is_rate_typed(actor: ActorSpec) -> bool:
    return actor.learning_rate is not None or actor.lr_warmup_steps > 0


def _is_typed(options: Sequence[str], actor: ActorSpec) -> bool:
    """Was one of the options of a setting typed?"""
    return any(getattr(actor, option) is not None for option in options)
