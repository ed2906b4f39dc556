"""Write and read `actor.json`, the model's config beside the captures of a folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, cast

from capture.facts import Setting
from capture.file_format.atomic_write import read_bytes, write_atomically
from capture.file_format.capture_file import FORMAT, describe_other_format
from capture.file_format.folder_layout import ACTOR_CONFIG_NAME, strip_rank_folder
from capture.file_format.micro_batch import CaptureError

MAX_ACTOR_CONFIG_BYTES = 4 * 2**20


class _Content(TypedDict, total=False):
    """The file's object. `_read_content` has checked that `format` and `config` are in it."""

    format: int
    model_name: str | None
    config: dict[str, object]
    adapters: object
    frozen: object
    parameters: object


def write_actor_config(
    folder: str | Path,
    config: Mapping[str, object],
    model_name: str | None,
    adapters: Mapping[str, Mapping[str, object]] | None = None,
    frozen: Sequence[str] = (),
    parameters: Sequence[str] = (),
) -> Path:
    """Write `actor.json`. Ranks that do so at the same time leave one whole file of theirs. Raises OSError.

    What JSON does not know, such as a dtype, is written as text.

    adapters  configs of PEFT's adapters by name; None without any
    frozen    names of the parameters that are not trained, where no adapter says so
    parameters  names of all parameters, in the order in which an optimizer's step numbers them
    """
    content: _Content = {"format": FORMAT, "model_name": model_name, "config": dict(config)}
    if adapters:
        content["adapters"] = {name: dict(adapter) for name, adapter in adapters.items()}
    if frozen:
        content["frozen"] = list(frozen)
    if parameters:
        content["parameters"] = list(parameters)
    path = Path(folder) / ACTOR_CONFIG_NAME
    write_atomically(path, json.dumps(content, indent=1, default=str).encode())
    return path


def read_actor_config(folder: str | Path) -> dict[str, object] | None:
    """Read the config as the model's `config.to_dict()` gave it; None without an `actor.json`.

    A rank's folder has its config in the folder above.

    Raises CaptureError if the file holds no config.
    """
    content = _read_content(folder)
    return None if content is None else content["config"]


def read_adapter_configs(folder: str | Path) -> dict[str, dict[str, object]]:
    """Read the configs of the model's adapters by name; none without an `actor.json`.

    Raises CaptureError as `read_actor_config` does, and for adapters that are none.
    """
    content = _read_content(folder)
    adapters = {} if content is None else content.get("adapters", {})
    if not isinstance(adapters, dict) or not all(isinstance(adapter, dict) for adapter in adapters.values()):
        raise CaptureError(f"{Path(folder) / ACTOR_CONFIG_NAME}: `adapters` holds no configs by name")
    return adapters


def read_frozen_names(folder: str | Path) -> list[str]:
    """Read the names of the parameters that the job did not train; none where the file does not say.

    Raises CaptureError as `read_actor_config` does, and for names that are none.
    """
    content = _read_content(folder)
    return _check_names(folder, "frozen", [] if content is None else content.get("frozen", []))


def read_parameter_names(folder: str | Path) -> list[str]:
    """Read the names of the job's parameters in their order; none where the file does not say.

    Raises CaptureError as `read_actor_config` does, and for names that are none.
    """
    content = _read_content(folder)
    return _check_names(folder, "parameters", [] if content is None else content.get("parameters", []))


def _check_names(folder: str | Path, key: str, names: object) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CaptureError(f"{Path(folder) / ACTOR_CONFIG_NAME}: `{key}` is no list of names")
    return names


def _read_content(folder: str | Path) -> _Content | None:
    """Read and check the file's object; None without an `actor.json`. Raises CaptureError."""
    path = strip_rank_folder(Path(folder)) / ACTOR_CONFIG_NAME
    if not path.exists():
        return None
    advice = f"Name the model instead, with {Setting('model')}"
    try:
        content = json.loads(read_bytes(path, MAX_ACTOR_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(path, f": not JSON ({error})", advice) from None
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise CaptureError(path, ": no object with a `config`", advice)
    if content.get("format") != FORMAT:
        raise CaptureError(describe_other_format(str(path), content.get("format")))
    return cast(_Content, content)
