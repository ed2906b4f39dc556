"""docs/tolerances.md has every tolerance of the code, with the value that the code has."""

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| `(?P<file>[\w/]+\.py)` \| `(?P<name>[A-Z0-9_]+)(: (?P<key>[^`]+))?` \| (?P<value>[^|]+) \|$")


def rows() -> list[tuple[str, str, str | None, str]]:
    lines = (ROOT / "docs" / "tolerances.md").read_text().splitlines()
    return [(m["file"], m["name"], m["key"], m["value"].strip()) for line in lines if (m := ROW.match(line))]


def module_of(file: str) -> ModuleType:
    return importlib.import_module(file.removesuffix(".py").replace("/", "."))


def number(text: str) -> float:
    base, _, power = text.partition("^")
    return float(base) ** int(power or 1)


def read_numbers(value: Any) -> tuple[float, ...]:
    return tuple(map(float, value)) if isinstance(value, tuple) else (float(value),)


@pytest.mark.parametrize(("file", "name", "key", "value"), rows(), ids=lambda part: str(part).rpartition("/")[2])
def test_a_constant_has_the_value_that_the_page_gives(file: str, name: str, key: str | None, value: str) -> None:
    found = getattr(module_of(file), name)
    assert read_numbers(found if key is None else found[key]) == tuple(map(number, value.split(", ")))


def constants(module: ModuleType) -> Iterator[tuple[str, str | None]]:
    """The floats that a file defines itself, alone or in a table."""
    assert module.__file__ is not None
    own = set(re.findall(r"^([A-Z0-9_]+)\b[^=\n]*=", Path(module.__file__).read_text(), re.MULTILINE))
    for name in sorted(own):
        value = getattr(module, name)
        if isinstance(value, float):
            yield name, None
        elif isinstance(value, Mapping):
            yield from ((name, str(key)) for key, number in value.items() if isinstance(number, float | tuple))


@pytest.mark.parametrize("file", sorted({file for file, *_ in rows()}))
def test_every_constant_of_a_file_that_the_page_names_is_on_the_page(file: str) -> None:
    on_page = {(name, key) for other, name, key, _ in rows() if other == file}
    assert set(constants(module_of(file))) <= on_page


def test_every_file_that_the_page_mentions_is_there() -> None:
    text = (ROOT / "docs" / "tolerances.md").read_text()
    mentioned = set(re.findall(r"`((?:replay|actor_init|tests)/[\w/]+\.py)`", text))
    assert len(rows()) > 40
    assert all((ROOT / path).is_file() for path in mentioned)
