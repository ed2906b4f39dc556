"""Compare the optimizer that a job stepped with to the one that --step steps with."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actor_init.spec import ActorSpec, OptimizerName
from capture.file_format.optimizer_step import OptimizerStep

ADAMW = ("AdamW", "FusedAdam", "DeepSpeedCPUAdam")
LABELS = {"lr": "learning rate", "weight_decay": "weight decay"}
OFF = {"amsgrad": False, "maximize": False, "nesterov": False, "dampening": 0, "momentum": 0}  # torch's defaults


def differences(
    step: OptimizerStep, spec: ActorSpec, number: int, norms: tuple[float | None, float | None] | None = None
) -> list[str]:
    """List how the job's step differs from the replay's step `number`, as `weight decay 10 in the job, 0.01 here`.

    Empty where nothing does; settings that the job's optimizer does not have are passed over.

    norms  of the gradient in the job and here, as far as they are known; None: the replay's will be the job's
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
    if (step.max_norm or None) != (spec.max_norm or None) and not _neither_clips(step, spec, norms):
        differing.append(f"clipped to {_shown(step.max_norm)} in the job, to {_shown(spec.max_norm)} here")
    return differing


def _neither_clips(step: OptimizerStep, spec: ActorSpec, norms: tuple[float | None, float | None] | None) -> bool:
    """Tell whether both limits are above the gradient's norm, so that neither changes the step."""
    there, here = (None if step.is_part_of_norm else step.grad_norm,) * 2 if norms is None else norms
    if step.num_clipped is not None:
        there = None  # of some parameters alone, perhaps the first of several clippings
    return not _clips(step.max_norm, there) and not _clips(spec.max_norm, here)


def _clips(max_norm: float | None, norm: float | None) -> bool:
    """Tell whether a limit changes a gradient of this norm; where that is not known, every finite one may."""
    if not max_norm or max_norm == math.inf:
        return False
    return norm is None or not norm <= max_norm


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
