"""Compare two logs of one replay value by value, as they are written in the JSON.

A value's path is the file, the number of its line, and the keys down to it: `rank0.jsonl/2/phases/forward/seconds`.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Mask(NamedTuple):
    """What legitimately differs between two runs of one tree. `*` in a path stands for any one part of it."""

    path: str  # of a value, or of all that is below it
    reason: str
    is_there: bool = True  # only the value is hidden: one that is missing, or of another kind, differs


PLACE = ("value", "index", "source", "rank")
TIME = "time that something took on this machine"
MEMORY = "memory of the process, which depends on what the allocator and the system did before"
MASKS: Sequence[Mask] = (
    *(Mask(f"rank*.jsonl/*/{name}", TIME) for name in ("seconds", "wait_seconds", "compile_seconds")),
    Mask("rank*.jsonl/*/phases/*/seconds", TIME),
    *(Mask(f"rank*.jsonl/*/phases/*/{name}", MEMORY) for name in ("allocated_bytes", "peak_allocated_bytes")),
    Mask("run.json/started", "when it was"),
    Mask("run.json/seconds", TIME),
    *(Mask(f"run.json/statistics/{name}", TIME) for name in ("median_seconds", "p95_seconds", "iqr_seconds")),
    *(Mask(f"run.json/statistics/phases/*/{name}", TIME) for name in ("median_seconds", "p95_seconds", "iqr_seconds")),
    Mask("run.json/statistics/phases/*/peak_allocated_bytes", MEMORY),
    *(Mask(f"run.json/statistics/slowest/{name}", f"{TIME}: another pass may be the slowest") for name in PLACE),
    *(Mask(f"run.json/statistics/highest_peak/{name}", f"{MEMORY}: another pass may have it") for name in PLACE),
    *(Mask(f"run.json/statistics/{name}", f"a share of {TIME}") for name in ("padding_time_share", "wait_share")),
    Mask("run.json/statistics/real_tokens_per_second", TIME),
    *(Mask(f"run.json/profile/ranks/*/{name}", TIME) for name in ("seconds", "seconds_by_work", "collective_seconds")),
    Mask("run.json/profile/ranks/*/longest", f"{TIME}: which kernels are the longest", is_there=False),
    Mask("run.json/format", "goes up where a reader of logs would be misled, as by a key's other name"),
    Mask("run.json/versions/micro-replay", "goes up with a release"),
)
# Where the tree at hand calls a key by another name than BASE: path in BASE, path here. `*` stands for what it stood for.
RENAMES: Sequence[tuple[str, str]] = ()


class Difference(NamedTuple):
    path: str
    base: str | None  # as JSON; None where there is no such value
    here: str | None


class Comparison(NamedTuple):
    num_compared: int
    differences: Sequence[Difference]

    @property
    def is_same(self) -> bool:
        """Nothing differs, and something was there to differ."""
        return self.num_compared > 0 and not self.differences


def compare(
    base: Mapping[str, Any],
    here: Mapping[str, Any],
    masks: Sequence[Mask] = MASKS,
    renames: Sequence[tuple[str, str]] = RENAMES,
) -> Comparison:
    """Compare two runs, each as its JSON by the file's name."""
    renamed = {_renamed(path, renames): value for path, value in values_of(base)}
    sides = [_unmasked(values, masks) for values in (renamed, dict(values_of(here)))]
    paths = dict.fromkeys([*sides[0], *sides[1]])
    found = [Difference(path, sides[0].get(path), sides[1].get(path)) for path in paths]
    num_hidden = sum((one.here or one.base or "").startswith(_HIDDEN) for one in found)
    return Comparison(len(found) - num_hidden, [one for one in found if one.base != one.here])


def values_of(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that has none below it, with its path; a mapping or list without any is a value, too."""
    below = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else None
    if path and (below is None or not tree):
        yield path, tree
    for name, value in below or ():
        yield from values_of(value, f"{path}/{name}" if path else str(name))


def read_run(folder: Path) -> dict[str, Any]:
    """Read the JSON of the log in `folder`, and digests of the tensors beside it, by the file's name."""
    tree: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".json":
            tree[name] = json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            tree[name] = [json.loads(line) for line in path.read_text().splitlines()]
        elif path.suffix == ".safetensors":
            tree[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return tree


_KINDS = {str: "text", int: "number", float: "number", bool: "boolean", type(None): "null", dict: "{}", list: "[]"}
_HIDDEN = "hidden "  # before a kind; no JSON begins so


def _unmasked(values: Mapping[str, Any], masks: Sequence[Mask]) -> dict[str, str]:
    """Return values as JSON; of those whose value alone is masked the kind."""
    kept = {}
    for path, value in values.items():
        mask = next((mask for mask in masks if _pattern(mask.path).match(path)), None)
        if mask is None:
            kept[path] = json.dumps(value)
        elif mask.is_there:
            kept[path] = _HIDDEN + _KINDS[type(value)]
    return kept


def _renamed(path: str, renames: Sequence[tuple[str, str]]) -> str:
    for before, after in renames:
        if match := _pattern(before).match(path):
            parts = iter(match.groups())
            return re.sub(r"\*", lambda _: next(parts), after) + path[match.end() :]
    return path


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile("([^/]*)".join(map(re.escape, path.split("*"))) + "(?=/|$)")
