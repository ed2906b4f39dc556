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
    """What legitimately differs between two runs of one tree."""

    path: str  # of a value, or of all that is below it; `*` stands for any one name or part of it
    reason: str
    hides: str = "value"  # which may be another one, but has to be there, and of the same kind; "all": may lack, too


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


TIME = "time that something took on this machine"
MEMORY = "memory of the process: it depends on what the allocator and the system did before"
_SECONDS = ("median_seconds", "p95_seconds", "iqr_seconds")
_PLACE = ("value", "index", "source", "rank")
MASKS = (
    *(Mask(f"rank*.jsonl/*/{name}", TIME) for name in ("seconds", "wait_seconds", "compile_seconds")),
    Mask("rank*.jsonl/*/phases/*/seconds", TIME),
    *(Mask(f"rank*.jsonl/*/phases/*/{name}", MEMORY) for name in ("allocated_bytes", "peak_allocated_bytes")),
    Mask("run.json/started", "when it was"),
    Mask("run.json/seconds", TIME),
    *(Mask(f"run.json/statistics/{name}", TIME) for name in (*_SECONDS, "real_tokens_per_second", "wait_share")),
    *(Mask(f"run.json/statistics/phases/*/{name}", TIME) for name in _SECONDS),
    Mask("run.json/statistics/phases/*/peak_allocated_bytes", MEMORY),
    Mask("run.json/statistics/padding_time_share", f"a share of the {TIME}"),
    *(Mask(f"run.json/statistics/slowest/{name}", f"{TIME}: another pass may be the slowest") for name in _PLACE),
    *(Mask(f"run.json/statistics/highest_peak/{name}", f"{MEMORY}; another pass may have it") for name in _PLACE),
    *(Mask(f"run.json/profile/ranks/*/{name}", TIME) for name in ("seconds", "seconds_by_work", "collective_seconds")),
    Mask("run.json/profile/ranks/*/longest", f"{TIME}: other kernels may be the longest", hides="all"),
    Mask("run.json/format", "goes up where a reader of logs would be misled, as by another name of a key"),
    Mask("run.json/versions/micro-replay", "goes up with a release"),
)
# What the tree at hand writes and BASE does not, or the other way round; gone with the commit after it.
NEW = (
    Mask("run.json/resolved", "the table of choices, which BASE does not keep", hides="all"),
    Mask("run.json/remarks", "what checks say of the recording, which BASE does not keep", hides="all"),
)
# A key's path in BASE and in the tree at hand, where it has another name now. A `*` of both stands for the same.
RENAMES: Sequence[tuple[str, str]] = ()


def compare(
    base: Mapping[str, Any],
    here: Mapping[str, Any],
    masks: Sequence[Mask] = (*MASKS, *NEW),
    renames: Sequence[tuple[str, str]] = RENAMES,
) -> Comparison:
    """Compare what `read_log` returned of two runs. Masks are for the names in the tree at hand."""
    values = _written({_renamed(path, renames): value for path, value in values_of(base)}, masks)
    values_here = _written(dict(values_of(here)), masks)
    pairs = [Difference(path, values.get(path), values_here.get(path)) for path in {**values, **values_here}]
    num_hidden = sum((pair.here or pair.base or "").startswith(_HIDDEN) for pair in pairs)
    return Comparison(len(pairs) - num_hidden, [pair for pair in pairs if pair.base != pair.here])


def values_of(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that has none below it, with its path; an empty list or object is a value, too."""
    below = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else None
    if path and (below is None or not tree):
        yield path, tree
    for name, value in below or ():
        yield from values_of(value, f"{path}/{name}" if path else str(name))


def read_log(folder: Path) -> dict[str, Any]:
    """Read the JSON in a run's folder, and digests of the tensors there, by the file's name."""
    files: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".json":
            files[name] = json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            files[name] = [json.loads(line) for line in path.read_text().splitlines()]
        elif path.suffix == ".safetensors":
            files[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return files


_KINDS = {str: "text", int: "number", float: "number", bool: "boolean", type(None): "null", dict: "{}", list: "[]"}
_HIDDEN = "hidden "  # before a kind; no JSON begins so


def _written(values: Mapping[str, Any], masks: Sequence[Mask]) -> dict[str, str]:
    """Return values as JSON; of those that a mask hides the kind, or nothing."""
    written = {}
    for path, value in values.items():
        mask = next((mask for mask in masks if _match(mask.path, path)), None)
        if mask is None:
            written[path] = json.dumps(value)
        elif mask.hides == "value":
            written[path] = _HIDDEN + _KINDS[type(value)]
    return written


def _renamed(path: str, renames: Sequence[tuple[str, str]]) -> str:
    for before, after in renames:
        if match := _match(before, path):
            return after.replace("*", "{}").format(*match.groups()) + path[match.end() :]
    return path


def _match(pattern: str, path: str) -> re.Match[str] | None:
    return re.match("([^/]*)".join(map(re.escape, pattern.split("*"))) + "(?=/|$)", path)
