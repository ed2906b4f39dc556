"""Write the names of modules and parameters of many layers as few patterns, and find a name's pattern again.

model.layers.*.self_attn            of all layers
model.layers.[0-3,7].self_attn      of some
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Generic, TypeVar

ANY = "*"
_NUMBER = re.compile(r"\d+")
_INDEX = re.compile(r"\*|\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]|\d+")
ValueT = TypeVar("ValueT")

_Indices = tuple[int, ...]
# The ranges of indices, first and last, that a pattern allows at one of its places; None: all.
_Allowed = tuple[tuple[int, int], ...] | None


def split_name(name: str) -> tuple[str, _Indices]:
    """Return a name with `*` for each part that is a number, and these numbers."""
    parts = name.split(".")
    return (
        ".".join(ANY if _NUMBER.fullmatch(part) else part for part in parts),
        tuple(int(part) for part in parts if _NUMBER.fullmatch(part)),
    )


def format_patterns(names: Iterable[str], all_names: Iterable[str]) -> list[str]:
    """Write `names` as few patterns, in the order of their first names.

    all_names  a `*` stands for all numbers that these names have in its place
    """
    chosen: dict[str, set[_Indices]] = {}
    for name in names:
        template, indices = split_name(name)
        chosen.setdefault(template, set()).add(indices)
    known: dict[str, list[set[int]]] = {}
    for name in all_names:
        template, indices = split_name(name)
        if template in chosen:
            places = known.setdefault(template, [set() for _ in indices])
            for place, index in zip(places, indices, strict=True):
                place.add(index)
    return [
        _fill_template(template, [_format_index(allowed, place) for allowed, place in zip(merged, places, strict=True)])
        for template, tuples in chosen.items()
        for places in [known.get(template, [set() for _ in next(iter(tuples))])]
        for merged in _merge_indices(tuples)
    ]


class PatternTable(Generic[ValueT]):
    """A table by patterns, asked by names."""

    def __init__(self, values: Mapping[str, ValueT]) -> None:
        self._rows: dict[str, list[tuple[str, list[_Allowed], ValueT]]] = {}
        for pattern, value in values.items():
            template, allowed = _split_pattern(pattern)
            self._rows.setdefault(template, []).append((pattern, allowed, value))

    def find(self, name: str) -> tuple[str, ValueT] | None:
        """Return the pattern that `name` has, and its value; None where there is none."""
        template, indices = split_name(name)
        for pattern, places, value in self._rows.get(template, ()):
            if all(_allows(allowed, index) for allowed, index in zip(places, indices, strict=True)):
                return pattern, value
        return None


def _merge_indices(tuples: Iterable[_Indices]) -> Iterator[tuple[set[int], ...]]:
    """Merge tuples of indices that are all combinations of some sets, from the last place to the first."""
    by_first: dict[int, set[_Indices]] = {}
    for indices in tuples:
        if not indices:
            yield ()
            return
        by_first.setdefault(indices[0], set()).add(indices[1:])
    firsts_by_rest: dict[frozenset[_Indices], set[int]] = {}
    for first, rests in by_first.items():
        firsts_by_rest.setdefault(frozenset(rests), set()).add(first)
    for rests_of_all, firsts in firsts_by_rest.items():
        for rest in _merge_indices(rests_of_all):
            yield (firsts, *rest)


def _format_index(indices: set[int], known: set[int]) -> str:
    if len(indices) == 1:
        return str(next(iter(indices)))
    return ANY if indices == known else f"[{_format_ranges(indices)}]"


def _format_ranges(indices: set[int]) -> str:
    """Write `0-3,7`."""
    texts = []
    # In a row of consecutive indices the difference between an index and its number in the sorted list is the same.
    for _, numbered in groupby(enumerate(sorted(indices)), key=lambda pair: pair[1] - pair[0]):
        row = [index for _, index in numbered]
        texts.append(f"{row[0]}-{row[-1]}" if len(row) > 1 else str(row[0]))
    return ",".join(texts)


def _fill_template(template: str, indices: Iterable[str]) -> str:
    index_texts = iter(indices)
    return ".".join(next(index_texts) if part == ANY else part for part in template.split("."))


def _split_pattern(pattern: str) -> tuple[str, list[_Allowed]]:
    parts, places = [], list[_Allowed]()
    for part in pattern.split("."):
        if not (match := _INDEX.fullmatch(part)):
            parts.append(part)
            continue
        parts.append(ANY)
        places.append(None if part == ANY else tuple(_read_ranges(match[1] or part)))
    return ".".join(parts), places


def _read_ranges(text: str) -> Iterator[tuple[int, int]]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield int(first), int(last or first)


def _allows(allowed: _Allowed, index: int) -> bool:
    return allowed is None or any(first <= index <= last for first, last in allowed)
