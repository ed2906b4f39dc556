"""Tensor parallelism gives the loss and the gradient norm of the unsharded model, for every kind of plan."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from replay.logbook import read_log
from replay.selection import default_folder
from tests.reference import Reference
from tests.test_commands import ROOT, run
from tests.test_contract import LEARNING_RATE, LOSS_BOUND, MAX_NORM, NORM_BOUND, records_of

SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.1,  # so that a wrong shard shows
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2, biases": {"model_type": "qwen2"},
    "qwen3, norms on heads": {"model_type": "qwen3"},
    "gemma3, sliding window": {"model_type": "gemma3_text", "sliding_window": 16, "attention_bias": False},
}
STEPPING = f"--tp 2 --step --learning-rate {LEARNING_RATE} --max-norm {MAX_NORM}"
RUNS = {  # processes: flags
    2: ["--tp 2", "--tp 2 --gradient-checkpointing", "--tp 2 --zero-stage 2 --no-packing", STEPPING],
    4: ["--tp 2 --grad-accumulation 2"],
}
NUM_INPUTS = 4
COMMON = ["--backend", "fsdp2", "--dtype", "fp32", "--quiet", "--max-inputs", str(NUM_INPUTS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each model with weights of Hugging Face's own making."""
    made = {}
    for number, (name, config) in enumerate(MODELS.items()):
        made[name] = tmp_path_factory.mktemp(f"model{number}")
        torch.manual_seed(number)
        model_type = config["model_type"]
        rest = {**SIZES, **{key: value for key, value in config.items() if key != "model_type"}}
        AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **rest)).save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def logs(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, str], Path]:
    home = tmp_path_factory.mktemp("logs")
    found: dict[tuple[str, int, str], Path] = {}
    for num_processes, flag_sets in RUNS.items():
        commands = []
        for flags in flag_sets:
            for name, folder in folders.items():
                log_folder = found[name, num_processes, flags] = home / str(len(found))
                where = ["--model", str(folder), "--log-folder", str(log_folder)]
                commands.append([*COMMON, *flags.split(), *where])
        table = home / f"commands{num_processes}.json"
        table.write_text(json.dumps(commands))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
        done = subprocess.run(
            [*launcher, "-m", "tests.replay_worker", str(table), "2"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return found


STANDING = [(n, flags) for n, every in RUNS.items() for flags in every if flags != STEPPING]


@pytest.mark.parametrize(("num_processes", "flags"), STANDING)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_norms_are_the_reference_s(
    name: str, num_processes: int, flags: str, logs: dict[tuple[str, int, str], Path], folders: dict[str, Path]
) -> None:
    reference = Reference(folders[name])
    records = records_of(logs[name, num_processes, flags])
    accumulation = 2 if "accumulation" in flags else 1
    num_data_ranks = num_processes // 2
    assert len(records) == NUM_INPUTS * num_processes
    for index in range(NUM_INPUTS):
        ranks = [record for record in records if record.index == index]
        assert len({record.source for record in ranks}) == num_data_ranks
        for record in ranks:
            expected = reference.answer(default_folder() / record.source).loss
            assert record.loss == pytest.approx(expected, rel=LOSS_BOUND)
        if (index + 1) % accumulation == 0:
            window = {r.source for r in records if index - accumulation < r.index <= index}
            norm = reference.gradient_norm([default_folder() / source for source in sorted(window)])
            assert [record.grad_norm for record in ranks] == pytest.approx([norm] * len(ranks), rel=NORM_BOUND)


@pytest.mark.parametrize("name", MODELS)
def test_clipped_steps_lead_where_a_plain_loop_leads(
    name: str, logs: dict[tuple[str, int, str], Path], folders: dict[str, Path]
) -> None:
    records = [record for record in records_of(logs[name, 2, STEPPING]) if record.rank == 0]
    expected = Reference(folders[name]).clipped_steps(
        [default_folder() / record.source for record in records], learning_rate=LEARNING_RATE, max_norm=MAX_NORM
    )
    assert [record.loss for record in records] == pytest.approx([loss for loss, _ in expected], rel=LOSS_BOUND)
    assert [record.grad_norm for record in records] == pytest.approx([norm for _, norm in expected], rel=NORM_BOUND)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--backend fsdp2 --tp 3", "Try: --tp with one of 1, 2"),
        ("--tp 3", "Try: --tp with one of 1, 2"),
    ],
)
def test_what_cannot_be_split_is_refused(arguments: str, expected: str, tmp_path: Path) -> None:
    done = run(f"replay {arguments} --max-inputs 1", tmp_path)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flags", ["", "--compile"])
def test_the_processes_that_are_missing_are_started(flags: str, tmp_path: Path) -> None:
    done = run(f"torchrun replay --backend fsdp2 --tp 2 --max-inputs 2 {flags}", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "starting them" in done.stderr
    (folder,) = tmp_path.iterdir()
    log, records = read_log(folder)
    assert log["world_size"] == 2
    assert len({record.source for record in records}) == 2
