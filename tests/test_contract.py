"""Every strategy and toggle gives the loss and the gradient norm of a plain Hugging Face model.

The table is chosen so that every pair of toggles meets at least once; a test below counts the pairs.
"""

import itertools
import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from capture.file_format.actor_config import read_actor_config
from replay.runlog.records import PassRecord
from replay.runlog.writer import read_log
from replay.runner.selection import default_folder
from tests.reference import Reference
from tests.warm import warm_bin

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


EVERY, FEW = 32, 4  # of the sample's 32 training passes, by each rank at most
TABLE = [
    Row("deepspeed 0", 1, True, True, False, 2, EVERY),
    Row("deepspeed 0", 2, False, False, True, 1, FEW),
    Row("deepspeed 1", 1, False, True, True, 1, FEW),
    Row("deepspeed 1", 2, True, False, False, 2, EVERY),
    Row("deepspeed 2", 1, True, True, False, 2, FEW),
    Row("deepspeed 2", 2, False, False, True, 1, EVERY),
    Row("deepspeed 3", 1, False, False, True, 2, EVERY),
    Row("deepspeed 3", 2, True, True, False, 1, FEW),
    Row("fsdp2 2", 1, True, True, True, 1, EVERY),
    Row("fsdp2 2", 2, False, False, False, 2, FEW),
    Row("fsdp2 3", 1, True, True, False, 1, EVERY),
    Row("fsdp2 3", 2, False, False, True, 2, FEW),
    Row("ddp", 1, False, True, True, 1, FEW),
    Row("ddp", 2, True, False, False, 2, EVERY),
]
BF16_ROWS = [
    ("deepspeed 1", f"--zero-stage 1 --max-inputs {FEW}"),
    ("fsdp2 3", f"--backend fsdp2 --max-inputs {FEW}"),
    ("ddp", f"--backend ddp --max-inputs {FEW}"),
]
STEP_ROWS = {
    **{f"deepspeed {stage}": f"--zero-stage {stage}" for stage in range(4)},
    **{f"fsdp2 {stage}": f"--backend fsdp2 --zero-stage {stage}" for stage in (2, 3)},
    "ddp": "--backend ddp",
}
NUM_STEPS, LEARNING_RATE, MAX_NORM = 4, 1e-3, 1.0
STEPPING = f"--dtype fp32 --step --max-inputs {NUM_STEPS} --learning-rate {LEARNING_RATE} --max-norm {MAX_NORM}"


def save_model(folder: Path) -> Path:
    """The sample's model with weights of Hugging Face's own making, as a checkpoint in `folder`."""
    config = read_actor_config(default_folder())
    assert config is not None
    config = {**config, "num_hidden_layers": 2}
    torch.manual_seed(0)
    rest = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **rest), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Reference:
    return Reference(model_folder)


@pytest.fixture(scope="module")
def logs(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The log folder of every row, by name; all rows of one world size run in one go."""
    home = tmp_path_factory.mktemp("logs")
    folders: dict[str, Path] = {}
    for num_ranks in (1, 2):
        runs = {row.name: row.arguments() for row in TABLE if row.num_ranks == num_ranks}
        if num_ranks == 1:
            runs |= {f"bf16 {name}": shlex.split(flags) for name, flags in BF16_ROWS}
            runs |= {f"step {name}": shlex.split(f"{STEPPING} {flags}") for name, flags in STEP_ROWS.items()}
        folders |= replayed(runs, num_ranks, model_folder, home)
    return folders


def replayed(
    runs: Mapping[str, Sequence[str]], num_ranks: int, model: Path, home: Path, worker: str = "tests.replay_worker"
) -> dict[str, Path]:
    """Replay `model` with each run's arguments, all in one launch of `worker`; the log folders by the runs' names."""
    folders: dict[str, Path] = {}
    commands = []
    for number, (name, arguments) in enumerate(runs.items()):
        folders[name] = home / f"{num_ranks}-{number}"
        commands.append([*arguments, "--model", str(model), "--log-folder", str(folders[name]), "--quiet"])
    table = home / f"commands{num_ranks}.json"
    table.write_text(json.dumps(commands))
    launcher = [str(warm_bin() / "python")]
    if num_ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*launcher, "-m", worker, str(table)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
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


def test_every_pair_of_toggles_meets() -> None:
    for first, second in itertools.combinations(range(len(Row._fields)), 2):
        wanted = set(itertools.product({row[first] for row in TABLE}, {row[second] for row in TABLE}))
        assert {(row[first], row[second]) for row in TABLE} == wanted, (Row._fields[first], Row._fields[second])


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_losses_and_norms_are_the_reference_s(row: Row, logs: dict[str, Path], reference: Reference) -> None:
    check_losses_and_norms(row, logs[row.name], reference)


def check_losses_and_norms(row: Row, log: Path, reference: Reference) -> None:
    records = records_of(log)
    assert len({record.source for record in records}) == min(EVERY, row.max_inputs * row.num_ranks)
    for record in records:
        expected = reference.answer(default_folder() / record.source).loss
        assert record.loss == pytest.approx(expected, rel=LOSS_BOUND), record.source
    for window in windows_of(records, row.accumulation).values():
        expected = reference.gradient_norm([default_folder() / record.source for record in window])
        for record in window:
            is_last = (record.index + 1) % row.accumulation == 0
            norm = pytest.approx(expected, rel=NORM_BOUND) if is_last else None
            assert record.grad_norm == norm, record.source


@pytest.mark.parametrize("name", [name for name, _ in BF16_ROWS])
def test_bf16_stays_within_its_bound(name: str, logs: dict[str, Path], reference: Reference) -> None:
    for record in records_of(logs[f"bf16 {name}"]):
        path = default_folder() / record.source
        assert record.loss == pytest.approx(reference.answer(path).loss, rel=BF16_BOUND)
        assert record.grad_norm == pytest.approx(reference.gradient_norm([path]), rel=BF16_NORM_BOUND)


@pytest.mark.parametrize("name", STEP_ROWS)
def test_clipped_steps_lead_where_a_plain_loop_leads(name: str, logs: dict[str, Path], model_folder: Path) -> None:
    check_clipped_steps(logs[f"step {name}"], model_folder)


def check_clipped_steps(log: Path, model_folder: Path) -> None:
    """`log` is that of a run with STEPPING."""
    records = records_of(log)
    assert len(records) == NUM_STEPS
    expected = Reference(model_folder).clipped_steps(
        [default_folder() / record.source for record in records], learning_rate=LEARNING_RATE, max_norm=MAX_NORM
    )
    assert [record.loss for record in records] == pytest.approx([loss for loss, _ in expected], rel=LOSS_BOUND)
    assert [record.grad_norm for record in records] == pytest.approx([norm for _, norm in expected], rel=NORM_BOUND)
