"""Build HTML pages from the Jinja2 templates beside the modules that use them: `page.html` here is every page's frame.

Whatever is put into a template is escaped. A page is one file that needs no network.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from replay.output.text import Columns, is_text, judgement

if TYPE_CHECKING:
    from jinja2 import Environment

REPLAY = Path(__file__).parent.parent  # holds all templates


def render(template: str, **values: object) -> str:
    """Fill a template, named by its path below `replay/`. What it names and is not given raises."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> "Environment":
    # imported here, so that `replay --help` stays light
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(REPLAY),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"rows": _rows, "classes": _classes, "judgement": judgement}
    return environment


def _rows(columns: Columns) -> list[list[tuple[str, str]]]:
    """Return the rows of a table, each cell with its column's name."""
    return [list(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def _classes(columns: Columns) -> dict[str, str]:
    """Return the class of each column's cells: `text` for words, none for numbers."""
    return {name: "text" if is_text(cells) else "" for name, cells in columns.items()}
