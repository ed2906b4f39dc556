"""Write and read `actor.json`, the model's config beside the captures of a folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capture.file_format.atomic_write import read_bytes, write_atomically
from capture.file_format.capture_file import FORMAT, other_format
from capture.file_format.folder_layout import ACTOR_CONFIG_NAME, top_of
from capture.file_format.micro_batch import CaptureError

MAX_ACTOR_CONFIG_BYTES = 4 * 2**20


def write_actor_config(folder: str | Path, config: Mapping[str, Any], model_name: str | None) -> Path:
    """Write `actor.json`. Ranks that do so at the same time leave one whole file of theirs. Raises OSError.

    What JSON does not know, such as a dtype, is written as text.
    """
    content = {"format": FORMAT, "model_name": model_name, "config": dict(config)}
    path = Path(folder) / ACTOR_CONFIG_NAME
    write_atomically(path, json.dumps(content, indent=1, default=str).encode())
    return path


def read_actor_config(folder: str | Path) -> dict[str, Any] | None:
    """Read the config as the model's `config.to_dict()` gave it; None without an `actor.json`.

    A rank's folder has its config in the folder above.

    Raises CaptureError if the file holds no config.
    """
    path = top_of(Path(folder)) / ACTOR_CONFIG_NAME
    if not path.exists():
        return None
    try:
        content = json.loads(read_bytes(path, MAX_ACTOR_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(f"{path}: not JSON ({error}). Name the model instead, with --model") from None
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise CaptureError(f"{path}: no object with a `config`. Name the model instead, with --model")
    if content.get("format") != FORMAT:
        raise CaptureError(other_format(str(path), content.get("format")))
    config: dict[str, Any] = content["config"]
    return config
