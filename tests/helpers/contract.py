"""Bounds and readers that every backend's tests share."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from capture.file_format.actor_config import read_actor_config
from replay.options.spec import find_sample_folder
from replay.runlog.records import PassRecord
from tests.helpers.made_captures import copy_short_inputs
from tests.helpers.ranks import run_ranks
from tests.helpers.read_logs import read_log
from tests.helpers.reference import Reference

LOSS_BOUND = 1e-5  # relative: fp32 sums in another order


NORM_BOUND = 1e-4


BF16_BOUND = 5e-3  # relative, of loss: bf16 has 8 significant bits, 2**-8 = 3.9e-3, and a mean over many tokens


BF16_NORM_BOUND = 3e-2


class Row(NamedTuple):
    backend: str
    num_ranks: int
    packing: bool
    compile: bool
    checkpointing: bool
    accumulation: int
    max_inputs: int

    @property
    def name(self) -> str:
        toggles = (
            "packed" if self.packing else "padded",
            "compiled" if self.compile else "eager",
            *(["checkpointing"] if self.checkpointing else []),
            f"accumulation {self.accumulation}",
            f"{self.max_inputs} inputs",
        )
        return f"{self.backend}, {self.num_ranks} ranks, {', '.join(toggles)}"

    def arguments(self) -> list[str]:
        backend, *stage = self.backend.split()
        return [
            *("--backend", backend, "--dtype", "fp32"),
            *(["--zero-stage", *stage] if stage else []),
            "--packing" if self.packing else "--no-packing",
            *(["--compile"] if self.compile else []),
            *(["--gradient-checkpointing"] if self.checkpointing else []),
            *("--grad-accumulation", str(self.accumulation), "--max-inputs", str(self.max_inputs)),
        ]


MANY, FEW = 8, 4  # inputs of each rank


NUM_STEPS, LEARNING_RATE, MAX_NORM = 4, 1e-3, 1.0


STEPPING = f"--dtype fp32 --step --max-inputs {NUM_STEPS} --learning-rate {LEARNING_RATE} --max-norm {MAX_NORM}"


def save_model(folder: Path) -> Path:
    """The sample's model with weights of Hugging Face's own making, as a checkpoint in `folder`."""
    config = read_actor_config(find_sample_folder())
    assert config is not None
    config = {**config, "num_hidden_layers": 2}
    torch.manual_seed(0)
    rest = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **rest), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def replayed(
    runs: Mapping[str, Sequence[str]],
    num_ranks: int,
    model: Path,
    home: Path,
    worker: str = "tests.helpers.replay_worker",
    *,
    graphs: bool = False,
) -> dict[str, Path]:
    """Replay `model` with each run's arguments, all in one launch of `worker`; the log folders by the runs' names.

    Runs that name no inputs have short ones of the sample. With `graphs`, what is compiled has graphs alone.
    """
    inputs = home / "short"
    if not inputs.exists():
        copy_short_inputs(inputs, MANY, of_each_rank=True)
    folders: dict[str, Path] = {}
    commands = []
    for number, (name, arguments) in enumerate(runs.items()):
        folders[name] = home / f"{num_ranks}-{number}{'-graphs' * graphs}"
        where = ["--model", str(model), "--log-folder", str(folders[name])]
        commands.append(["--inputs", str(inputs), *arguments, *where, "--quiet"])
    table = home / f"commands{num_ranks}{'-graphs' * graphs}.json"
    table.write_text(json.dumps(commands))
    run_ranks(["-m", worker, str(table), "1", *["graphs"] * graphs], num_ranks)
    return folders


def records_of(home: Path) -> list[PassRecord]:
    (folder,) = home.iterdir()
    return read_log(folder)[1]


def windows_of(records: list[PassRecord], accumulation: int) -> dict[int, list[PassRecord]]:
    """The records of all ranks that each accumulation window averages."""
    windows: dict[int, list[PassRecord]] = {}
    for record in records:
        windows.setdefault(record.index // accumulation, []).append(record)
    return windows


def check_losses_and_norms(row: Row, log: Path, reference: Reference) -> None:
    records = records_of(log)
    assert len({record.source for record in records}) == row.max_inputs * row.num_ranks
    for record in records:
        expected = reference.answer(find_sample_folder() / record.source).loss
        assert record.result.loss == pytest.approx(expected, rel=LOSS_BOUND), record.source
    for window in windows_of(records, row.accumulation).values():
        expected = reference.gradient_norm([find_sample_folder() / record.source for record in window])
        for record in window:
            is_last = (record.index + 1) % row.accumulation == 0
            norm = pytest.approx(expected, rel=NORM_BOUND) if is_last else None
            assert record.result.grad_norm == norm, record.source


def check_clipped_steps(log: Path, model_folder: Path) -> None:
    """`log` is that of a run with STEPPING."""
    records = records_of(log)
    assert len(records) == NUM_STEPS
    expected = Reference(model_folder).clipped_steps(
        [find_sample_folder() / record.source for record in records], learning_rate=LEARNING_RATE, max_norm=MAX_NORM
    )
    assert [record.result.loss for record in records] == pytest.approx([loss for loss, _ in expected], rel=LOSS_BOUND)
    assert [record.result.grad_norm for record in records] == pytest.approx(
        [norm for _, norm in expected], rel=NORM_BOUND
    )
