"""Prepare the inputs of a suite: a folder of its own that holds only the requested training passes."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from actor_init.saving.huggingface import check_folder
from actor_init.spec import UsageError
from capture.file_format.atomic_write import write_atomically
from capture.file_format.capture_file import read_capture_bytes, read_micro_batch
from capture.file_format.folder_layout import ACTOR_CONFIG_NAME
from capture.file_format.listing import capture_files
from capture.file_format.micro_batch import CaptureError
from replay.commands.suite.plan import SuiteSpec
from replay.commands.suite.text_dataset import MAX_LENGTH, write_texts
from replay.options.spec import LossName, default_folder
from replay.output.text import counted

DEFAULT_SAMPLES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteInputs:
    """The prepared inputs: `num_inputs` training passes; an epoch is as many steps as they fill."""

    num_inputs: int
    loss: LossName
    said: str  # where they came from, in words

    def steps_an_epoch(self, inputs_a_step: int) -> int:
        return max(1, self.num_inputs // inputs_a_step)


def prepare_inputs(spec: SuiteSpec, folder: Path, inputs_a_step: int) -> SuiteInputs:
    """Write the inputs into `folder`, completely or not at all.

    If there are enough, their number is a multiple of a step's inputs, so that each epoch has the same steps. Raises
    UsageError if the dataset has none, or is damaged.
    """
    check_folder(folder, "output_dir")
    dataset = spec.dataset if spec.dataset is not None else default_folder()
    twice_each = spec.steps * inputs_a_step // 2
    most = spec.max_samples or max(min(DEFAULT_SAMPLES, twice_each), inputs_a_step)
    unfinished = Path(tempfile.mkdtemp(prefix=".inputs-unfinished-", dir=folder.parent))
    try:
        num_found, loss, said = (
            _copied(dataset, unfinished, most) if dataset.is_dir() else _written(spec, dataset, unfinished, most)
        )
        num_inputs = num_found - (num_found % inputs_a_step if num_found > inputs_a_step else 0)
        for surplus in capture_files(unfinished)[num_inputs:]:
            surplus.unlink()
        os.replace(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return SuiteInputs(num_inputs=num_inputs, loss=loss, said=f"{counted(num_inputs, 'input')} {said}")


def _copied(dataset: Path, folder: Path, most: int) -> tuple[int, LossName, str]:
    num_copied = 0
    for path in capture_files(dataset):
        try:
            trains = read_micro_batch(path).trains
        except CaptureError as error:
            raise UsageError(f"{error.text}. Try: capture check {dataset}") from error
        if trains:
            write_atomically(folder / path.name, read_capture_bytes(path))
            num_copied += 1
        if num_copied == most:
            break
    if not num_copied:
        raise UsageError(f"--dataset {dataset} holds no training pass. Try: replay inspect {dataset}")
    if (config := dataset / ACTOR_CONFIG_NAME).exists():
        shutil.copy2(config, folder)
    return num_copied, LossName.STAND_IN, "of the sample" if dataset == default_folder() else f"of {dataset}"


def _written(spec: SuiteSpec, dataset: Path, folder: Path, most: int) -> tuple[int, LossName, str]:
    written = write_texts(dataset, spec.model, folder, most)
    said = f"made of the texts in {dataset}"
    said += f"; {written.num_cut} cut to {MAX_LENGTH} tokens" if written.num_cut else ""
    said += f"; {written.num_left_out} left out, of fewer than two tokens" if written.num_left_out else ""
    return written.num_texts, LossName.SFT, said
