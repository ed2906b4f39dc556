"""Save resumable state in torch's distributed checkpoint format: each rank its own shards, a replica once."""

from pathlib import Path
from typing import Any

from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from actor_init.optimizer import Progress, load_schedule

# under tp the optimizer has two parameter groups, else one: state saved by parameter fits both
BY_PARAMETER = StateDictOptions(flatten_optimizer_state_dict=True)


def save_state(
    folder: Path, model: PreTrainedModel, optimizer: Optimizer, schedule: LambdaLR, scaler: GradScaler
) -> None:
    """Save the state. All ranks must call this. Raises what torch raises."""
    parts = _loop_state(schedule, scaler)
    if Progress.of(schedule).num_steps:
        parts |= _trained_state(model, optimizer)
    else:  # torch would create moments for an optimizer that never stepped, and count that as its first step
        parts |= {"model": get_model_state_dict(model)}
    save(parts, checkpoint_id=folder)


def load_state(
    folder: Path, model: PreTrainedModel, optimizer: Optimizer, schedule: LambdaLR, scaler: GradScaler
) -> None:
    """Load what `save_state` wrote. All ranks must call this. Unpickles. Raises what torch raises."""
    parts = _loop_state(schedule, scaler)
    load(parts, checkpoint_id=folder)
    load_schedule(schedule, parts["schedule"])
    if Progress.of(schedule).num_steps:
        parts = _trained_state(model, optimizer)
        load(parts, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
            options=BY_PARAMETER,
        )
    else:
        load({"model": get_model_state_dict(model)}, checkpoint_id=folder)  # in place


def _loop_state(schedule: LambdaLR, scaler: GradScaler) -> dict[str, Any]:
    return {"schedule": schedule.state_dict(), "scaler": scaler}


def _trained_state(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, Any]:
    values, moments = get_state_dict(model, optimizer, options=BY_PARAMETER)
    return {"model": values, "optimizer": moments}
