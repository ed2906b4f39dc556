"""Keep what `replay worst` knows in `logs/<time>-worst/worst.json`, written whenever it knows more.

{"format": 1, "command": "replay worst --inputs inputs/my-run", "rows": "packed", "memory": {...},
 "measured": [{"number": 4, "source": "a.pkl", "seconds": {"forward": 0.01}, "peaks": {"forward": 1000}}],
 "error": {...}, "fits": {...}, "ranking": [{"number": 7, "source": "b.pkl", ...}], "others": [...], "checked": {...}}

Seconds and bytes. `ranking` holds all inputs, the slowest first.
"""

from pathlib import Path
from typing import Any

from actor_init.as_json import json_bytes, to_json
from capture.file_format.atomic_write import write_atomically

FORMAT = 1
FILE = "worst.json"


class WorstLog:
    def __init__(self, folder: Path, **known: Any) -> None:
        self.folder = folder
        self._known: dict[str, Any] = {"format": FORMAT}
        self.add(**known)

    def add_to(self, name: str, entry: Any) -> None:
        """Append to a list."""
        self.add(**{name: [*self._known.get(name, []), to_json(entry)]})

    def add(self, **known: Any) -> None:
        self._known |= {name: to_json(value) for name, value in known.items()}
        write_atomically(self.folder / FILE, json_bytes(self._known))
