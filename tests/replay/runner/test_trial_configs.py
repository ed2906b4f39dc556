"""Which configs a pass is run again under."""

from typing import Any

from transformers import LlamaConfig

from replay.runner.trial_configs import build_config, find_value, list_config_trials, set_value

CONFIG = LlamaConfig(vocab_size=64, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, rms_norm_eps=1e-6)


def make_captured(**changes: Any) -> dict[str, Any]:
    return {**CONFIG.to_dict(), **changes}


def test_a_setting_within_another_is_found_and_set() -> None:
    values = {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}, "eps": 2.0}

    assert find_value(values, "rope_parameters.rope_theta") == 1.0
    assert find_value(values, "rope_parameters.factor") is None
    assert find_value(values, "eps.inner") is None
    changed = set_value(values, "rope_parameters.rope_theta", 5.0)
    assert changed == {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "eps": 2.0}
    # What the job does not have is not there, rather than None.
    assert set_value(values, "rope_parameters.rope_theta", None)["rope_parameters"] == {"rope_type": "default"}
    assert values["rope_parameters"] == {"rope_type": "default", "rope_theta": 1.0}


def test_one_setting_is_one_trial() -> None:
    [trial] = list_config_trials(CONFIG, None, make_captured(rms_norm_eps=1e-3), ["rms_norm_eps"])

    assert trial.name == "config: rms_norm_eps"
    assert trial.says == "the config's rms_norm_eps is 0.001 in the job, 1e-06 here"
    assert build_config(trial).rms_norm_eps == 1e-3
    assert build_config(trial).hidden_size == 16


def test_several_settings_are_tried_together_and_each_alone() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    captured = make_captured(rms_norm_eps=1e-3, rope_parameters=rope)
    keys = ["rms_norm_eps", "rope_parameters.rope_type", "rope_parameters.factor"]

    trials = list(list_config_trials(CONFIG, None, captured, keys))

    # The parts of rope's settings belong together: transformers refuses one without the other.
    assert [trial.name for trial in trials] == [
        f"config: {', '.join(keys)}",
        "config: rms_norm_eps",
        "config: rope_parameters.rope_type, rope_parameters.factor",
    ]
    assert build_config(trials[1]).rope_parameters["rope_type"] == "default"
    assert build_config(trials[2]).rope_parameters["factor"] == 2.0


def test_another_kind_of_model_is_no_trial() -> None:
    assert not list(list_config_trials(CONFIG, None, make_captured(), ["model_type"]))
