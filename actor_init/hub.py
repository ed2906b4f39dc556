"""Find the folder of a model or an adapter that is named by its id on the Hugging Face Hub."""

import re
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
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(typed, allow_patterns=list(FILES)))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        tried = f"not a folder here, not in the cache {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} says: {reason}"
        raise UsageError(setting, f": {tried}", "Try: a folder, or HF_TOKEN for an id that needs it") from error
