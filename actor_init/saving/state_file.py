"""Read and write state.json, which describes a state folder, and check whether it can be loaded here.

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
from actor_init.declarations.backends import find_declaration
from actor_init.model import ModelSource, strip_config
from actor_init.optimizer import Progress, load_schedule
from actor_init.spec import ActorSpec, UsageError
from actor_init.world import World
from capture.facts import Setting

# Save resumable state in torch's distributed checkpoint format: each rank its own shards, a replica once.

# under tp the optimizer has two parameter groups, else one: state saved by parameter fits both
BY_PARAMETER = StateDictOptions(flatten_optimizer_state_dict=True)


def save_state(
    folder: Path, model: PreTrainedModel, optimizer: Optimizer, schedule: LambdaLR, scaler: GradScaler
) -> None:
    """Save the state. All ranks must call this. Raises what torch raises."""
    parts = _collect_loop_state(schedule, scaler)
    if Progress.from_schedule(schedule).num_steps:
        parts |= _collect_trained_state(model, optimizer)
    else:  # torch would create moments for an optimizer that never stepped, and count that as its first step
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
        load({"model": get_model_state_dict(model)}, checkpoint_id=folder)  # in place


def _collect_loop_state(schedule: LambdaLR, scaler: GradScaler) -> dict[str, Any]:
    return {"schedule": schedule.state_dict(), "scaler": scaler}


def _collect_trained_state(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, Any]:
    values, moments = get_state_dict(model, optimizer, options=BY_PARAMETER)
    return {"model": values, "optimizer": moments}


STATE_FILE = "state.json"
FORMAT = 1
_OTHER_VERSION = "Load it with the version that wrote it"
FIXED_FIELDS = (
    "backend",
    "optimizer",
    "dtype",
    "learning_rate",
    "lr_warmup_steps",
)  # what the libraries' files depend on


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """What was trained, for how many steps, by how many ranks, and with which settings."""

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
    num_inputs: int  # on each data rank, including skipped ones
    model: Mapping[str, object]  # the model's config
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
            optimizer=spec.optimizer.value,
            learning_rate=spec.learning_rate,
            lr_warmup_steps=spec.lr_warmup_steps,
            max_norm=spec.max_norm,
            num_steps=progress.num_steps,
            next_learning_rate=progress.learning_rate,
            num_inputs=num_inputs,
            model=strip_config(source.config),
            versions=versions,
        )

    def write(self, folder: Path) -> None:
        """Write state.json. Raises OSError."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2)
        (folder / STATE_FILE).write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read state.json. Raises UsageError if `folder` is not what --save-state writes."""
        given = Setting("load_state", folder)
        try:
            values = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is damaged"
            why = f": {STATE_FILE} cannot be read: {reason}"
            advice = f"Give a folder that {Setting('save_state')} wrote"
            raise UsageError(given, why, advice) from error
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise UsageError(given, f": {STATE_FILE} is not of format {FORMAT}", _OTHER_VERSION)
        try:
            return from_json(cls, values, source=STATE_FILE)
        except UsageError as error:
            raise UsageError(given, f": {error.text}", _OTHER_VERSION) from error

    def check(self, folder: Path, spec: ActorSpec, source: ModelSource, world: World) -> None:
        """Raise UsageError, before anything is built, unless this state can be loaded exactly."""
        given = Setting("load_state", folder)
        here = self.from_actor(spec, source, world, Progress.from_schedule(None), num_inputs=0, versions={})
        states = find_declaration(here.backend).state_format
        assert states is not None, f"{here.backend} loads no state, and a ReplaySpec that asks for it is refused"
        for name in (*FIXED_FIELDS, *states.fixed_fields):
            saved, asked = getattr(self, name), getattr(here, name)
            if saved != asked:
                why = f"was saved with {_describe_setting(name, saved)}, not with {_describe_setting(name, asked)}"
                weights_alone = f"for its weights alone {Setting('save_model')} there and {Setting('model')} here"
                raise UsageError(given, why, f"Try: {_describe_setting(name, saved)}; or {weights_alone}")
        for key in sorted(self.model.keys() & here.model.keys()):
            if self.model[key] != here.model[key]:
                theirs = f"its {key} is {self.model[key]}, and that of {source.name} is {here.model[key]}"
                advice = f"Name its model, with {Setting('model')} and {Setting('num_layers')}"
                raise UsageError(given, f"is the state of another model: {theirs}", advice)
        if complaint := states.find_obstacle(self, world.world_size):
            raise UsageError(given, complaint)


def _describe_setting(name: str, value: Any) -> str:
    return f"no {Setting(name)}" if value is None else str(Setting(name, value))
