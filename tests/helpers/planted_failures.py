"""Replays with a failure planted in them, and how small each can be made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from capture import capture_files
from capture.file_format.actor_config import write_actor_config
from capture.file_format.capture_file import read_call
from capture.file_format.micro_batch import Origin
from capture.folder_tools.convert import FolderWriter
from replay.options.spec import find_sample_folder
from tests.helpers import failing_inputs
from tests.helpers.made_captures import write_pass
from tests.helpers.planted_losses import EARLIER, TOKEN

LOSSES = Path(__file__).with_name("planted_losses.py")
NUM_FILES, NUM_ROWS, LENGTH = 8, 4, 24
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Places = Mapping[tuple[int, int, int], int]  # file, row, column: token
AT = (5, 2, 13)


def usual_inputs(home: Path, places: Places | None = None, num_ranks: int = 1) -> Path:
    """Write captures of random tokens, without those that failures are planted for but at `places`."""
    folder = home / "inputs"
    generator = torch.Generator().manual_seed(0)
    with FolderWriter(folder, segment=None) as writer:
        for number in range(NUM_FILES):
            made = write_pass(
                home / "made", step=number, num_rows=NUM_ROWS, length=LENGTH, num_real=LENGTH, num_actions=LENGTH - 4
            )
            call = read_call(made)
            ids_BS = torch.randint(5, 64, (NUM_ROWS, LENGTH), generator=generator)
            for (file, row, column), token in ({AT: TOKEN} if places is None else places).items():
                if file == number:
                    ids_BS[row, column] = token
            origin: Origin = replace(call.origin, rank=number % num_ranks)
            folder.mkdir(exist_ok=True)
            writer.write(replace(call, tensors={**call.tensors, "sequences": ids_BS}, origin=origin))
    write_actor_config(folder, CONFIG, "tiny")
    return folder


def two_files(home: Path) -> Path:
    return usual_inputs(home, {(2, 1, 20): EARLIER, (4, 0, 5): TOKEN, (6, 3, 9): TOKEN})


def long_rows(home: Path) -> Path:
    return failing_inputs.folder_of(home, [10, 20, 30, 12, 40, 25, 50, 8])


def other_numbers(home: Path) -> Path:
    """Take the passes of the sample that were done with the weights at the beginning; one row gets another number."""
    folder = home / "inputs"
    folder.mkdir()
    chosen = [call for path in capture_files(find_sample_folder()) if (call := read_call(path)).trains][:2]
    first = [call for call in chosen if call.origin.rank == 0][:1]
    with FolderWriter(folder, segment=None) as writer:
        for number in range(4):
            for call in first:
                outputs = dict(call.outputs)
                sums = call.output_numbers("output_row_sums") or []
                sums[1] *= 1.1 if number == 2 else 1.0
                origin = replace(call.origin, step=number)
                writer.write(replace(call, outputs={**outputs, "output_row_sums": sums}, origin=origin))
    (folder / "actor.json").write_bytes((find_sample_folder() / "actor.json").read_bytes())
    return folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Planted:
    """A failure, and the most of each that has to be left."""

    arguments: tuple[str, ...]
    inputs: Callable[[Path], Path] = usual_inputs
    minimise: tuple[str, ...] = ()  # options of minimise itself
    kind: str = "exception"
    files: int = 1
    rows: int = 1
    tokens: int = 2
    layers: int = 1
    processes: int = 1
    options: tuple[str, ...] = field(default=())  # that are needed


def loss_of(name: str) -> tuple[str, ...]:
    return ("--loss", f"{LOSSES}:{name}")


def model_of(name: str) -> tuple[str, ...]:
    return ("--model", f"{LOSSES}:{name}", "--backend", "fsdp2")


PLANTED = {
    "a token in a layer": Planted(arguments=model_of("Model"), options=("--model",)),
    "a row longer than n": Planted(arguments=("--no-packing",), inputs=long_rows, tokens=33),
    "not finite, for a token": Planted(arguments=loss_of("overflows"), kind="not finite", options=("--loss",)),
    "another number in one row": Planted(
        arguments=("--dtype", "fp32"), inputs=other_numbers, kind="differs", tokens=1024, layers=4
    ),
    "two files in order": Planted(
        arguments=loss_of("raises_after_another"), inputs=two_files, files=2, rows=2, tokens=4, options=("--loss",)
    ),
    "one option of five": Planted(
        arguments=(
            *model_of("fails_in_fp32"),
            *("--dtype", "fp32", "--gradient-checkpointing", "--loss", "sft", "--weight-decay", "0.1"),
        ),
        options=("--model", "--dtype"),
    ),
    "a hang": Planted(arguments=(*loss_of("hangs"), "--timeout", "5"), kind="hang", options=("--loss",)),
    "out of memory": Planted(arguments=loss_of("has_no_memory"), rows=2, tokens=36, options=("--loss",)),
    "a rank": Planted(
        arguments=loss_of("raises_on_rank_1"),
        minimise=("--processes", "2"),
        files=2,
        rows=2,
        tokens=4,
        processes=2,
        options=("--loss",),
    ),
    "a loss that raises": Planted(arguments=loss_of("raises"), options=("--loss",)),
}
