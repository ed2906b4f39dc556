"""An importer that is one file and one entry in the tuple is told, typed and listed like the others."""

import subprocess
from pathlib import Path

import pytest

from capture import CaptureError, capture_files, read_micro_batch
from capture.cli import main
from capture.folder_tools.convert import convert_folder
from tests.warm import warm_bin

ROOT = Path(__file__).parents[3]
NAMES = "slime, nemo-rl, verl, roll, skyrl, openrlhf"


def run_capture(*words: object) -> "subprocess.CompletedProcess[str]":
    """Run `capture` with the toy importer in a process of its own."""
    return subprocess.run(
        [warm_bin() / "python", "-m", "tests.helpers.toy_importer", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "step_7.toy").write_text("toy rows\n1 2 3\n4 5 6\n7 8 9\n")
    return tmp_path / "dumps"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "rows"),
    [("", [[[1, 2, 3], [4, 5, 6], [7, 8, 9]]]), ("--from toy --rows 2", [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9]]])],
)
def test_a_folder_of_its_files_is_converted(
    options: str, rows: list[list[list[int]]], dumps: Path, tmp_path: Path
) -> None:
    done = run_capture("convert", *options.split(), dumps, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"converted  {len(rows)} passes to ")
    batches = [read_micro_batch(path) for path in capture_files(tmp_path / "out")]
    assert [batch.sequences_BS.tolist() for batch in batches] == rows
    assert {batch.call_facts["training_step"] for batch in batches} == {7}


def test_help_and_a_refusal_list_it_after_the_others(dumps: Path, tmp_path: Path) -> None:
    assert f"--from {NAMES.replace(', ', '|')}|toy" in " ".join(run_capture("convert", "--help").stdout.split())
    (dumps / "other.toy").write_text("a text")
    done = run_capture("convert", dumps, tmp_path / "out")
    assert done.returncode == 1
    refusal = "other.toy: cannot be told whose dump it is. Try: --from with one of"
    assert f"refused    {refusal} {NAMES}, toy\n" in done.stdout


def test_without_its_entry_nobody_knows_it(dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(dumps), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("converted  0 passes"), "no importer takes its suffix"
    assert main(["convert", str(dumps / "step_7.toy"), str(tmp_path / "second")]) == 1
    assert "step_7.toy: cannot be told whose dump it is" in capsys.readouterr().out
    with pytest.raises(CaptureError, match=f"is not known. Give one of {NAMES}$"):
        convert_folder(dumps, tmp_path / "third", project="toy")
