"""A replay that steps is told from the job by the class and the settings of each step."""

from dataclasses import replace
from typing import Any

from actor_init.spec import ActorSpec
from capture.file_format.optimizer_step import OptimizerStep
from replay.verdict.optimizer_settings import find_step_dtype, list_setting_differences


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
