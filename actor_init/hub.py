"""Find the folder of a model or an adapter that is named by its id on the Hugging Face Hub."""

import re
from functools import cache
from pathlib import Path

from actor_init.spec import UsageError
from capture.facts import Setting

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# What a model, its tokenizer or an adapter is read from; weights in other formats stay there.
FILES = ("*.json", "*.safetensors", "*.model", "*.txt")


def names_hub(typed: str) -> bool:
    """Is it an id such as `Qwen/Qwen3-0.6B`? A path is none: one that exists, or that lies in a folder that does."""
    path = Path(typed)
    return HUB_ID.fullmatch(typed) is not None and not path.parent.exists() and path.suffix not in (".json", ".py")


def find_folder(setting: Setting) -> Path:
    """Return the path that a setting names, or the folder of the Hub's cache, filled where the network has the id.

    Raises UsageError where neither has it.
    """
    typed = str(setting.value)
    if not names_hub(typed):
        return Path(typed)
    from huggingface_hub import constants

    try:
        return _fetch(typed, constants.HF_HUB_CACHE)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        tried = f"not a folder here, not in the cache {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} says: {reason}"
        raise UsageError(setting, f": {tried}", "Try: a folder, or HF_TOKEN for an id that needs it") from error


# Asked before a run begins and where its model is built: the network is asked once.
@cache
def _fetch(hub_id: str, folder: str) -> Path:
    """Return the folder of an id in the Hub's cache `folder`."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(hub_id, cache_dir=folder, allow_patterns=list(FILES)))
