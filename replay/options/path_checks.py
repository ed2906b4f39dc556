"""Check what was typed as files and folders before anything heavy is imported: torch and transformers take seconds."""

from pathlib import Path

import actor_init
from actor_init.hub import find_folder, names_hub
from actor_init.spec import UsageError
from capture.facts import Setting
from replay.options.spec import USER_LOSS_PATTERN, ReplaySpec, check_inputs

PRESETS = Path(actor_init.__file__).parent / "presets"
# In a folder for --model one of these says which model it is. A rank's folder has its recording's in the folder above.
CONFIG_NAMES = ("config.json", "adapter_config.json", "actor.json", "../actor.json")
ADVICE = {
    "adapter": "Give a folder with adapter_config.json, as PEFT's save_pretrained writes it, or none",
    "load_state": f"Give a folder that {Setting('save_state')} wrote",
}


def check_paths(spec: ReplaySpec) -> None:
    """Raise UsageError for an option that names a file or folder which is not there, or a folder without a model."""
    check_inputs(spec.inputs)
    for flag, typed, path in list_file_options(spec):
        setting = Setting(flag.removeprefix("--").replace("-", "_"), typed)
        if setting.name in ("model", "adapter") and names_hub(typed):
            find_folder(setting)
        elif setting.name == "model":
            _check_model(setting, path)
        elif not path.exists():
            raise UsageError(
                setting, f": no such file or folder: {path}", ADVICE.get(setting.name, "Give one that is here")
            )
        elif setting.name == "adapter" and not (path / "adapter_config.json").is_file():
            raise UsageError(setting, "holds no adapter_config.json", ADVICE["adapter"])


def _check_model(setting: Setting, path: Path) -> None:
    if (PRESETS / f"{path}.json").is_file():
        return
    presets = ", ".join(sorted(preset.stem for preset in PRESETS.glob("*.json")))
    advice = f"Allowed: {presets}, a folder with config.json, a config.json, or FILE.py:function"
    if not path.exists():
        raise UsageError(setting, f": no such file or folder: {path}", advice)
    if path.is_dir() and not any((path / name).is_file() for name in CONFIG_NAMES):
        raise UsageError(setting, "holds no config.json", advice)


def list_file_options(spec: ReplaySpec) -> list[tuple[str, str, Path]]:
    """Return the options that name files: flag, value and path."""
    loss, model = USER_LOSS_PATTERN.fullmatch(spec.measure.loss), spec.actor.custom_model
    options = [("--loss", spec.measure.loss, Path(loss["file"]))] if loss else []
    if spec.actor.model is not None:
        options.append(("--model", spec.actor.model, model[0] if model else Path(spec.actor.model)))
    if spec.actor.custom_optimizer is not None:
        options.append(("--optimizer", spec.actor.optimizer, spec.actor.custom_optimizer[0]))
    for flag, path in (
        ("--weights", spec.actor.weights),
        ("--adapter", spec.actor.adapter and spec.actor.adapter != "none" and Path(spec.actor.adapter)),
        ("--deepspeed-config", spec.actor.deepspeed_config),
        ("--load-state", spec.state.load_state),
        ("--optimizer-state", spec.state.optimizer_state),
    ):
        if path:
            options.append((flag, str(path), path))
    return options
