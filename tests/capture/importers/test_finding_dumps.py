"""Which files of a folder are dumps, in which order, and what their names tell."""

from pathlib import Path

import pytest

from capture.facts import Setting
from capture.file_format.micro_batch import CaptureError
from capture.importers import IMPORTERS, find_importer, list_dumps
from capture.importers.declaration import DumpFile


def test_dumps_are_listed_by_their_numbers_and_what_is_hidden_or_no_dump_is_not(tmp_path: Path) -> None:
    names = ["10/gen_batch.dp", "9/gen_batch.dp", "step_2.pkl", "step_10.pkl", "a.jsonl", "b.pt"]
    others = [".cache/step_1.pkl", ".step_3.pkl", "9/.x/a.pt", "notes.txt", "actor.json", "x.pkl.tmp"]
    for name in (*names, *others):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.pkl").mkdir()
    assert [path.relative_to(tmp_path).as_posix() for path in list_dumps(tmp_path)] == [
        *("9/gen_batch.dp", "10/gen_batch.dp", "a.jsonl", "b.pt", "step_2.pkl", "step_10.pkl"),
    ]
    # A file that somebody names is taken whatever its name is.
    assert list_dumps(tmp_path / "notes.txt") == [tmp_path / "notes.txt"]
    with pytest.raises(CaptureError, match="no such file or folder"):
        list_dumps(tmp_path / "gone")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_000007.pkl", 7),
        ("global_step_7_training_input.pkl", 7),
        ("train_data_step12.jsonl", 12),
        ("7/gen_batch.dp", 7),
        # The file's own name counts before its folder's.
        ("8/step_7.pkl", 7),
        ("rank7.pkl", None),
        ("run7/gen_batch.dp", None),
        ("steps/a.pt", None),
    ],
)
def test_the_step_is_in_the_name_of_the_file_or_is_that_of_its_folder(name: str, step: int | None) -> None:
    assert DumpFile(path=Path("/dumps") / name, source="x").step == step


def test_a_project_is_found_by_its_name_and_the_most_particular_importer_is_asked_first() -> None:
    assert [find_importer(name).project for name in IMPORTERS] == list(IMPORTERS)
    # Any pickle may be a dump of OpenRLHF.
    assert list(IMPORTERS)[-1] == "openrlhf"
    with pytest.raises(CaptureError) as refusal:
        find_importer("trl")
    assert refusal.value.text.startswith(f"{Setting('project', 'trl')} is not known. Give one of slime, ")
