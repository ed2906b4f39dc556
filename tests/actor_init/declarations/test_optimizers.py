"""A job's optimizer is told by its class: which family steps as it does, or that none does."""

from typing import Any

import pytest

from actor_init.declarations.optimizers import OPTIMIZERS, explain_unknown_class, find_missing_package, recognise_group
from actor_init.declarations.optimizers.declaration import JobGroup
from actor_init.spec import ActorSpec, UsageError


@pytest.mark.parametrize(
    ("class_name", "library", "settings", "word"),
    [
        ("AdamW", "torch", {}, "adamw"),
        ("AdamW", None, {}, "adamw"),
        ("AdamW", "bitsandbytes", {}, "adamw"),
        ("AdamW", "__main__", {}, None),
        ("Adam", "torch", {"decoupled_weight_decay": False}, "adam"),
        ("Adam", "torch", {"decoupled_weight_decay": True}, "adamw"),
        ("FusedAdam", "apex", {"adam_w_mode": 1}, "adamw"),
        ("FusedAdam", "deepspeed", {"adam_w_mode": 0}, "adam"),
        ("FusedAdam", None, {}, "adamw"),
        ("DeepSpeedCPUAdam", "deepspeed", {"adam_w_mode": True}, "adamw"),
        ("SGD", "torch", {}, "sgd"),
        ("Adafactor", "torch", {"beta2_decay": -0.8}, "adafactor"),
        ("Adafactor", "transformers", {"clip_threshold": 1.0}, "transformers-adafactor"),
        ("Adafactor", None, {"beta2_decay": -0.8}, "adafactor"),
        ("Adafactor", None, {"clip_threshold": 1.0}, "transformers-adafactor"),
        ("Adafactor", "fairseq", {"clip_threshold": 1.0}, None),
        ("Muon", "torch", {}, "muon"),
        ("Muon", "muon", {}, "muon"),
        ("Muon", "__main__", {}, None),
        ("Muon", "deepspeed", {"ns_method": "gram"}, None),
        ("Muon", None, {}, None),
        ("MuonWithAuxAdam", "muon", {"use_muon": True}, "muon"),
        ("MuonWithAuxAdam", "muon", {"use_muon": False}, "adamw"),
        ("Lion", "lion_pytorch", {}, "lion"),
        ("Lion", "lion_pytorch", {"decoupled_weight_decay": True}, None),
        ("FusedLion", "deepspeed", {}, "lion"),
        ("AdamW8bit", "bitsandbytes", {}, "adamw-8bit"),
        ("PagedAdamW8bit", "bitsandbytes", {}, "adamw-8bit"),
        ("AdamW8bit", "torchao", {}, None),
        ("Lion8bit", "bitsandbytes", {}, "lion-8bit"),
        ("Shampoo", "distributed_shampoo", {}, None),
    ],
)
def test_a_class_is_of_the_family_that_steps_as_it_does(
    class_name: str, library: str | None, settings: dict[str, Any], word: str | None
) -> None:
    family = recognise_group(JobGroup(class_name=class_name, library=library, settings=settings))
    assert (None if family is None else family.option_value) == word


def test_no_two_families_take_the_same_group() -> None:
    for class_name in ("Adam", "AdamW", "FusedAdam", "SGD", "Adafactor", "Muon", "Lion", "AdamW8bit"):
        for library in ("torch", "transformers", "bitsandbytes", "muon", "lion_pytorch"):
            group = JobGroup(class_name=class_name, library=library, settings={})
            assert sum(family.recognise(group) for family in OPTIMIZERS.values()) <= 1


def test_an_unknown_class_is_named_with_what_to_type() -> None:
    text = explain_unknown_class(JobGroup(class_name="Muon", library="__main__", settings={}))
    assert "Muon of the job's own script is of no family here" in text
    assert "FILE.py:function" in text


def test_the_settings_of_a_job_are_filled_with_the_defaults_of_the_class() -> None:
    settings = OPTIMIZERS["adamw"].read_job_settings({"lr": 0.1, "betas": [0.8, 0.9], "fused": True})
    assert settings == {
        "lr": 0.1,
        "betas": (0.8, 0.9),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "amsgrad": False,
        "maximize": False,
    }


def test_a_setting_of_which_the_family_knows_nothing_is_listed_unless_it_is_off() -> None:
    group = {"lr": 1.0, "bias_correction": True, "fused": True, "num_parameters": 2}
    assert OPTIMIZERS["adamw"].list_unknown_settings(group) == []
    assert OPTIMIZERS["adamw"].list_unknown_settings({**group, "bias_correction": False}) == ["bias_correction"]


def test_a_family_whose_package_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actor_init.declarations.optimizers.find_spec", lambda name: None)
    refusal = find_missing_package("adamw-8bit")
    assert refusal is not None
    assert "bitsandbytes is not installed" in str(refusal)
    assert "pip install bitsandbytes" in str(refusal)
    lion = find_missing_package("lion")
    assert "neither lion_pytorch nor bitsandbytes is installed" in str(lion)
    assert find_missing_package("none") is None


@pytest.mark.parametrize(
    ("word", "settings", "why"),
    [
        ("adamx", {}, "'adamx' is not allowed"),
        ("mine.py", {}, "names no function"),
        ("adafactor", {"eps": 1e-8}, "is no setting of"),
        ("muon", {"beta1": 0.9}, "is no setting of"),
        ("none", {"weight_decay": 0.1}, "is no setting of"),
    ],
)
def test_a_word_or_a_setting_that_is_not_there_is_refused(word: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        ActorSpec(optimizer=word, **settings)
