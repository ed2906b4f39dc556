"""Replays of small models in worlds of several ranks, each beside the unsharded reference."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.torch_version import TorchVersion
from transformers import AutoConfig, AutoModelForCausalLM

from actor_init.parallel.tensor_parallel import GATHERS_IN_ONE_PIECE
from capture.file_format.listing import capture_files
from replay.options.spec import find_sample_folder
from replay.runlog.records import PassRecord
from tests.helpers.contract import LOSS_BOUND, NORM_BOUND, records_of
from tests.helpers.gradients import assert_gradients_are_the_reference_s
from tests.helpers.made_captures import copy_captures
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import Reference

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
BIASES = {"attention_bias": True, "mlp_bias": True}
UNEVEN = {"vocab_size": 265, "pad_token_id": 32}  # 133 and 132 a rank; the space's row gets no gradient as an embedding
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, tied, biases, uneven": {"model_type": "llama", "tie_word_embeddings": True, **BIASES, **UNEVEN},
    "qwen2, biases": {"model_type": "qwen2"},
    "qwen3, norms on heads": {"model_type": "qwen3"},
    "gemma3, sliding window, softcap": {
        "model_type": "gemma3_text",
        "sliding_window": 16,
        "attention_bias": False,
        "final_logit_softcapping": 5.0,
    },
}
COMMON = ["--dtype", "fp32", "--quiet"]
# several rows along the sequence, which an older torch cannot: then these replay packed ones
SEVERAL_ROWS = "--no-packing" if TorchVersion(torch.__version__) >= GATHERS_IN_ONE_PIECE else "--packing"
ONE, FEW, THREE = (f"--max-inputs {number}" for number in (1, 2, 3))  # of SHORT
FIRST = "--skip-inputs 0 --max-inputs 3"  # of the sample: two rows each
MANY = "--max-inputs 8"  # the first training passes of the sample, rows of 441 to 912 tokens
# Short files of the sample, two of each rank: 149 and 52 tokens, and 71 and 61. Two do not divide the first.
SHORT = (11, 18, 31, 38)


class Job(NamedTuple):
    model: str
    num_processes: int
    flags: str
    sabotage: str = ""
    shapes: bool = False
    backend: str = "fsdp2"

    @property
    def parallel(self) -> tuple[int, int]:
        """tp and ring."""
        tp, ring = (re.search(rf"--{name} (\d+)", self.flags) for name in ("tp", "ring"))
        return int(tp[1]) if tp else 1, int(ring[1]) if ring else 1

    @property
    def name(self) -> str:
        return " ".join([self.model, self.backend, f"on {self.num_processes}", self.flags, self.sabotage]).strip()


class Outcome(NamedTuple):
    """What a job left behind, and the answers it is held to."""

    job: Job
    home: Path
    reference: Reference

    @property
    def log(self) -> Path:
        return self.home / "log"

    @property
    def gradients(self) -> Path:
        return self.home / "gradients.pt"

    def windows(self) -> list[list[PassRecord]]:
        accumulation = 2 if "accumulation" in self.job.flags else 1
        records = records_of(self.log)
        last = max(record.index for record in records) // accumulation
        return [[r for r in records if r.index // accumulation == number] for number in range(last + 1)]

    def check(self) -> None:
        self.check_inputs()
        self.check_losses()
        self.check_norms()
        self.check_gradients()

    def check_inputs(self) -> None:
        """Ranks of one replica see the same micro-batch, and those of different ones different micro-batches."""
        tp, ring = self.job.parallel
        for window in self.windows():
            for index in {record.index for record in window}:
                seen = {(record.rank // (tp * ring), record.source) for record in window if record.index == index}
                num_replicas = self.job.num_processes // (tp * ring)
                assert len(seen) == len({source for _, source in seen}) == num_replicas

    def check_losses(self, bound: float = LOSS_BOUND) -> None:
        for record in (record for window in self.windows() for record in window):
            expected = self.reference.answer(find_sample_folder() / record.source).loss
            assert record.result.loss == pytest.approx(expected, rel=bound), record.source

    def check_norms(self, bound: float = NORM_BOUND) -> None:
        for window in self.windows():
            norms = [record.result.grad_norm for record in window if record.result.grad_norm is not None]
            expected = self.reference.gradient_norm(sources_of(window))
            assert norms == pytest.approx([expected] * self.job.num_processes, rel=bound)

    def check_gradients(self) -> None:
        sources = [sources_of(window) for window in self.windows()]
        assert_gradients_are_the_reference_s(self.gradients, sources, self.reference)


def sources_of(window: list[PassRecord]) -> list[Path]:
    return [find_sample_folder() / source for source in sorted({record.source for record in window})]


def copy_short(folder: Path) -> Path:
    """Make `folder` of SHORT: a replay of the sample itself reads all files before those that it skips to."""
    captures = capture_files(find_sample_folder())
    return copy_captures(folder, [captures[number] for number in SHORT])


def save_model(folder: Path, seed: int, config: dict[str, Any]) -> None:
    """A checkpoint with Hugging Face's own weights, but for norms and biases, which are not constant."""
    torch.manual_seed(seed)
    values = {**SIZES, **config}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def save_models(configs: Mapping[str, dict[str, Any]], home: Path) -> dict[str, Path]:
    made = {name: home / str(number) for number, name in enumerate(configs)}
    for number, (name, config) in enumerate(configs.items()):
        save_model(made[name], number, config)
    return made


def replay_jobs(jobs: Sequence[Job], folders: Mapping[str, Path], home: Path) -> dict[Job, Outcome]:
    """One launch for each kind of world that the jobs need."""
    references = {model: Reference(folders[model]) for model in {job.model for job in jobs}}
    found = {job: Outcome(job, home / str(number), references[job.model]) for number, job in enumerate(jobs)}
    worlds: dict[tuple[int, tuple[int, int]], list[dict[str, Any]]] = {}
    short = copy_short(home / "short")
    for job, outcome in found.items():
        outcome.home.mkdir()
        inputs = [] if job.flags.endswith((FIRST, MANY)) else ["--inputs", str(short)]
        where = ["--model", str(folders[job.model]), *inputs, "--log-folder", str(outcome.log)]
        arguments = ["--backend", job.backend, *COMMON, *job.flags.split(), *where]
        worlds.setdefault((job.num_processes, job.parallel), []).append(
            {"arguments": arguments, "gradients": str(outcome.gradients)}
            | ({"sabotage": job.sabotage} if job.sabotage else {})
            | ({"shapes": str(outcome.home / "shapes.json")} if job.shapes else {})
        )
    for number, ((num_processes, parallel), table) in enumerate(worlds.items()):
        replay_all(table, home / f"jobs{number}.json", num_processes=num_processes, parallel=parallel)
    return found


def replay_all(jobs: list[dict[str, Any]], table: Path, *, num_processes: int, parallel: tuple[int, int]) -> None:
    """`parallel` is tp and ring."""
    table.write_text(json.dumps(jobs))
    run_ranks(["-m", "tests.helpers.gradient_worker", str(table), *map(str, parallel)], num_processes)
