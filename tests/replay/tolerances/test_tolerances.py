"""docs/tolerances.md has every tolerance of the code, with the value that the code has."""

import re
from pathlib import Path

import pytest

from docs.generated_block import insert_lines
from docs.write_constants import MODULES, PAGE, format_number, list_constants

ROOT = Path(__file__).parents[3]


def test_the_page_lists_the_constants() -> None:
    text = PAGE.read_text()
    assert insert_lines(text, "constants", list_constants()) == text, "run: python -m docs.write_constants"


def test_the_table_lists_each_number_that_a_module_writes_down() -> None:
    """By the text of one module alone, so that a constant which the builder overlooks is seen."""
    name = "replay.tolerances.run_bounds"
    assert name in MODULES
    source = (ROOT / name.replace(".", "/")).with_suffix(".py").read_text()
    written = set(re.findall(r"^([A-Z_]+)(?:: [^=]+)? = [\d.e-]+$", source, re.MULTILINE))
    assert len(written) > 5
    listed = {line.split("`")[3] for line in list_constants() if line.startswith(f"| `{name}`")}
    assert written <= listed


@pytest.mark.parametrize(
    ("value", "text"), [(2**-8, "2^-8"), (0.5, "0.5"), (0.25, "0.25"), (64.0, "64"), (1e-5, "1e-05"), (0.001, "0.001")]
)
def test_small_powers_of_two_are_written_as_powers(value: float, text: str) -> None:
    assert format_number(value) == text


def test_a_page_without_the_block_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has no block constants: write <!-- constants: begin -->"):
        insert_lines("no marks", "constants", [])
