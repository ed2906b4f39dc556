"""Load the function that --loss FILE.py:FUNCTION names. It is the user's own code: nothing of a capture is run."""

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actor_init.spec import UsageError
from replay.report.text import one_line
from replay.spec import USER_LOSS


def load(loss: str) -> tuple[Callable[[Any], Any], str]:
    """Return the function, and the file's SHA-256. Raises UsageError for a file or function that is not there."""
    named = USER_LOSS.fullmatch(loss)
    assert named is not None
    path = Path(named["file"])
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--loss {loss}: {path}: {error.strerror}. Give FILE.py:FUNCTION") from error
    spec = importlib.util.spec_from_file_location(f"replayed_loss_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"--loss {loss}: {path} raised {type(error).__name__}: {one_line(str(error))}") from error
    function = getattr(module, named["function"], None)
    if not callable(function):
        there = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise UsageError(
            f"--loss {loss}: {path} has no function {named['function']}; it has {', '.join(there) or 'none'}"
        )
    return function, hashlib.sha256(source).hexdigest()
