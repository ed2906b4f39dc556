"""Which inputs of a folder a campaign can feed, and what is said of the others."""

from pathlib import Path

import pytest
import torch

from actor_init.spec import UsageError
from capture.file_format.capture_file import write_call
from capture.file_format.micro_batch import Origin
from replay.campaign.feedable_inputs import FeedableInputs
from replay.options.spec import InputsSpec, LossName
from tests.helpers.made_captures import damage, write_pass


def write_embeddings(folder: Path) -> Path:
    """Write a pass that was fed embeddings in place of tokens."""
    origin = Origin(source="", rank=0, world_size=1, step=9, time="2026-03-01T09:13:00.000000+00:00")
    return write_call(folder, {"inputs_embeds": torch.ones(2, 3, 4)}, {}, trains=True, origin=origin)


def test_what_cannot_be_read_is_told_and_the_others_keep_their_numbers(tmp_path: Path) -> None:
    paths = [write_pass(tmp_path, step=step, length=10 + step, num_real=4 + step) for step in range(4)]
    damage(paths[1])
    embeddings = write_embeddings(tmp_path)
    inputs = FeedableInputs.read(InputsSpec(inputs=tmp_path), loss=LossName.STAND_IN, grad_accumulation=1)
    assert [(shape.number, shape.source) for shape in inputs.shapes] == [
        (number, path.name) for number, path in enumerate([paths[0], paths[2], paths[3]])
    ]
    assert [(shape.rows, shape.row_length, list(shape.documents)) for shape in inputs.shapes][-1] == (2, 13, [7, 7])
    [(path, reason)] = inputs.unfeedable
    assert (path, "truncated" in reason) == (paths[1], True)
    assert [path for path, _ in inputs.selection.unreplayable] == [embeddings]


def test_a_folder_of_damaged_files_is_refused(tmp_path: Path) -> None:
    damage(write_pass(tmp_path))
    with pytest.raises(UsageError, match="no input can be fed to a model"):
        FeedableInputs.read(InputsSpec(inputs=tmp_path), loss=LossName.STAND_IN, grad_accumulation=1)
