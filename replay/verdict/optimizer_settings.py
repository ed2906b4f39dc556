"""Compare the optimizer that a job stepped with to the one that --step steps with."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actor_init.spec import ActorSpec, OptimizerName
from capture.file_format.optimizer_step import OptimizerStep

ADAMW = ("AdamW", "FusedAdam", "DeepSpeedCPUAdam")
LABELS = {"lr": "learning rate", "weight_decay": "weight decay"}
OFF = {"amsgrad": False, "maximize": False, "nesterov": False, "dampening": 0, "momentum": 0}  # torch's defaults


def differences(step: OptimizerStep, spec: ActorSpec, number: int) -> list[str]:
    """List how the job's step differs from the replay's step `number`, as `weight decay 10 in the job, 0.01 here`.

    Empty where nothing does; settings that the job's optimizer does not have are passed over.
    """
    if step.optimizer is None:
        return ["the job's optimizer was not recorded"]
    family = ADAMW if spec.optimizer is OptimizerName.ADAMW else ("SGD",)
    if step.optimizer not in family:
        return [f"{step.optimizer} in the job, {family[0]} here"]
    ours = {**OFF, **spec.optimizer_settings}
    if number < spec.lr_warmup_steps:
        ours["lr"] = spec.learning_rate * number / spec.lr_warmup_steps
    differing = list(dict.fromkeys(said for group in step.settings for said in _of_group(group, ours)))
    if number == 0 and step.has_state:
        differing.append("moments of steps before in the job, none here")
    theirs = step.max_norm
    if (theirs or None) != (spec.max_norm or None):
        differing.append(f"clipped to {_shown(theirs)} in the job, to {_shown(spec.max_norm)} here")
    return differing


def _of_group(group: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    for name, here in ours.items():
        there = group.get(name, OFF.get(name, here))
        if not _same(there, here):
            yield f"{LABELS.get(name, name)} {_shown(there)} in the job, {_shown(here)} here"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Sequence) and isinstance(other, Sequence):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-30)
    return bool(one == other)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"({', '.join(map(_shown, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)
