"""A replay that steps is told from the job by the class and the settings of each step."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from actor_init.declarations.optimizers import OPTIMIZERS
from actor_init.spec import ActorSpec
from capture.file_format.optimizer_step import OptimizerStep
from replay.verdict.optimizer_comparison import (
    describe_difference_of_ranks,
    find_step_dtype,
    list_setting_differences,
)


def make_step(class_name: str, *groups: dict[str, Any], has_state: bool = False) -> OptimizerStep:
    return OptimizerStep(
        number=0,
        passes=(0,),
        shares=(1.0,),
        optimizer=class_name,
        settings=tuple({"num_parameters": 1, **group} for group in groups),
        has_state=has_state,
    )


def compare(step: OptimizerStep, **settings: Any) -> list[str]:
    return list_setting_differences(step, ActorSpec(learning_rate=0.1, **settings).with_step_defaults(), 0)


def test_fused_forms_step_as_adamw_does() -> None:
    group = {"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "bias_correction": True}
    assert compare(make_step("FusedAdam", group)) == []
    assert compare(make_step("DeepSpeedCPUAdam", group)) == []


def test_the_mode_of_a_fused_class_decides_between_adam_and_adamw() -> None:
    group = {"lr": 0.1, "weight_decay": 0.01, "adam_w_mode": 0}
    assert compare(make_step("FusedAdam", group)) == ["FusedAdam in the job, AdamW here"]
    assert compare(make_step("FusedAdam", group), optimizer="adam", weight_decay=0.01) == []


def test_the_two_adafactors_are_not_one() -> None:
    group = {"lr": 0.1, "clip_threshold": 1.0, "decay_rate": -0.8, "relative_step": False, "scale_parameter": False}
    assert compare(make_step("Adafactor", group), optimizer="adafactor") == [
        "Adafactor of another package in the job, Adafactor here"
    ]
    assert compare(make_step("Adafactor", group), optimizer="transformers-adafactor") == []
    relative = {**group, "relative_step": True}
    assert compare(make_step("Adafactor", relative), optimizer="transformers-adafactor") == [
        "relative_step True in the job, False here"
    ]


def test_muon_and_the_adamw_beside_it_are_compared_group_by_group() -> None:
    muon = {"optimizer": "Muon", "library": "torch", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    adamw = {"optimizer": "AdamW", "library": "torch", "lr": 0.2, "weight_decay": 0.01}
    assert compare(make_step("Muon, AdamW", muon, adamw), optimizer="muon") == [
        "momentum 0.9 in the job, 0.95 here",
        "learning rate 0.2 in the job, 0.1 here",
    ]


def test_a_class_of_no_family_is_named_with_what_to_type() -> None:
    [difference] = compare(make_step("AdamW", {"lr": 0.1, "library": "__main__"}))
    assert difference.startswith("the job's AdamW of the job's own script is of no family here, so its")
    assert "Try: --optimizer FILE.py:function, where" in difference
    assert compare(make_step("Shampoo", {"lr": 0.1})) == ["Shampoo in the job, AdamW here"]


def test_a_setting_that_the_family_does_not_have_is_a_difference() -> None:
    group = {"lr": 0.1, "weight_decay": 0.01, "bias_correction": False}
    assert compare(make_step("FusedAdam", group)) == [
        "bias_correction False in the job, which adamw here does not have"
    ]


def test_a_function_of_the_user_stands_for_the_class_of_the_job() -> None:
    assert compare(make_step("Shampoo", {"lr": 0.1}), optimizer="mine.py:build") == []


def test_the_package_of_a_class_decides_where_it_was_recorded() -> None:
    step = replace(make_step("Adafactor", {"lr": 0.1}), library="transformers")
    assert compare(step, optimizer="transformers-adafactor") == []
    assert compare(replace(step, library="torch"), optimizer="transformers-adafactor") == [
        "Adafactor of torch in the job, Adafactor here"
    ]


def test_steps_of_muon_are_rounded_to_bf16_whatever_the_weights_are() -> None:
    muon = {"optimizer": "Muon", "library": "torch", "lr": 0.1}
    adamw = {"optimizer": "AdamW", "library": "torch", "lr": 0.1}
    assert find_step_dtype([make_step("Muon, AdamW", adamw, muon)]) == "bfloat16"
    assert find_step_dtype([make_step("AdamW", adamw)]) is None
    assert find_step_dtype([]) is None


NORM = 20.0
OTHER = "clipped to {} in the job, to {} here"


@pytest.mark.parametrize(
    ("limit", "job_code_clip_norm", "norms", "changes", "difference"),
    [
        # A limit that the gradient's norm does not reach changes nothing, and an infinite one never does.
        (inf, None, None, {}, None),
        (inf, inf, None, {}, None),
        (inf, 1.0, None, {}, OTHER.format("inf", "1")),
        (1000.0, None, None, {}, None),
        (1000.0, 500.0, None, {}, None),
        (None, 1000.0, None, {}, None),
        (None, None, None, {}, None),
        (1.0, 1.0, None, {}, None),
        (1.0, inf, None, {}, OTHER.format("1", "nothing")),
        (None, 1.0, None, {}, OTHER.format("nothing", "1")),
        (20.0, None, None, {}, None),
        (19.0, None, None, {}, OTHER.format("19", "nothing")),
        # 0 is no limit.
        (0.0, None, None, {}, None),
        # Where a norm is not known, each finite limit may be one that was reached.
        (1000.0, None, None, {"grad_norm": None}, OTHER.format("1000", "nothing")),
        (inf, None, None, {"grad_norm": None}, None),
        (1000.0, None, None, {"is_part_of_norm": True}, OTHER.format("1000", "nothing")),
        (1000.0, None, None, {"num_clipped": 3}, OTHER.format("1000", "nothing")),
        # The two norms may differ: each limit is held against its own side's.
        (15.0, None, (10.0, 20.0), {}, None),
        (15.0, None, (20.0, 10.0), {}, OTHER.format("15", "nothing")),
        (None, 15.0, (10.0, 20.0), {}, OTHER.format("nothing", "15")),
        (None, 15.0, (20.0, 10.0), {}, None),
    ],
)
def test_a_limit_that_no_norm_reaches_is_no_clipping(
    limit: float | None,
    job_code_clip_norm: float | None,
    norms: tuple[float | None, float | None] | None,
    changes: dict[str, Any],
    difference: str | None,
) -> None:
    step = make_step("AdamW", {"lr": 0.1, "weight_decay": 0.01})
    step = replace(step, **{"max_norm": limit, "grad_norm": NORM, **changes})
    spec = ActorSpec(learning_rate=0.1, max_norm=job_code_clip_norm).with_step_defaults()
    assert list_setting_differences(step, spec, 0, norms) == ([] if difference is None else [difference])


@pytest.mark.parametrize(
    ("has_state", "state_steps", "loaded_counts", "difference"),
    [
        (False, (), None, None),
        (True, (7,), None, "moments of steps before in the job, none here"),
        (True, (7,), [7], None),
        (True, (7,), [5], "the state of 7 steps in the job, of 5 here"),
        (True, (5, 7), [5], "the state of 5 and 7 steps in the job, of 5 here"),
        (False, (), [5], "no state in the job, that of 5 steps here"),
        (False, (), [], "no state in the job, that of earlier steps here"),
        (True, (), [5], None),
        (True, (7,), [], None),
    ],
)
def test_the_state_that_the_first_step_began_with_is_compared(
    has_state: bool, state_steps: tuple[int, ...], loaded_counts: list[int] | None, difference: str | None
) -> None:
    step = replace(make_step("AdamW", {"lr": 0.1, "weight_decay": 0.01}), has_state=has_state, state_steps=state_steps)
    spec = ActorSpec(learning_rate=0.1).with_step_defaults()
    first = list_setting_differences(step, spec, 0, loaded_counts=loaded_counts)
    assert first == ([] if difference is None else [difference])
    # The state before a later step follows from the steps between.
    assert list_setting_differences(step, spec, 1, loaded_counts=loaded_counts) == []


# The class of each family as a job names it, its package, and by option the setting that it is.
ADAM_OPTIONS = {"weight_decay": "weight_decay", "eps": "eps", "beta1": "betas", "beta2": "betas"}
LION_OPTIONS = {"weight_decay": "weight_decay", "beta1": "betas", "beta2": "betas"}
FAMILIES: dict[str, tuple[str, str, dict[str, str]]] = {
    "adamw": ("AdamW", "torch", ADAM_OPTIONS),
    "adam": ("Adam", "torch", ADAM_OPTIONS),
    "sgd": ("SGD", "torch", {"momentum": "momentum", "weight_decay": "weight_decay"}),
    "adafactor": ("Adafactor", "torch", {"weight_decay": "weight_decay"}),
    "transformers-adafactor": ("Adafactor", "transformers", {"weight_decay": "weight_decay", "beta1": "beta1"}),
    "muon": ("Muon", "torch", {"momentum": "momentum", "weight_decay": "weight_decay"}),
    "lion": ("Lion", "lion_pytorch", LION_OPTIONS),
    "adamw-8bit": ("AdamW8bit", "bitsandbytes", ADAM_OPTIONS),
    "adam-8bit": ("Adam8bit", "bitsandbytes", ADAM_OPTIONS),
    "lion-8bit": ("Lion8bit", "bitsandbytes", LION_OPTIONS),
}
# As small as the rates of RL, and smaller.
SMALL_PAIRS = [(5e-7, 1e-6), (1e-6, 1.001e-6), (0.0, 1e-6), (1e-6, 0.0), (2e-9, 1e-9), (1e-15, 1e-8), (1e-8, 1e-7)]


def compare_values(word: str, option: str, in_job: float, here: float) -> list[str]:
    """Compare a job's group of a family with a replay's that has one setting of another value."""
    class_name, library, settings = FAMILIES[word]
    group: dict[str, Any] = {"lr": 1e-6, "library": library}
    if option == "learning_rate":
        group["lr"] = in_job
    elif settings[option] == "betas":
        group["betas"] = [in_job, 0.5] if option == "beta1" else [0.5, in_job]
    else:
        group[settings[option]] = in_job
    typed: dict[str, Any] = {"learning_rate": 1e-6, option: here}
    if settings.get(option) == "betas":
        typed["beta2" if option == "beta1" else "beta1"] = 0.5
    spec = ActorSpec(optimizer=word, **typed).with_step_defaults()
    return list_setting_differences(make_step(class_name, group), spec, 0)


@pytest.mark.parametrize(
    ("word", "option"),
    [(word, option) for word, (_, _, options) in FAMILIES.items() for option in ("learning_rate", *options)],
)
def test_a_setting_that_is_another_one_is_told_however_small_it_is(word: str, option: str) -> None:
    for in_job, here in SMALL_PAIRS:
        values = [f"{in_job:g}", f"{here:g}"]
        if FAMILIES[word][2].get(option) == "betas":
            values = [f"({value}, 0.5)" if option == "beta1" else f"(0.5, {value})" for value in values]
        name = {"learning_rate": "learning rate", "weight_decay": "weight decay", "beta2": "betas"}.get(option, option)
        name = "betas" if option == "beta1" and word != "transformers-adafactor" else name
        assert compare_values(word, option, in_job, here) == [f"{name} {values[0]} in the job, {values[1]} here"]
    # What was computed in other roundings, or in fp32, is the same.
    for in_job, here in [(1e-6 * (1 + 1e-9), 1e-6), (0.1 + 0.2, 0.3), (9.999999974752427e-07, 1e-6), (0, 0.0)]:
        assert compare_values(word, option, in_job, here) == []


def test_every_option_of_every_family_is_compared() -> None:
    options = {word: sorted(options) for word, (_, _, options) in FAMILIES.items()}
    assert options == {word: sorted(family.options) for word, family in OPTIMIZERS.items()}


def test_the_rate_of_the_adamw_beside_muon_is_told_however_small_it_is() -> None:
    muon = {"optimizer": "Muon", "library": "torch", "lr": 1e-6}
    adamw = {"optimizer": "AdamW", "library": "torch", "lr": 5e-7}
    spec = ActorSpec(optimizer="muon", learning_rate=1e-6).with_step_defaults()
    found = list_setting_differences(make_step("Muon, AdamW", muon, adamw), spec, 0)
    assert found == ["learning rate 5e-07 in the job, 1e-06 here"]


@pytest.mark.parametrize(
    ("typed", "decays", "differences"),
    [
        # The weight decay that is typed is that of both, and none of the two keeps its default.
        (0.25, (0.25, 0.25), []),
        (0.25, (0.25, 0.01), ["weight decay 0.01 in the job, 0.25 here"]),
        (0.25, (0.25, None), ["weight decay 0.01 in the job, 0.25 here"]),
        (0.0, (0.0, 3e-7), ["weight decay 3e-07 in the job, 0 here"]),
        (0.25, (0.1, 0.25), ["weight decay 0.1 in the job, 0.25 here"]),
    ],
)
def test_the_weight_decay_that_is_typed_for_muon_is_held_against_that_of_the_adamw_beside_it(
    typed: float, decays: tuple[float, float | None], differences: list[str]
) -> None:
    muon = {"optimizer": "Muon", "library": "torch", "lr": 0.1, "weight_decay": decays[0]}
    adamw: dict[str, Any] = {"optimizer": "AdamW", "library": "torch", "lr": 0.1}
    if decays[1] is not None:
        adamw["weight_decay"] = decays[1]
    assert compare(make_step("Muon, AdamW", muon, adamw), optimizer="muon", weight_decay=typed) == differences


@pytest.mark.parametrize("rate", [1.0, 1e-6, 1e-9])
def test_the_rate_of_a_step_of_the_warm_up_is_that_of_the_schedule(rate: float) -> None:
    """The first of four steps of warm-up has a rate of 0, the second a quarter, and so on."""
    spec = ActorSpec(learning_rate=rate, lr_warmup_steps=4).with_step_defaults()
    quarters = [0, 1, 2, 3, 4, 4]
    for number, place in enumerate(quarters):
        for in_job in range(5):
            step = make_step("AdamW", {"lr": rate * in_job / 4, "weight_decay": 0.01})
            found = list_setting_differences(step, spec, number)
            assert [text.startswith("learning rate") for text in found] == [True] * (in_job != place)


@pytest.mark.parametrize("rates", [(1e-6, 5e-7), (0.0, 1e-9)])
def test_ranks_with_other_settings_are_told_however_small_they_are(rates: tuple[float, float]) -> None:
    steps = [(rank, make_step("AdamW", {"lr": rate})) for rank, rate in enumerate(rates)]
    expected = f"learning rate {rates[0]:g} on rank 0, {rates[1]:g} on rank 1"
    assert describe_difference_of_ranks(steps) == expected
    assert describe_difference_of_ranks([steps[0], (1, steps[0][1])]) is None


def test_what_was_typed_for_a_function_of_the_users_own_may_be_other_than_the_jobs() -> None:
    group = {"lr": 0.1, "betas": [0.9, 0.95], "beta3": 0.2}
    step = make_step("Own", group)
    typed: dict[str, Any] = {"optimizer": "own.py:make", "learning_rate": 0.5, "beta1": 0.8, "momentum": 0.9}
    assert list_setting_differences(step, ActorSpec(optimizer="own.py:make"), 0) == []
    differences = ["learning rate 0.1 in the job, 0.5 here", "betas (0.9, 0.95) in the job, (0.8, 0.95) here"]
    assert list_setting_differences(step, ActorSpec(**typed), 0) == differences
    followed = list_setting_differences(step, ActorSpec(**typed), 0, setting_names_from_job={"lr"})
    assert followed == differences[1:]
