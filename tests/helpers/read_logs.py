"""Read a log as it stands on disk."""

import json
from pathlib import Path
from typing import Any

from replay.runlog.reader import read_records
from replay.runlog.records import PassRecord


def read_log(folder: Path) -> tuple[dict[str, Any], list[PassRecord]]:
    """run.json as any reader of JSON sees it, and all ranks' records, by pass and rank."""
    run: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return run, read_records(folder)
