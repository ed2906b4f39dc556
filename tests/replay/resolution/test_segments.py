"""What a replay selects, an inspection finds and a verdict says is the same of segments as of a file a pass."""

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from capture import capture_files, recording
from capture.cli import main
from capture.file_format.capture_file import CapturedCall, read_call
from capture.folder_tools.convert import FolderWriter, make_empty_folder
from replay.command_line.cli import main as replay_main
from replay.commands.inspect.inspection import MAX_LISTED_ODD, Inspection, inspect_folder
from replay.commands.inspect.text import print_inspection
from replay.options.spec import InputsSpec, Passes, ReplaySpec, find_sample_folder
from replay.processes.child_job import ChildJob
from replay.resolution import selection
from replay.resolution.selection import select
from tests.helpers.made_captures import write_config, write_passes
from tests.helpers.small_jobs import TinyModel
from tests.replay.verdict.test_judge import FP32, replay_captures, train


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample inputs in segments."""
    folder = tmp_path_factory.mktemp("sample") / "segments"
    assert main(["convert", str(find_sample_folder()), str(folder), "--segment", "60kB"]) == 0
    return folder


@pytest.mark.parametrize(
    ("settings", "num_data_ranks", "grad_accumulation"),
    [
        ({}, 1, 1),
        ({}, 2, None),
        ({}, 3, 1),
        ({"passes": Passes.ALL, "shuffle_inputs": True, "max_inputs": 7}, 2, 1),
        ({"passes": Passes.ROLLOUT, "uneven": True}, 3, 1),
        ({"max_inputs": 4, "skip_inputs": 2}, 1, None),
    ],
)
def test_a_selection_is_the_same(
    settings: dict[str, Any], num_data_ranks: int, grad_accumulation: int | None, sample: Path
) -> None:
    for data_rank in range(num_data_ranks):
        chosen, expected = (
            select(
                InputsSpec(inputs=folder, **settings), data_rank, num_data_ranks, grad_accumulation=grad_accumulation
            )
            for folder in (sample, find_sample_folder())
        )
        assert [path.name for path in chosen.inputs] == [path.name for path in expected.inputs]
        assert chosen.inputs
        assert replace(chosen, inputs=[], left_out=()) == replace(
            expected, inputs=[], num_left_out_passes=chosen.num_left_out_passes, left_out=()
        )


def test_of_segments_only_the_selected_passes_are_opened(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def note_read(path: Path) -> CapturedCall:
        read.append(path)
        return read_call(path)

    monkeypatch.setattr(selection, "read_call", note_read)
    chosen = select(InputsSpec(inputs=sample, max_inputs=3), 0, 1)
    assert sorted(read) == sorted(chosen.inputs)
    assert len(read) == 3


@pytest.mark.parametrize("segment", [None, "1MB"])
def test_passes_of_a_window_that_is_not_whole_come_last(segment: str | None, tmp_path: Path) -> None:
    """Windows of two passes; of the first one the first pass is not recorded."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, tmp_path, reproduce=True, forwards="1:", segment=segment):
        for step in range(6):
            model(torch.ones(2, 8, dtype=torch.long)).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    chosen = select(InputsSpec(inputs=tmp_path), 0, 1, grad_accumulation=None)
    assert [int(path.stem[-8:]) for path in chosen.inputs] == [2, 3, 4, 5, 1]
    assert chosen.grad_accumulation == 2


def inspect_with_text(folder: Path) -> tuple[Inspection, list[str]]:
    facts, out = inspect_folder(folder), io.StringIO()
    print_inspection(facts, out)
    return facts, [line for line in out.getvalue().splitlines() if not line.startswith(("folder", "files"))]


def test_an_inspection_is_the_same(sample: Path) -> None:
    found, text = inspect_with_text(sample)
    expected, expected_text = inspect_with_text(find_sample_folder())
    # The table of recordings says how many files there are, and of segments how many hosts wrote them.
    [place] = [number for number, line in enumerate(text) if line.startswith("recording ")]
    assert [*text[:place], *text[place + 2 :]] == [*expected_text[:place], *expected_text[place + 2 :]]
    assert (found.num_by_format, expected.num_by_format) == ({"of format 1 in segments": 40}, {"of format 1": 40})
    [recording], [of_files] = found.recordings, expected.recordings
    assert (recording.num_hosts, of_files.num_hosts, of_files.num_files) == (1, None, 40)
    assert recording == replace(of_files, num_files=recording.num_files, num_hosts=1)
    found = replace(found, folder=expected.folder, num_by_format=expected.num_by_format, recordings=expected.recordings)
    assert found == expected


