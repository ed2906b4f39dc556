"""HTML pages are filled from templates: what is put in is escaped, what is missing is said, and they are installed."""

import tomllib
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from replay.output.html import render

ROOT = Path(__file__).resolve().parents[3]


def test_a_template_that_is_not_given_a_value_says_which() -> None:
    with pytest.raises(UndefinedError, match="'title' is undefined"):
        render("output/page.html")


def test_every_file_beside_the_code_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    installed = {
        path
        for package, patterns in listed.items()
        for pattern in patterns
        for path in (ROOT / Path(*package.split("."))).glob(pattern)
    }
    beside = {path for path in (ROOT / "replay").rglob("*") if path.suffix in {".html", ".css", ".js"}}
    assert beside
    assert beside <= installed
