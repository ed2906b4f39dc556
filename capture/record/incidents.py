"""`trouble_rank<rank>_<time>.json`: what went wrong, where, at which step, and which passes were saved for it.

No absolute path of the host is in it and no value of an environment variable that sounds like a secret.
"""

import json
import os
import re
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from capture.file_format.atomic_write import write_atomically
from capture.file_format.capture_file import FORMAT, utc_time
from capture.file_format.micro_batch import CaptureError

MAX_TROUBLE_BYTES = 8 * 2**20
_MAX_TEXT = 20_000
_MAX_FRAMES = 60
_SECRET_NAMES = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_MIN_SECRET_LENGTH = 6  # shorter values are switches
_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|remote (process|peer)|ncclRemoteError|"
    r"peer .*(closed|disconnected)|failed to recv, got 0 bytes",
    re.IGNORECASE,
)
_LIBRARY_FOLDER = re.compile(r"[^\s\"']*/(?:site|dist)-packages/")
_ABSOLUTE_PATH = re.compile(r"(?<![\w./-])(?:/[\w.@+~%-]+)+/([\w.@+~%-]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """what     `exception`, `out of memory`, `not finite`, `signal`, `slow step` or `died`
    where       `forward`, `loss`, `SIGTERM`, ...
    step        the forward that had begun last, or the one whose numbers they are
    files       written for it, by name
    num_unreached  passes of which no copy could be had in time
    """

    what: str
    where: str
    step: int | None
    time: str
    message: str = ""
    traceback: str = ""
    files: Sequence[str] = ()
    num_unreached: int = 0

    @property
    def is_asked_for(self) -> bool:
        return self.what == "signal"

    @property
    def follows_another(self) -> bool:
        """Does it say no more than that another rank is gone?"""
        return self.what == "exception" and _LOST_CONNECTION.search(self.message) is not None


def trouble(what: str, where: str, step: int | None, message: str = "") -> Trouble:
    return Trouble(what=what, where=where, step=step, time=utc_time(), message=scrubbed(message))


def trouble_of(error: BaseException, where: str, step: int | None) -> Trouble:
    """Texts only: an exception holds its frames, and these the job's tensors."""
    is_out_of_memory = type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error)
    lines = traceback.TracebackException.from_exception(error, limit=-_MAX_FRAMES).format()
    found = trouble(
        "out of memory" if is_out_of_memory else "exception", where, step, f"{type(error).__name__}: {error}"
    )
    return replace(found, traceback=scrubbed("".join(lines)))


def is_news_to(listener: int, error: BaseException) -> bool:
    """An exception passes several of a listener's posts on its way; it is news at the first of them."""
    heard_by: set[int] = error.__dict__.setdefault("_heard_by_capture", set())
    if listener in heard_by:
        return False
    heard_by.add(listener)
    return True


def scrubbed(text: str) -> str:
    text = text[-_MAX_TEXT:]
    for name, value in os.environ.items():
        if len(value) >= _MIN_SECRET_LENGTH and _SECRET_NAMES.search(name):
            text = text.replace(value, "***")
    return _ABSOLUTE_PATH.sub(r"\1", _LIBRARY_FOLDER.sub("", text))


def write_troubles(folder: Path, troubles: Sequence[Trouble], *, num_uncounted: int, rank: int, stamp: str) -> None:
    """Raises OSError."""
    content = {
        "format": FORMAT,
        "rank": rank,
        "num_others": num_uncounted,
        "troubles": [asdict(found) for found in troubles],
    }
    write_atomically(folder / f"trouble_rank{rank}_{stamp}.json", json.dumps(content, indent=1).encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class TroubleRecord:
    """One recording's. `num_others` came after them, and nothing was written for these."""

    name: str
    rank: int
    num_others: int
    troubles: list[Trouble] = field(default_factory=list)


def read_troubles(folder: Path) -> list[TroubleRecord]:
    """All of a folder's records, by time of the first trouble. Raises CaptureError for a file that is none."""
    records = [_read(path) for path in sorted(folder.glob("trouble_rank*.json"))]
    return sorted(records, key=lambda record: min((found.time for found in record.troubles), default=""))


def _read(path: Path) -> TroubleRecord:
    try:
        with open(path, "rb") as file:
            content: Any = json.loads(file.read(MAX_TROUBLE_BYTES + 1)[:MAX_TROUBLE_BYTES])
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"{path.name}: cannot be read: {error}. Delete the file or copy it again") from None
    kinds: dict[str, Any] = {
        "what": str,
        "where": str,
        "step": int | None,
        "time": str,
        "message": str,
        "traceback": str,
        "files": list,
        "num_unreached": int,
    }
    assert kinds.keys() == {f.name for f in fields(Trouble)}
    if (
        not isinstance(content, dict)
        or content.get("format") != FORMAT
        or not isinstance(content.get("rank"), int)
        or not isinstance(content.get("num_others"), int)
        or not isinstance(content.get("troubles"), list)
        or not all(
            isinstance(item, dict)
            and item.keys() == kinds.keys()
            and all(isinstance(item[name], kind) for name, kind in kinds.items())
            for item in content["troubles"]
        )
    ):
        raise CaptureError(f"{path.name}: no trouble record of format {FORMAT}. Delete the file or copy it again")
    return TroubleRecord(
        name=path.name,
        rank=content["rank"],
        num_others=content["num_others"],
        troubles=[Trouble(**item) for item in content["troubles"]],
    )
