"""Check what was typed as files and folders before anything heavy is imported: torch and transformers take seconds."""

from pathlib import Path

from actor_init.hub import find_folder, names_hub
from actor_init.option_values import MODEL_ADVICE, PRESET_NAMES
from actor_init.spec import UsageError
from capture.facts import Setting
from replay.options.spec import USER_LOSS_PATTERN, ReplaySpec, check_inputs, check_working_folder

# In a folder for --model one of these says which model it is. A rank's folder has its recording's in the folder above.
CONFIG_NAMES = ("config.json", "adapter_config.json", "actor.json", "../actor.json")
ADVICE = {
    "adapter": "Give a folder with adapter_config.json, as PEFT's save_pretrained writes it, or none",
    "load_state": f"Give a folder that {Setting('save_state')} wrote",
}


def check_paths(spec: ReplaySpec) -> None:
    """Raise UsageError for an option that names a file or folder which is not there, or a folder without a model."""
    check_working_folder()
    check_inputs(spec.inputs)
    for setting, path in list_file_options(spec):
        if setting.name in ("model", "adapter") and names_hub(setting.value):
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
    if setting.value in PRESET_NAMES:
        return
    if not path.exists():
        raise UsageError(setting, f": no such file or folder: {path}", MODEL_ADVICE)
    if path.is_dir() and not any((path / name).is_file() for name in CONFIG_NAMES):
        raise UsageError(setting, "holds no config.json", MODEL_ADVICE)


def list_file_options(spec: ReplaySpec) -> list[tuple[Setting, Path]]:
    """Return the settings that name files or folders, each with what was typed, and the path in that."""
    loss, model = USER_LOSS_PATTERN.fullmatch(spec.measure.loss), spec.actor.custom_model
    options = [(Setting("loss", spec.measure.loss), Path(loss["file"]))] if loss else []
    if spec.actor.model is not None:
        options.append((Setting("model", spec.actor.model), model[0] if model else Path(spec.actor.model)))
    if spec.actor.custom_optimizer is not None:
        options.append((Setting("optimizer", spec.actor.optimizer), spec.actor.custom_optimizer[0]))
    for name, path in (
        ("weights", spec.actor.weights),
        ("adapter", spec.actor.adapter and spec.actor.adapter != "none" and Path(spec.actor.adapter)),
        ("deepspeed_config", spec.actor.deepspeed_config),
        ("load_state", spec.state.load_state),
        ("optimizer_state", spec.state.optimizer_state),
    ):
        if path:
            options.append((Setting(name, str(path)), path))
    return options
