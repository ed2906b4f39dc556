"""Build HTML pages from the Jinja2 templates beside the modules that use them; `page.html` is the frame of every page.

Whatever is put into a template is escaped. A page is one file that needs no network.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from replay.output.text import Columns, is_text_column, judge_line

if TYPE_CHECKING:
    from jinja2 import Environment

# All templates are below this folder.
REPLAY = Path(__file__).parent.parent


def render(template: str, **values: object) -> str:
    """Fill a template, named by its path below `replay/`. Raises for a name that it uses and `values` lacks."""
    return _make_environment().get_template(template).render(values)


@cache
def _make_environment() -> "Environment":
    # Importing it only for a page keeps `replay --help` light.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(REPLAY),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"rows": _list_rows, "classes": _choose_classes, "judgement": judge_line}
    return environment


def _list_rows(columns: Columns) -> list[list[tuple[str, str]]]:
    """List the rows of a table, each cell with its column's name."""
    return [list(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def _choose_classes(columns: Columns) -> dict[str, str]:
    """Choose the class of each column's cells: `text` for words, none for numbers."""
    return {name: "text" if is_text_column(cells) else "" for name, cells in columns.items()}
