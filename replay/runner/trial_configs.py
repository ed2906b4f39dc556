"""List the configs that a pass is run again under: those of the job, where they differ from the model folder's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from actor_init.model import find_model
from actor_init.spec import ActorSpec
from replay.verdict.causes.trial import OF_CONFIG

# Of the job's settings each is tried by itself, if they are no more than these.
MAX_SETTINGS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigTrial:
    """A model of the same weights that reads them by another config, as `PretrainedConfig.to_dict` has it."""

    name: str
    values: Mapping[str, Any]
    says: str
    try_next: str


def list_config_trials(
    config: PretrainedConfig, num_layers: int | None, captured: Mapping[str, object], keys: Sequence[str]
) -> Iterator[ConfigTrial]:
    """Yield the config with all settings that the job has otherwise, and, if they are few, with each of them alone.

    config      of the replay's model
    num_layers  that the replay was asked to cut the model to
    captured    the config in the job's actor.json
    keys        the settings in which the two differ, those within others with dots

    A setting with others within it, such as `rope_parameters`, is one: its parts belong together. Raises UsageError if
    the job's config cannot be read here.
    """
    keys = [key for key in keys if key != "model_type"]
    if not keys:
        return
    job_values = find_model(ActorSpec(num_layers=num_layers), captured, "the job").config.to_dict()
    own_values = config.to_dict()
    settings = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    singles = settings if 1 < len(settings) <= MAX_SETTINGS else []
    groups = [keys, *([key for key in keys if key.partition(".")[0] == setting] for setting in singles)]
    for group in groups:
        values: Mapping[str, Any] = own_values
        for key in group:
            values = set_value(values, key, find_value(job_values, key))
        differences = "; ".join(
            f"{key} is {find_value(job_values, key)} in the job, {find_value(own_values, key)} here" for key in group
        )
        yield ConfigTrial(
            name=f"{OF_CONFIG}{', '.join(group)}",
            values=values,
            says=f"the config's {differences}",
            try_next=f"mend {' and '.join(group)} in the job's config, or replay with the job's config.json in --model",
        )


def build_config(trial: ConfigTrial) -> PretrainedConfig:
    """Build the config of a trial. Raises UsageError if transformers refuses it."""
    return find_model(ActorSpec(), trial.values, "a trial").config


def find_value(values: Mapping[str, Any], key: str) -> Any:
    """Find the value of a setting, or of one within others: `rope_parameters.rope_theta`; None where there is none."""
    first, _, rest = key.partition(".")
    value = values.get(first)
    if not rest:
        return value
    return find_value(value, rest) if isinstance(value, dict) else None


def set_value(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return the values with another one of `key`; what is None within others is left out."""
    first, _, rest = key.partition(".")
    if not rest:
        return {**values, first: value}
    inner = set_value(values.get(first) or {}, rest, value)
    return {**values, first: {name: value for name, value in inner.items() if value is not None}}
