"""Prepare the inputs of a suite: a folder of its own that holds only the requested training passes.

They are copies of captures, or captures made of a file of texts, one tokenised text per micro-batch. Shape letters:
S tokens of a text.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actor_init.saving.huggingface import check_folder
from actor_init.spec import UsageError
from capture.file_format.actor_config import write_actor_config
from capture.file_format.atomic_write import write_atomically
from capture.file_format.capture_file import read_capture_bytes, read_micro_batch, utc_now, write_call
from capture.file_format.folder_layout import ACTOR_CONFIG_NAME
from capture.file_format.folder_recordings import list_recordings
from capture.file_format.listing import capture_files
from capture.file_format.micro_batch import CaptureError, Origin
from replay.commands.suite.plan import SuiteSpec
from replay.options.spec import LossName, find_sample_folder
from replay.output.text import pluralise

TEXT_COLUMN = "text"
# The most tokens of a text. Longer ones are cut and counted.
MAX_LENGTH = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedTexts:
    num_texts: int
    num_cut: int
    # Texts of fewer than two tokens have none to predict.
    num_left_out: int


def write_texts(
    dataset: Path, model: str | None, folder: Path, most: int, *, max_length: int = MAX_LENGTH
) -> ConvertedTexts:
    """Write the first `most` texts of `dataset` as captures into `folder`, with the model's config beside them.

    A text keeps its first `max_length` tokens, which are the labels too. Raises UsageError for a file without texts, or
    a model without a tokenizer.
    """
    texts = _read_texts(dataset)
    tokenizer = _load_tokenizer(dataset, model)
    num_texts = num_cut = num_left_out = 0
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        if len(ids) < 2:
            num_left_out += 1
            continue
        num_cut += len(ids) > max_length
        ids_1S = torch.tensor([ids[:max_length]])
        tensors = {"input_ids": ids_1S, "attention_mask": torch.ones_like(ids_1S), "labels": ids_1S}
        origin = Origin(source="", rank=0, world_size=1, step=num_texts, time=utc_now(), model_name=model)
        write_call(folder, tensors, {}, trains=True, origin=origin)
        num_texts += 1
        if num_texts == most:
            break
    if not num_texts:
        raise UsageError(f"--dataset {dataset} holds no text of two tokens or more. Give a file with texts")
    config = json.loads((Path(str(model)) / "config.json").read_text(encoding="utf-8"))
    write_actor_config(folder, config, model)
    return ConvertedTexts(num_texts=num_texts, num_cut=num_cut, num_left_out=num_left_out)


def _load_tokenizer(dataset: Path, model: str | None) -> Any:
    from transformers import AutoTokenizer

    needed = f"--dataset {dataset} holds texts, which need the model's tokenizer"
    advice = "Try: --model FOLDER with config.json and tokenizer.json, or a --dataset of captures"
    if model is None or not (Path(model) / "config.json").is_file():
        reason = "no --model is given" if model is None else f"--model {model} is no model folder"
        raise UsageError(f"{needed}, and {reason}. {advice}")
    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{needed}, and --model {model} holds none. {advice}") from error


def _read_texts(dataset: Path) -> Iterator[str]:
    match dataset.suffix:
        case ".jsonl" | ".json":
            return _read_jsonl(dataset)
        case ".parquet":
            return _read_parquet(dataset)
    raise UsageError(f"--dataset {dataset} is no folder of captures, .jsonl or .parquet. Give one of these")


def _read_jsonl(dataset: Path) -> Iterator[str]:
    with dataset.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UsageError(f"--dataset {dataset}: line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise UsageError(f'--dataset {dataset}: line {number} is no object. Give lines as {{"text": "..."}}')
            yield _read_text(dataset, f"line {number}", row)


def _read_parquet(dataset: Path) -> Iterator[str]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UsageError(
            f"--dataset {dataset} needs pyarrow. Try: pip install 'micro-replay[parquet]', or a .jsonl file"
        ) from error
    try:
        file = ParquetFile(dataset)
    except ArrowInvalid as error:
        raise UsageError(f"--dataset {dataset} is not parquet: {error}") from error
    with file:
        _check_columns(dataset, file.schema_arrow.names)
        rows = (row for batch in file.iter_batches(columns=[TEXT_COLUMN]) for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield _read_text(dataset, f"row {number}", row)


def _read_text(dataset: Path, position: str, row: dict[str, Any]) -> str:
    _check_columns(dataset, list(row), f" in {position}")
    if not isinstance(row[TEXT_COLUMN], str):
        raise UsageError(
            f"--dataset {dataset}: {TEXT_COLUMN} in {position} is a {type(row[TEXT_COLUMN]).__name__}. Give a string"
        )
    text: str = row[TEXT_COLUMN]
    return text


def _check_columns(dataset: Path, columns: list[str], position: str = "") -> None:
    if TEXT_COLUMN not in columns:
        columns_text = f"the columns are {', '.join(columns)}" if columns else "there is no column"
        raise UsageError(
            f"--dataset {dataset} has no column {TEXT_COLUMN}{position}: {columns_text}. "
            f"Try: one renamed to {TEXT_COLUMN}"
        )


DEFAULT_SAMPLES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteInputs:
    """The prepared inputs: `num_inputs` training passes; an epoch is as many steps as they fill."""

    num_inputs: int
    loss: LossName
    # Where the inputs come from, in words.
    said: str

    def steps_an_epoch(self, inputs_a_step: int) -> int:
        return max(1, self.num_inputs // inputs_a_step)


def prepare_inputs(spec: SuiteSpec, folder: Path, inputs_a_step: int) -> SuiteInputs:
    """Write the inputs into `folder`, completely or not at all.

    If there are enough, their number is a multiple of a step's inputs, so that each epoch has the same steps. Raises
    UsageError if the dataset has none, or is damaged.
    """
    check_folder(folder, "output_dir")
    dataset = spec.dataset if spec.dataset is not None else find_sample_folder()
    twice_each = spec.steps * inputs_a_step // 2
    most = spec.max_samples or max(min(DEFAULT_SAMPLES, twice_each), inputs_a_step)
    unfinished = Path(tempfile.mkdtemp(prefix=".inputs-unfinished-", dir=folder.parent))
    try:
        num_found, loss, origin = (
            _copy_captures(dataset, unfinished, most)
            if dataset.is_dir()
            else _convert_texts(spec, dataset, unfinished, most)
        )
        num_inputs = num_found - (num_found % inputs_a_step if num_found > inputs_a_step else 0)
        for surplus in capture_files(unfinished)[num_inputs:]:
            surplus.unlink()
        os.replace(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return SuiteInputs(num_inputs=num_inputs, loss=loss, said=f"{pluralise(num_inputs, 'input')} {origin}")


def _copy_captures(dataset: Path, folder: Path, most: int) -> tuple[int, LossName, str]:
    num_copied = 0
    recordings = list_recordings(dataset)
    for path in [capture.path for capture in recordings[-1].list_captures()] if recordings else []:
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
    return num_copied, LossName.STAND_IN, "of the sample" if dataset == find_sample_folder() else f"of {dataset}"


def _convert_texts(spec: SuiteSpec, dataset: Path, folder: Path, most: int) -> tuple[int, LossName, str]:
    texts = write_texts(dataset, spec.model, folder, most)
    origin = f"made of the texts in {dataset}"
    origin += f"; {texts.num_cut} cut to {MAX_LENGTH} tokens" if texts.num_cut else ""
    origin += f"; {texts.num_left_out} left out, of fewer than two tokens" if texts.num_left_out else ""
    return texts.num_texts, LossName.SFT, origin
