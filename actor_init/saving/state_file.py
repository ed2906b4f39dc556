"""Save and load what a run resumes from: weights, optimizer, schedule and loss scale in torch's distributed format.

Each rank writes its own shards, and a replica is written once. Beside them, state.json describes the state, and says
whether it can be loaded under other settings:

{"format": 1, "backend": "deepspeed", "zero_stage": 1, "world_size": 2, "tp": 1, ..., "num_steps": 3, ...}
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

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

from actor_init.as_json import from_json
from actor_init.declarations.backends import find_backend_declaration
from actor_init.model import ModelSource, to_plain_config
from actor_init.schedule_and_norm import Progress, load_schedule
from actor_init.spec import ActorSpec, UsageError
from actor_init.world import World
from capture.facts import Setting

# Under tp the optimizer has two parameter groups, else one. State that is saved by parameter fits both.
BY_PARAMETER = StateDictOptions(flatten_optimizer_state_dict=True)


def save_state(
    folder: Path, model: PreTrainedModel, optimizer: Optimizer, schedule: LambdaLR, scaler: GradScaler
) -> None:
    """Save the state. All ranks must call this. Raises what torch raises."""
    parts = _collect_loop_state(schedule, scaler)
    if Progress.from_schedule(schedule).num_steps:
        parts |= _collect_trained_state(model, optimizer)
    else:
        # For an optimizer that never stepped torch would create moments, and count that as its first step.
        parts |= {"model": get_model_state_dict(model)}
    save(parts, checkpoint_id=folder)


def load_state(
    folder: Path, model: PreTrainedModel, optimizer: Optimizer, schedule: LambdaLR, scaler: GradScaler
) -> None:
    """Load what `save_state` wrote. All ranks must call this. Unpickles. Raises what torch raises."""
    parts = _collect_loop_state(schedule, scaler)
    load(parts, checkpoint_id=folder)
    load_schedule(schedule, parts["schedule"])
    if Progress.from_schedule(schedule).num_steps:
        parts = _collect_trained_state(model, optimizer)
        load(parts, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
            options=BY_PARAMETER,
        )
    else:
        # The tensors of the dict are the model's own: they are loaded in place.
        load({"model": get_model_state_dict(model)}, checkpoint_id=folder)


def _collect_loop_state(schedule: LambdaLR, scaler: GradScaler) -> dict[str, Any]:
    return {"schedule": schedule.state_dict(), "scaler": scaler}


def _collect_trained_state(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, Any]:
    values, moments = get_state_dict(model, optimizer, options=BY_PARAMETER)
    return {"model": values, "optimizer": moments}


STATE_FILE = "state.json"
FORMAT = 1
_OTHER_VERSION = "Load it with the version that wrote it"
# Fields that must be the same where a state is loaded, because the libraries' files depend on them.
FIXED_FIELDS = ("backend", "optimizer", "dtype", "learning_rate", "lr_warmup_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """What was trained, for how many steps, by how many ranks, and with which settings.

    num_inputs  those of each data rank, including skipped ones
    model       the model's config
    """

    backend: str
    zero_stage: int
    world_size: int
    tp: int
    ring: int
    dtype: str
    optimizer: str
    learning_rate: float
    lr_warmup_steps: int
    max_norm: float | None
    num_steps: int
    next_learning_rate: float
    num_inputs: int
    model: Mapping[str, object]
    versions: Mapping[str, str | None]

    @classmethod
    def from_actor(
        cls,
        spec: ActorSpec,
        source: ModelSource,
        world: World,
        progress: Progress,
        *,
        num_inputs: int,
        versions: Mapping[str, str | None],
    ) -> Self:
        return cls(
            backend=spec.backend,
            zero_stage=spec.resolved_zero_stage,
            world_size=world.world_size,
            tp=spec.parallel.tp,
            ring=spec.parallel.ring,
            dtype=spec.dtype.value,
            optimizer=spec.optimizer,
            learning_rate=spec.base_rate,
            lr_warmup_steps=spec.lr_warmup_steps,
            max_norm=spec.max_norm,
            num_steps=progress.num_steps,
            next_learning_rate=progress.learning_rate,
            num_inputs=num_inputs,
            model=to_plain_config(source.config),
            versions=versions,
        )

    def write(self, folder: Path) -> None:
        """Write state.json. Raises OSError."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2)
        (folder / STATE_FILE).write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read state.json. Raises UsageError if `folder` is not what --save-state writes."""
        setting = Setting("load_state", folder)
        try:
            values = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is damaged"
            why = f": {STATE_FILE} cannot be read: {reason}"
            advice = f"Give a folder that {Setting('save_state')} wrote"
            raise UsageError(setting, why, advice) from error
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise UsageError(setting, f": {STATE_FILE} is not of format {FORMAT}", _OTHER_VERSION)
        try:
            return from_json(cls, values, source=STATE_FILE)
        except UsageError as error:
            raise UsageError(setting, f": {error.text}", _OTHER_VERSION) from error

    def check(self, folder: Path, spec: ActorSpec, source: ModelSource, world: World) -> None:
        """Raise UsageError, before anything is built, unless this state can be loaded exactly."""
        setting = Setting("load_state", folder)
        current = self.from_actor(spec, source, world, Progress.from_schedule(None), num_inputs=0, versions={})
        state_format = find_backend_declaration(current.backend).state_format
        assert state_format is not None, (
            f"{current.backend} loads no state, and a ReplaySpec that asks for it is refused"
        )
        for name in (*FIXED_FIELDS, *state_format.fixed_fields):
            saved_value, current_value = getattr(self, name), getattr(current, name)
            if saved_value != current_value:
                saved_setting = _describe_setting(name, saved_value)
                why = f"was saved with {saved_setting}, not with {_describe_setting(name, current_value)}"
                weights_alone = f"for its weights alone {Setting('save_model')} there and {Setting('model')} here"
                raise UsageError(setting, why, f"Try: {saved_setting}; or {weights_alone}")
        for key in sorted(self.model.keys() & current.model.keys()):
            if self.model[key] != current.model[key]:
                difference = f"its {key} is {self.model[key]}, and that of {source.name} is {current.model[key]}"
                advice = f"Name its model, with {Setting('model')} and {Setting('num_layers')}"
                raise UsageError(setting, f"is the state of another model: {difference}", advice)
        if obstacle := state_format.find_obstacle(self, world.world_size):
            raise UsageError(setting, obstacle)


def _describe_setting(name: str, value: Any) -> str:
    return f"no {Setting(name)}" if value is None else str(Setting(name, value))
