"""Declare what a user's own function, --optimizer FILE.py:function, is given: the settings that options can set."""

from collections.abc import Mapping
from typing import Any

from actor_init.declarations.optimizers.declaration import GroupSetting, OptimizerDeclaration

USER_FUNCTION = OptimizerDeclaration(
    option_value="FILE.py:function",
    engine=(),
    settings=(
        GroupSetting(name="betas", default=(None, None), options=("beta1", "beta2")),
        *(GroupSetting(name=name, default=None, options=(name,)) for name in ("eps", "weight_decay", "momentum")),
    ),
)


def drop_unknown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that have a value: the job's group had them, or all of them was typed."""
    return {
        name: value
        for name, value in settings.items()
        if value is not None and not (isinstance(value, tuple) and None in value)
    }


def spell_by_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings by the names that the function knows, those of the options: `beta1` and `beta2`."""
    spelled = {"lr": settings["lr"]}
    for setting in USER_FUNCTION.settings:
        if setting.name in settings:
            value = settings[setting.name]
            spelled.update(zip(setting.options, value if len(setting.options) > 1 else (value,), strict=False))
    return spelled
