"""A command that is one file and one entry in the tuple is parsed, listed, run and refused like the others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from replay.command_line.cli import main
from replay.command_line.subcommands import COMMANDS

ROOT = Path(__file__).parents[3]


def run_toy_replay(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run `replay` with the toy command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tests.helpers.toy_command", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_lists_it_after_the_others_with_the_first_line_of_its_text() -> None:
    done = run_toy_replay("--help")
    assert done.returncode == 0
    listed = done.stdout[done.stdout.index("Commands: ") :]
    names = [line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2] != " "]
    assert names == [
        *(command.__name__.replace("_", "-") for commands in COMMANDS.values() for command in commands),
        "toy",
    ]
    assert re.search(r"^  toy +Count the captures of a folder\.$", listed, re.MULTILINE)


def test_its_own_help_has_its_text_and_its_options() -> None:
    done = run_toy_replay("toy", "--help")
    assert done.returncode == 0
    words = " ".join(done.stdout.split())
    assert "Count the captures of a folder. Exit code 0: as many as wanted; 1: fewer." in words
    assert "--at-least N Exit with 1 if there are fewer than N captures." in words


@pytest.mark.parametrize(("at_least", "exit_code"), [(40, 0), (41, 1)])
def test_its_exit_code_is_that_of_the_process(at_least: int, exit_code: int) -> None:
    done = run_toy_replay("toy", "inputs/sample", "--at-least", str(at_least))
    assert (done.returncode, done.stdout, done.stderr) == (exit_code, "captures   40\n", "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("toy nowhere", "nowhere does not exist. Try: replay toy inputs/sample"),
        ("toy inputs/sample --at-lest 2", "unknown option --at-lest. Did you mean --at-least? Try: replay toy --help"),
        ("--max-inputs 2 toy inputs/sample", "--max-inputs belongs to a replay, not to `toy`. Try: replay toy --help"),
    ],
)
def test_what_is_typed_wrong_is_one_line_and_exit_code_2(words: str, says: str) -> None:
    done = run_toy_replay(*words.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"replay: {says}\n")


def test_without_its_entry_nobody_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["toy", "inputs/sample"]) == 2
    assert capsys.readouterr().err.startswith("replay: no such command 'toy'")
