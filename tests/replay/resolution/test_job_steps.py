"""A replay takes over the settings of each of the job's steps, but for what was typed."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from actor_init.declarations.optimizers import OPTIMIZERS
from actor_init.schedule_and_norm import Clipping
from actor_init.spec import ActorSpec
from capture.file_format.optimizer_step import OptimizerStep
from replay.options.option_parsing import format_error_with_flags
from replay.resolution.job_steps import FollowedSteps, explain_missing_start, find_followed_steps
from replay.resolution.job_windows import JobWindow
from replay.resolution.windows import JobPass
from replay.verdict.optimizer_comparison import CLIPPING

ADAMW = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False}
NAMES = ["embed.weight", "norm.weight", "head.weight"]


def make_window(place: int, *groups: dict[str, Any], number: int | None = None, **step: Any) -> JobWindow:
    number = place if number is None else number
    settings = tuple({"num_parameters": 1, **ADAMW, **group} for group in groups)
    step = {"optimizer": "AdamW", "has_state": place > 0, **step}
    recorded = OptimizerStep(number=number, passes=(place,), shares=(1.0,), settings=settings, **step)
    return JobWindow(
        place=place, first_index=place, last_index=place, passes=(), steps=[recorded] if groups else [], number=number
    )


def follow(*windows: JobWindow, **typed: Any) -> FollowedSteps:
    followed = find_followed_steps(windows, ActorSpec(**typed), NAMES, NAMES)
    assert isinstance(followed, FollowedSteps), followed
    return followed


def test_each_step_has_the_settings_that_it_had_in_the_job() -> None:
    followed = follow(make_window(0, {"lr": 0.0}), make_window(1, {"lr": 0.5}))
    assert [step.groups[0]["lr"] for step in followed.settings.values()] == [0.0, 0.5]
    assert followed.settings[1].groups[0]["betas"] == (0.9, 0.95)
    assert (followed.optimizer, followed.groups[0].names, followed.why_no_more) == ("adamw", frozenset(NAMES), "")


@pytest.mark.parametrize("is_fused", [True, False, None])
def test_a_job_with_the_fused_kernel_is_followed_with_it(is_fused: bool | None) -> None:
    [group] = follow(make_window(0, {"lr": 0.5, "fused": is_fused})).groups
    assert group.is_fused is (is_fused is True)


def test_what_was_typed_is_not_the_jobs() -> None:
    followed = follow(make_window(0, {"lr": 0.5}), learning_rate=0.1, beta1=0.5)
    # The optimizer has had them from the beginning.
    assert not {"lr", "betas"} & followed.settings[0].groups[0].keys()
    assert followed.groups[0].settings["lr"] == 0.1
    assert followed.groups[0].settings["betas"] == (0.5, 0.95)
    assert {"lr", "betas"}.isdisjoint(followed.setting_names_from_job)
    assert "weight_decay" in followed.setting_names_from_job


CLASSES = {
    "adamw": ("AdamW", "torch"),
    "adam": ("Adam", "torch"),
    "sgd": ("SGD", "torch"),
    "adafactor": ("Adafactor", "torch"),
    "transformers-adafactor": ("Adafactor", "transformers"),
    "muon": ("Muon", "torch"),
    "lion": ("Lion", "lion_pytorch"),
    "adamw-8bit": ("AdamW8bit", "bitsandbytes"),
    "adam-8bit": ("Adam8bit", "bitsandbytes"),
    "lion-8bit": ("Lion8bit", "bitsandbytes"),
}
ADAM_WORDS = ("adamw", "adam", "adamw-8bit", "adam-8bit")


def make_own_settings(word: str, scale: float) -> dict[str, Any]:
    """Return the settings of a family's group that options can set, none of them a default."""
    settings: dict[str, Any] = {"lr": 0.5 * scale, "weight_decay": 0.25 * scale}
    if word in (*ADAM_WORDS, "lion", "lion-8bit"):
        settings["betas"] = (0.75 * scale, 0.625 * scale)
    if word in ADAM_WORDS:
        settings["eps"] = 0.125 * scale
    if word in ("sgd", "muon"):
        settings["momentum"] = 0.375 * scale
    if word == "transformers-adafactor":
        settings["beta1"] = 0.75 * scale
    return settings


