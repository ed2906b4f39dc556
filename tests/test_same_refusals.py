"""benchmarks/same_refusals: what wrong command lines print is compared line by line. Its runs are not for here."""

from pathlib import Path

import pytest

from benchmarks.same_numbers.trees import Ended, Tree
from benchmarks.same_refusals.__main__ import Mask, compare, masked
from benchmarks.same_refusals.lines import command_lines

TREE = Tree(code=Path("/work/code"), home=Path("/tmp/same/base"), environment={})
OTHER = Tree(code=Path("/tmp/same/code"), home=Path("/tmp/same/here"), environment={})
SAID = "replay: --tp 3 does not divide 4 heads. Try: --tp 2\n"
REFUSED = Ended(2, "", SAID)


def test_a_refusal_is_the_same_as_itself_and_its_exit_code_is_a_line() -> None:
    comparison = compare(masked(REFUSED, TREE), masked(REFUSED, OTHER))
    assert (comparison.num_lines, comparison.is_same) == (2, True)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (Ended(2, "", SAID.replace("--tp 2", "--tp  2")), "+replay: --tp 3 does not divide 4"),
        (Ended(1, "", SAID), "+1"),
        (Ended(2, "more\n", SAID), "+more"),
        (Ended(2, "", ""), "-replay: --tp 3 does not divide 4"),
    ],
)
def test_another_text_or_exit_code_is_shown_as_a_difference(other: Ended, difference: str) -> None:
    comparison = compare(masked(REFUSED, TREE), masked(other, OTHER))
    assert not comparison.is_same
    assert any(text.startswith(difference) for text in comparison.differences)


def test_folders_of_the_trees_and_what_a_mask_hides_may_be_others() -> None:
    base = Ended(2, "", "replay: /tmp/same/base/own.py, log 20261124-143602-replay, /work/code/cli.py\n")
    here = Ended(2, "", "replay: /tmp/same/here/own.py, log 20261124-143603-replay, /tmp/same/code/cli.py\n")
    assert compare(masked(base, TREE), masked(here, OTHER)).is_same
    assert not compare(masked(base, TREE, ()), masked(here, OTHER, ())).is_same
    [line] = masked(base, TREE, [Mask("own", "its", "a test")])["standard error"]
    assert line.startswith("replay: HOME/its.py")


def test_nothing_compared_is_not_the_same() -> None:
    assert not compare({}, {}).is_same


def test_there_are_more_than_150_lines_each_once() -> None:
    lines = command_lines()
    assert len(set(lines)) == len(lines) > 150
