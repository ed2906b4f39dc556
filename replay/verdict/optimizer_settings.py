"""Compare the optimizer that a job stepped with to the one that --step steps with."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actor_init.spec import ActorSpec, OptimizerName
from capture.file_format.optimizer_step import OptimizerStep

ADAMW = ("AdamW", "FusedAdam", "DeepSpeedCPUAdam")
LABELS = {"lr": "learning rate", "weight_decay": "weight decay"}
# Torch's defaults: a setting that one side does not know is off.
OFF = {"amsgrad": False, "maximize": False, "nesterov": False, "dampening": 0, "momentum": 0}


def list_setting_differences(
    step: OptimizerStep, spec: ActorSpec, number: int, norms: tuple[float | None, float | None] | None = None
) -> list[str]:
    """List how the job's step differs from the replay's step `number`, as `weight decay 10 in the job, 0.01 here`.

    Settings that the job's optimizer does not have are passed over.

    norms  of the gradient in the job and here, as far as they are known; None: the replay's will be the job's
    """
    if step.optimizer is None:
        return ["the job's optimizer was not recorded"]
    family = ADAMW if spec.optimizer is OptimizerName.ADAMW else ("SGD",)
    if step.optimizer not in family:
        return [f"{step.optimizer} in the job, {family[0]} here"]
    replay_settings = {**OFF, **spec.optimizer_settings}
    if number < spec.lr_warmup_steps:
        replay_settings["lr"] = spec.learning_rate * number / spec.lr_warmup_steps
    texts = dict.fromkeys(text for group in step.settings for text in _compare_group(group, replay_settings))
    differences = list(texts)
    if number == 0 and step.has_state:
        differences.append("moments of steps before in the job, none here")
    if (step.max_norm or None) != (spec.max_norm or None) and _may_clip(step, spec, norms):
        differences.append(
            f"clipped to {_format_value(step.max_norm)} in the job, to {_format_value(spec.max_norm)} here"
        )
    return differences


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


def _compare_group(group: Mapping[str, Any], replay_settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences of one of the job's parameter groups."""
    for name, replay_value in replay_settings.items():
        job_value = group.get(name, OFF.get(name, replay_value))
        if not _is_same(job_value, replay_value):
            yield f"{LABELS.get(name, name)} {_format_value(job_value)} in the job, {_format_value(replay_value)} here"


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Sequence) and isinstance(other, Sequence):
        return len(value) == len(other) and all(_is_same(a, b) for a, b in zip(value, other, strict=True))
    if isinstance(value, int | float) and isinstance(other, int | float):
        return math.isclose(value, other, rel_tol=1e-6, abs_tol=1e-30)
    return bool(value == other)


def _format_value(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"({', '.join(map(_format_value, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)