@pytest.mark.parametrize("value", [0.0, 3e-7])
@pytest.mark.parametrize(
    ("word", "option"),
    [(word, option) for word, family in OPTIMIZERS.items() for option in ("learning_rate", *family.options)],
)
def test_what_is_typed_takes_the_place_of_the_jobs_in_every_step_and_all_else_is_the_jobs(
    word: str, option: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actor_init.declarations.optimizers.find_spec", lambda name: name)
    class_name, library = CLASSES[word]
    steps = [make_own_settings(word, scale) for scale in (1.0, 0.5)]
    windows = []
    for place, settings in enumerate(steps):
        group = {"num_parameters": 3, **settings}
        step = OptimizerStep(
            number=place,
            passes=(place,),
            shares=(1.0,),
            optimizer=class_name,
            library=library,
            settings=(group,),
            has_state=place > 0,
        )
        windows.append(replace(make_window(place), steps=[step]))
    followed = follow(*windows, **{"optimizer": word, option: value})

    name = {"learning_rate": "lr", "beta2": "betas"}.get(option, option)
    name = "betas" if option == "beta1" and word != "transformers-adafactor" else name
    first, second = steps
    typed: Any = value
    if name == "betas":
        typed = (value, first["betas"][1]) if option == "beta1" else (first["betas"][0], value)
    [begun] = followed.groups
    assert {key: begun.settings[key] for key in first} == {**first, name: typed}
    for index, settings in enumerate(steps):
        [found] = followed.settings[index].groups
        kept = {key: given for key, given in settings.items() if key != name}
        assert {key: found[key] for key in found if key in settings} == kept
    assert name not in followed.setting_names_from_job
    assert second.keys() - {name} <= followed.setting_names_from_job


def test_what_is_typed_for_muon_is_of_the_adamw_beside_it_as_far_as_that_has_it() -> None:
    matrices = {**make_own_settings("muon", 1.0), "optimizer": "Muon", "library": "torch", "parameters": "0,2"}
    vectors = {**make_own_settings("adamw", 1.0), "optimizer": "AdamW", "library": "torch", "parameters": "1"}
    step = OptimizerStep(
        number=0,
        passes=(0,),
        shares=(1.0,),
        optimizer="Muon, AdamW",
        settings=({"num_parameters": 2, **matrices}, {"num_parameters": 1, **vectors}),
        has_state=False,
    )
    window = replace(make_window(0), steps=[step])
    followed = follow(window, optimizer="muon", weight_decay=3e-7, momentum=0.0)
    assert [group.family for group in followed.groups] == ["muon", "adamw"]
    muon, adamw = (group.settings for group in followed.groups)
    assert (muon["lr"], muon["weight_decay"], muon["momentum"]) == (0.5, 3e-7, 0.0)
    expected = {"lr": 0.5, "betas": (0.75, 0.625), "eps": 0.125, "weight_decay": 3e-7}
    assert {name: adamw[name] for name in expected} == expected


def test_parameters_go_with_the_groups_that_the_job_had() -> None:
    groups = {"lr": 0.5, "parameters": "0,2"}, {"lr": 0.5, "weight_decay": 0.0, "parameters": "1"}
    followed = follow(make_window(0, *groups))
    decays = {name: group.settings["weight_decay"] for group in followed.groups for name in group.names}
    assert decays == {"embed.weight": 0.1, "norm.weight": 0.0, "head.weight": 0.1}


def test_a_parameter_of_no_group_is_trained_as_the_first() -> None:
    groups = {"lr": 0.5, "parameters": "0"}, {"lr": 0.5, "weight_decay": 0.0, "parameters": "1"}
    followed = follow(make_window(0, *groups))
    assert [sorted(group.names) for group in followed.groups] == [["embed.weight", "head.weight"], ["norm.weight"]]


@pytest.mark.parametrize(
    ("window", "why"),
    [
        (make_window(0), "not all passes of step 1 were recorded"),
        (make_window(0, number=2), "no step was recorded behind the passes after step 2"),
        (
            make_window(0, {"lr": 1.0}, optimizer="Shampoo", max_norm=0.5),
            "the job's Shampoo is of no family here, so its steps are not judged. Try: --optimizer FILE.py:function "
            "--backend fsdp2, where function(named_parameters, settings) builds it: the job's "
            "own class there repeats its mistakes, a library's shows them",
        ),
        (
            make_window(0, {"lr": 1.0}, library="__main__"),
            "the job's AdamW of the job's own script is of no family here",
        ),
        (make_window(0, {"lr": 1.0}, {"lr": 2.0}), "their parameters were not recorded"),
        (
            make_window(0, {"lr": 1.0}, clips_otherwise=True),
            "by another rule than to a norm, and that was not recorded",
        ),
        (
            make_window(0, {"lr": 1.0}, clips_otherwise=True, clippings=((None, 0.5), (2.0, 1.0))),
            "step 1 was clipped element by element to 0.5, then to a 2-norm of 1, which the backend does not do. Try: "
            "--backend fsdp2",
        ),
        (make_window(0, {"lr": 1.0}, max_norm=1.0, num_clipped=3), "only a part of the gradient of step 1 was clipped"),
        (make_window(0, {"lr": 1.0}, optimizer=None), "was not recorded"),
    ],
)
def test_steps_that_cannot_be_taken_are_not_followed(window: JobWindow, why: str) -> None:
    found = find_followed_steps([window], ActorSpec(), NAMES, NAMES)
    assert isinstance(found, str)
    assert why in format_error_with_flags(found)


def test_a_function_of_the_users_own_steps_with_the_jobs_settings_of_each_step() -> None:
    own: dict[str, Any] = {"optimizer": "Own", "library": "__main__", "max_norm": 1.0}
    groups: Any = {"lr": 0.5, "beta3": 0.1, "parameters": "0"}, {"lr": 0.25, "eps": 1e-4, "parameters": "1-2"}
    windows = [make_window(place, *({**group, "weight_decay": place} for group in groups), **own) for place in range(2)]
    followed = follow(*windows, optimizer="own.py:make", eps=1e-6)
    assert (followed.optimizer, followed.max_norm, followed.why_no_more) == ("own.py:make", 1.0, "")
    assert followed.setting_names_from_job == {"lr", "betas", "weight_decay", "momentum"}
    assert [group.names for group in followed.groups] == [{"embed.weight"}, {"norm.weight", "head.weight"}]
    # What the job's class does not have, as a momentum, is not set; what was typed is set once, before the first step.
    assert followed.groups[0].settings == {"lr": 0.5, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0}
    assert followed.settings[1].groups == [
        {"lr": rate, "betas": (0.9, 0.95), "weight_decay": 1} for rate in (0.5, 0.25)
    ]


def test_passes_behind_the_steps_that_no_step_takes_end_what_is_followed() -> None:
    followed = follow(make_window(0, {"lr": 0.5}), make_window(1, {"lr": 0.5}), make_window(2, number=0))
    assert len(followed.settings) == 2
    assert followed.why_no_more == "the passes behind step 2 here are in no step of the job"


BY_VALUE: dict[str, Any] = {"clips_otherwise": True, "clippings": ((None, 0.5), (2.0, 1.0)), "max_norm": 1.0}


@pytest.mark.parametrize("backend", ["fsdp2", "ddp"])
def test_a_clipping_by_value_is_followed_where_the_backend_does_it(backend: str) -> None:
    windows = [make_window(place, {"lr": 1.0}, **BY_VALUE) for place in range(2)]
    followed = follow(*windows, backend=backend)
    clippings = [Clipping(order=None, limit=0.5), Clipping(order=2.0, limit=1.0)]
    assert [step.clippings for step in followed.settings.values()] == [clippings] * 2
    assert (followed.max_norm, followed.why_no_more) == (None, "")
    assert CLIPPING in followed.setting_names_from_job
    other = make_window(1, {"lr": 1.0}, max_norm=1.0)
    assert follow(windows[0], other, backend=backend).why_no_more == (
        "the gradient of step 2 was clipped by another rule than the first step's"
    )
    # What was typed takes its place.
    assert follow(*windows, backend=backend, max_norm=2.0).settings[0].clippings == []


def make_ranks_window(*rank_groups: Sequence[dict[str, Any]]) -> JobWindow:
    windows = [make_window(0, *groups) for groups in rank_groups]
    passes = [
        JobPass(rank=rank, forward=0, world_size=len(windows), num_steps_before=0, step=None, loss_per_mean=1.0)
        for rank in range(len(windows))
    ]
    return replace(windows[0], passes=passes, steps=[window.steps[0] for window in windows])


LOW, HIGH = {"lr": 0.5}, {"lr": 1.0}
FIRST, REST = {"parameters": "0"}, {"parameters": "1-2"}
OTHER_RATE = "the ranks' optimizers have other settings in step 1: learning rate 0.5 on rank 0, 1 on rank 1"


@pytest.mark.parametrize(
    "rank_groups",
    [
        ([LOW], [HIGH]),
        ([LOW | FIRST, LOW | REST], [HIGH | FIRST, LOW | REST]),
        ([LOW | FIRST, HIGH | REST], [HIGH | FIRST, LOW | REST]),
        ([LOW], [HIGH | FIRST, LOW | REST]),
    ],
)
def test_ranks_that_step_with_other_settings_are_not_followed(rank_groups: Sequence[Any]) -> None:
    assert find_followed_steps([make_ranks_window(*rank_groups)], ActorSpec(), NAMES, NAMES) == OTHER_RATE


@pytest.mark.parametrize(
    "rank_groups",
    [
        ([LOW], [LOW]),
        ([LOW | FIRST, HIGH | REST], [LOW | FIRST, HIGH | REST]),
        # Each rank steps its own parameters.
        ([LOW | FIRST], [HIGH | REST]),
    ],
)
def test_ranks_whose_settings_agree_are_followed(rank_groups: Sequence[Any]) -> None:
    assert isinstance(find_followed_steps([make_ranks_window(*rank_groups)], ActorSpec(), NAMES, NAMES), FollowedSteps)


def test_of_several_groups_without_numbers_it_is_not_known_which_the_ranks_share() -> None:
    found = find_followed_steps([make_ranks_window([LOW, HIGH], [LOW, HIGH])], ActorSpec(), NAMES, NAMES)
    assert found == "the optimizer has 2 groups, and their parameters were not recorded"


def test_steps_are_followed_as_far_as_they_follow_each_other() -> None:
    followed = follow(make_window(0, {"lr": 1.0}), make_window(1, {"lr": 1.0}), make_window(2, {"lr": 1.0}, number=5))
    assert list(followed.settings) == [0, 1]
    assert "step 6 does not follow" in followed.why_no_more


def test_a_limit_is_the_jobs_unless_typed() -> None:
    window = make_window(0, {"lr": 1.0}, max_norm=2.0)
    assert (follow(window).max_norm, follow(window, max_norm=1.0).max_norm) == (2.0, 1.0)


def make_steps_of_ranks(place: int, *steps: dict[str, Any]) -> JobWindow:
    """A window of which each rank recorded a step of its own."""
    windows = [make_window(place, {"lr": 1.0}, **step) for step in steps]
    return replace(windows[0], steps=[window.steps[0] for window in windows])


ANOTHER_NORM = "the gradient of step {} was clipped to another norm than the first step's"


@pytest.mark.parametrize(
    ("norms", "num_followed", "limit", "why"),
    [
        ([1.0, 1.0, 1.0], 3, 1.0, ""),
        ([1.0, 1.0, 2.0], 2, 1.0, ANOTHER_NORM.format(3)),
        ([1.0, None, 1.0], 1, 1.0, ANOTHER_NORM.format(2)),
        ([None, 1.0, 1.0], 1, None, ANOTHER_NORM.format(2)),
        # All of these clip to none.
        ([math.inf, 0.0, None], 3, None, ""),
    ],
)
def test_steps_are_followed_as_long_as_they_clip_to_the_first_ones_norm(
    norms: list[float | None], num_followed: int, limit: float | None, why: str
) -> None:
    windows = [make_window(place, {"lr": 1.0}, max_norm=norm) for place, norm in enumerate(norms)]
    followed = follow(*windows)
    assert (followed.max_norm, len(followed.settings), followed.why_no_more) == (limit, num_followed, why)
    # What was typed takes the place of all of them.
    typed = follow(*windows, max_norm=4.0)
    assert (typed.max_norm, typed.why_no_more, len(typed.settings)) == (4.0, "", 3)


@pytest.mark.parametrize("place_of_other", [0, 1])
@pytest.mark.parametrize(
    ("step", "why"),
    [
        ({"max_norm": 2.0}, ANOTHER_NORM),
        ({"max_norm": 1.0, "num_clipped": 3}, "only a part of the gradient of step {} was clipped"),
        ({"optimizer": None}, "the optimizer of step {} was not recorded"),
        (
            {"max_norm": 1.0, "clips_otherwise": True},
            "the gradient of step {} was clipped by another rule than to a norm, and that was not recorded",
        ),
    ],
)
@pytest.mark.parametrize("first_rank_is_other", [True, False])
def test_what_one_rank_recorded_otherwise_ends_what_is_followed(
    step: dict[str, Any], why: str, first_rank_is_other: bool, place_of_other: int
) -> None:
    usual = {"max_norm": 1.0}
    ranks = [step, usual] if first_rank_is_other else [usual, step]
    windows = [make_steps_of_ranks(place, *(ranks if place == place_of_other else [usual] * 2)) for place in range(2)]
    found = find_followed_steps(windows, ActorSpec(), NAMES, NAMES)
    if isinstance(found, FollowedSteps):
        assert (len(found.settings), place_of_other) == (1, 1)
        found = found.why_no_more
    assert found == why.format(place_of_other + 1)


@pytest.mark.parametrize(
    ("states", "number", "why"),
    [
        ([False, False], 0, None),
        ([False, False], 3, None),
        ([False, True], 0, "the optimizer had a state when the recording began, which is not given"),
        ([True, True], 3, "the inputs begin with step 4, and the optimizer's state before it is not given"),
        ([True, None], 3, "whether the recording begins with the optimizer's first step was not recorded"),
        ([False, None], 0, "whether the recording begins with the optimizer's first step was not recorded"),
    ],
)
def test_the_state_that_any_rank_had_is_missed(states: list[bool | None], number: int, why: str | None) -> None:
    window = make_steps_of_ranks(number, *({"has_state": state} for state in states))
    assert explain_missing_start(window) == why


def test_a_state_before_the_first_step_is_missed() -> None:
    assert explain_missing_start(make_window(0, {"lr": 1.0})) is None
    why = explain_missing_start(make_window(1, {"lr": 1.0}, number=4))
    assert why == "the inputs begin with step 5, and the optimizer's state before it is not given"
