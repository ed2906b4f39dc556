"""--help shows what most people need, --help-all every option; a folder may be typed as the first word."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from replay.command_line.cli import main
from replay.command_line.subcommands import COMMANDS
from replay.options.option_parsing import list_options
from tests.helpers.typed import spec_of


def name_of(command: Callable[..., object]) -> str:
    return command.__name__.replace("_", "-")


NAMES = [name_of(command) for commands in COMMANDS.values() for command in commands]


def read_help(capsys: pytest.CaptureFixture[str], *typed: str) -> str:
    assert main(typed) == 0
    return capsys.readouterr().out


def test_help_fits_on_a_screen_and_has_every_command_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = read_help(capsys, "--help")
    assert len(text.splitlines()) <= 60
    assert len(re.findall(r"^  -", text, re.MULTILINE)) <= 30
    for group, commands in COMMANDS.items():
        listed = text.partition(f"Commands: {group}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  ([\w-]+)", listed, re.MULTILINE) == [name_of(command) for command in commands]
    assert "..." not in text.partition("Commands: ")[2]


def test_help_all_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    words = read_help(capsys, "--help-all").split()
    assert [option.flag for option in list_options() if option.flag not in words] == []


@pytest.mark.parametrize("command", NAMES)
def test_a_commands_help_has_its_own_options_and_a_line_on_the_others(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, whole = read_help(capsys, command, "--help"), read_help(capsys, command, "--help-all")
    shared = re.findall(r"^  (?:-\w, )?(--[\w-]+)", whole.partition("\nInputs:\n")[2].partition("\nOptions:")[0], re.M)
    for flag in shared:
        assert not re.search(rf"^  {flag} ", text, re.MULTILINE)
    assert (f"replay {command} --help-all" in " ".join(text.split())) == ("Options of a replay:" in text)
    assert len(text.splitlines()) <= 80


@pytest.mark.parametrize("typed", [["inputs/sample"], ["--", "inputs/sample"], ["inputs/sample", "--quiet"]])
def test_a_folder_may_be_typed_alone(typed: list[str]) -> None:
    assert spec_of(typed).inputs.inputs == Path("inputs/sample")


def test_a_file_may_be_typed_alone() -> None:
    file = next(Path("inputs/sample").glob("*.pkl"))
    assert spec_of([str(file), "--dtype", "fp32"]).inputs.input_file == file


def test_what_follows_two_dashes_is_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "--step").mkdir()
    monkeypatch.chdir(tmp_path)
    assert spec_of(["--", "--step"]).inputs.inputs == Path("--step")


def test_suite_and_doctor_take_the_short_name_of_the_log_folder(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("suite", "doctor"):
        assert "-o, --log-folder FOLDER" in read_help(capsys, command, "--help")


@pytest.mark.parametrize(
    ("words", "proposed"), [("replay mis", ["mismatch"]), ("replay --inp", ["--inputs", "--input-file"])]
)
def test_the_shell_completes_commands_and_options(words: str, proposed: list[str]) -> None:
    """As the line of `replay --show-completion bash` in ~/.bashrc asks for it."""
    environment = {"_REPLAY_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "replay"], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == proposed
