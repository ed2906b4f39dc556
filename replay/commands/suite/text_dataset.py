"""Convert a file of texts to captures of format 1: one tokenised text per micro-batch. The only module with pyarrow.

Shape letters: S tokens of a text.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actor_init.spec import UsageError
from capture.file_format.actor_config import write_actor_config
from capture.file_format.capture_file import utc_time, write_call
from capture.file_format.micro_batch import Origin

COLUMN = "text"
MAX_LENGTH = 1024  # tokens of a text; longer ones are cut and counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    num_texts: int
    num_cut: int  # longer than MAX_LENGTH
    num_left_out: int  # texts of fewer than two tokens, which have none to predict


def write_texts(dataset: Path, model: str | None, folder: Path, most: int) -> Written:
    """Write the first `most` texts of `dataset` as captures into `folder`, with the model's config beside them.

    Labels are the tokens themselves. Raises UsageError for a file without texts, or a model without a tokenizer.
    """
    texts = _texts(dataset)
    tokenizer = _tokenizer(dataset, model)
    num_texts = num_cut = num_left_out = 0
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        if len(ids) < 2:
            num_left_out += 1
            continue
        num_cut += len(ids) > MAX_LENGTH
        ids_1S = torch.tensor([ids[:MAX_LENGTH]])
        tensors = {"input_ids": ids_1S, "attention_mask": torch.ones_like(ids_1S), "labels": ids_1S}
        origin = Origin(source="", rank=0, world_size=1, step=num_texts, time=utc_time(), model_name=model)
        write_call(folder, tensors, {}, trains=True, origin=origin)
        num_texts += 1
        if num_texts == most:
            break
    if not num_texts:
        raise UsageError(f"--dataset {dataset} holds no text of two tokens or more. Give a file with texts")
    config = json.loads((Path(str(model)) / "config.json").read_text(encoding="utf-8"))
    write_actor_config(folder, config, model)
    return Written(num_texts=num_texts, num_cut=num_cut, num_left_out=num_left_out)


def _tokenizer(dataset: Path, model: str | None) -> Any:
    from transformers import AutoTokenizer

    needed = f"--dataset {dataset} holds texts, which need the model's tokenizer"
    advice = "Try: --model FOLDER with config.json and tokenizer.json, or a --dataset of captures"
    if model is None or not (Path(model) / "config.json").is_file():
        given = "no --model is given" if model is None else f"--model {model} is no model folder"
        raise UsageError(f"{needed}, and {given}. {advice}")
    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{needed}, and --model {model} holds none. {advice}") from error


def _texts(dataset: Path) -> Iterator[str]:
    match dataset.suffix:
        case ".jsonl" | ".json":
            return _of_jsonl(dataset)
        case ".parquet":
            return _of_parquet(dataset)
    raise UsageError(f"--dataset {dataset} is no folder of captures, .jsonl or .parquet. Give one of these")


def _of_jsonl(dataset: Path) -> Iterator[str]:
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
            yield _checked(dataset, f"line {number}", row)


def _of_parquet(dataset: Path) -> Iterator[str]:
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
        rows = (row for batch in file.iter_batches(columns=[COLUMN]) for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield _checked(dataset, f"row {number}", row)


def _checked(dataset: Path, where: str, row: dict[str, Any]) -> str:
    _check_columns(dataset, list(row), f" in {where}")
    if not isinstance(row[COLUMN], str):
        raise UsageError(f"--dataset {dataset}: {COLUMN} in {where} is a {type(row[COLUMN]).__name__}. Give a string")
    text: str = row[COLUMN]
    return text


def _check_columns(dataset: Path, columns: list[str], where: str = "") -> None:
    if COLUMN not in columns:
        there = f"the columns are {', '.join(columns)}" if columns else "there is no column"
        raise UsageError(f"--dataset {dataset} has no column {COLUMN}{where}: {there}. Try: one renamed to {COLUMN}")