def make_odd_folder(folder: Path) -> Path:
    """Passes that stand out: not finite, without an action, mostly padding, with an empty row."""
    write_passes(folder, {0: "ttt", 1: "tr"})
    write_config(folder)
    [first, *_] = [read_call(path) for path in capture_files(folder)]
    mask_BS = torch.zeros(2, 10, dtype=torch.bool)
    mask_BS[0, 0] = True
    for step, (tensors, outputs) in enumerate(
        [
            ({}, {"loss": float("nan"), "grad_norm": 1.0}),
            ({"action_mask": torch.zeros(2, 3, dtype=torch.bool)}, {}),
            ({"attention_mask": mask_BS}, {"loss": float("inf")}),
        ],
        start=10,
    ):
        origin = replace(first.origin, step=step)
        replace(first, tensors={**first.tensors, **tensors}, outputs=outputs, origin=origin).write(folder)
    return folder


def test_passes_that_stand_out_are_the_same(tmp_path: Path) -> None:
    main(["convert", str(make_odd_folder(tmp_path / "files")), str(tmp_path / "segments"), "--segment", "1MB"])
    found, text = inspect_with_text(tmp_path / "segments")
    expected, expected_text = inspect_with_text(tmp_path / "files")
    assert [odd_file.reason for odd_file in found.odd] == [
        "loss was nan",
        "no token is an action",
        "loss was inf",
        "1 of 2 rows have no real token",
        "95% is padding",
    ]
    assert (found.odd, found.num_odd, text) == (expected.odd, 5, expected_text)


def test_passes_that_stand_out_are_counted_and_not_all_kept(tmp_path: Path) -> None:
    made = write_passes(tmp_path / "files", {0: "t"})[0][0]
    call = read_call(made)
    mask_BS = torch.zeros(2, 10, dtype=torch.bool)
    mask_BS[:, 0] = True
    make_empty_folder(tmp_path / "segments")
    with FolderWriter(tmp_path / "segments", segment=10**6) as writer:
        writer.write(call)
        for step in range(1, MAX_LISTED_ODD + 31):
            origin = replace(call.origin, step=step)
            writer.write(replace(call, tensors={**call.tensors, "attention_mask": mask_BS}, origin=origin))
    facts, text = inspect_with_text(tmp_path / "segments")
    assert (len(facts.odd), facts.num_odd) == (MAX_LISTED_ODD, MAX_LISTED_ODD + 30)
    assert text[-1] == f"odd        {MAX_LISTED_ODD + 20} more"


def test_damage_in_a_segment_is_named(sample: Path, tmp_path: Path) -> None:
    main(["convert", str(sample), str(tmp_path / "new"), "--segment", "60kB"])
    first, second, *_ = sorted((tmp_path / "new").rglob("*.seg"))
    first.write_bytes(first.read_bytes()[:-100])
    second.write_bytes(b"x" + second.read_bytes()[1:])
    damaged = inspect_folder(tmp_path / "new").damaged
    assert [path for path, _ in damaged] == [first, second]
    assert "truncated: its index has 1 passes more" in damaged[0][1]
    assert "its head is damaged" in damaged[1][1]


def test_a_job_recorded_into_segments_is_reproduced(tmp_path: Path, one_world: None) -> None:
    job = train(tmp_path / "job", reproduce=True, segment="30kB")
    assert sorted({path.suffix for path in (job / "captures").rglob("*.*")}) == [".idx", ".json", ".seg"]
    code, verdict, _ = replay_captures(job, tmp_path / "all", *FP32, "--verdict", "strict")
    assert (code, verdict["outcome"], verdict["counts"]) == (0, "REPRODUCED", {"REPRODUCED": 3})
    [_, second, _] = capture_files(job / "captures")
    typed = ["--input-file", str(second), "--model", str(job / "model"), "--loss", "sft"]
    assert replay_main([*typed, *FP32, "--log-folder", str(tmp_path / "one"), "--verdict", "strict"]) == 0


@pytest.mark.parametrize("option", ["input_file", "inputs"])
def test_a_node_gets_the_whole_folder_of_a_pass_in_a_segment(option: str, sample: Path, tmp_path: Path) -> None:
    wanted = capture_files(sample)[3]
    is_file = option == "input_file"
    given = replace(InputsSpec(max_inputs=3), **{option: wanted if is_file else sample})  # type: ignore[arg-type]
    job = ChildJob(spec=ReplaySpec(inputs=given))
    assert job.inputs == sample
    copy = shutil.copytree(sample, tmp_path / "copy")
    there = job.on_node(tmp_path / "logs", copy)
    assert there.logs == tmp_path / "logs"
    path = getattr(there.spec.inputs, option)
    assert replace(there.spec.inputs, **{option: getattr(given, option)}) == given
    if is_file:
        assert path.is_relative_to(copy)
        assert read_call(path).origin.source == read_call(wanted).origin.source
    else:
        assert path == copy
