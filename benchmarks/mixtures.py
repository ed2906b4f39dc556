"""Record tiny mixtures of experts in bf16, sound ones and ones with a broken router, and replay each.

    python -m benchmarks mixtures --seeds 5              # 40 sound jobs: four families, bf16 weights and autocast
    python -m benchmarks mixtures --faults               # a wrong router, norm_topk_prob and coefficient

Prints the verdict on each job; the exit code is 1 where a sound job differs, or a broken one does not.
"""

import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.harness import Answers, make_parser
from capture import recording
from capture.record.routers import find_routers
from replay.command_line.cli import main as run_replay
from tests.helpers.families import tiny_config, tiny_model

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
DTYPES = ("bf16", "autocast")
NUM_LAYERS, WIDTH, NUM_EXPERTS = 4, 64, 8
NUM_PASSES, NUM_ROWS, NUM_TOKENS = 2, 4, 48
SIZES = {
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": WIDTH,
    "num_experts": NUM_EXPERTS,
    "num_local_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureJob:
    """One job: its model, and what is broken in it after its weights were saved."""

    family: str
    dtype: str
    seed: int
    break_model: Callable[[PreTrainedModel], None] | None = None
    config: tuple[tuple[str, Any], ...] = ()
    name: str = "sound"


def _as_any(module: nn.Module) -> Any:
    return module


def choose_worst_experts(model: PreTrainedModel) -> None:
    """Have every router of the model choose by the negated logits."""
    for router in map(_as_any, find_routers(model).values()):
        forward = router.forward

        def choose(hidden: torch.Tensor, forward: Callable[..., Any] = forward) -> Any:
            logits, weights, _ = forward(hidden)
            _, _, index = forward(-hidden)
            return logits, weights, index

        router.forward = choose


def switch_norm(model: PreTrainedModel) -> None:
    for router in map(_as_any, find_routers(model).values()):
        router.norm_topk_prob = not router.norm_topk_prob


def double_coefficient(model: PreTrainedModel) -> None:
    model.router_aux_loss_coef *= 2


def record(job: MixtureJob, home: Path) -> None:
    """Record the passes of a job, without steps, into `home`."""
    tiny = tiny_config(job.family)
    sizes: dict[str, Any] = {name: value for name, value in SIZES.items() if hasattr(tiny, name)}
    if getattr(tiny, "layer_types", None):
        sizes["layer_types"] = (list(tiny.layer_types) * NUM_LAYERS)[:NUM_LAYERS]
    model = tiny_model(tiny_config(job.family, **sizes, **dict(job.config)), seed=job.seed).train()
    model.save_pretrained(home / "model")
    if job.dtype == "bf16":
        model = model.to(torch.bfloat16)
    if job.break_model is not None:
        job.break_model(model)
    generator = torch.Generator().manual_seed(job.seed)
    with recording(model, home / "inputs", reproduce=True):
        for _ in range(NUM_PASSES):
            ids_BS = torch.randint(3, 120, (NUM_ROWS, NUM_TOKENS), generator=generator)
            mask_BS = torch.ones_like(ids_BS)
            mask_BS[0, -8:] = 0
            labels_BS = ids_BS.masked_fill(mask_BS == 0, -100)
            with torch.autocast("cpu", torch.bfloat16, enabled=job.dtype == "autocast"):
                model(input_ids=ids_BS, attention_mask=mask_BS, labels=labels_BS).loss.backward()
            model.zero_grad()


def judge_job(job: MixtureJob, arguments: list[str]) -> dict[str, Any]:
    """Record and replay a job; return the verdict of run.json."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            record(job, home)
            options = ["--inputs", str(home / "inputs"), "--model", str(home / "model"), "--loss", "sft"]
            run_replay([*options, "--backend", "fsdp2", "--log-folder", str(home / "logs"), *arguments])
        [log] = (home / "logs").iterdir()
        verdict: dict[str, Any] = json.loads((log / "run.json").read_text())["verdict"]
        return verdict


def list_sound_jobs(num_seeds: int, families: list[str]) -> list[MixtureJob]:
    return [
        MixtureJob(family=family, dtype=dtype, seed=seed)
        for family in families
        for dtype in DTYPES
        for seed in range(num_seeds)
    ]


WITH_LOSS = (("output_router_logits", True), ("router_aux_loss_coef", 0.1))


def list_broken_jobs() -> list[MixtureJob]:
    jobs = []
    for name, break_model, config, placed in (
        ("wrong router", choose_worst_experts, (), (("mixtral", "autocast", 1), ("qwen3_moe", "bf16", 1))),
        ("wrong norm_topk_prob", switch_norm, (), (("qwen3_moe", "bf16", 1), ("qwen3_moe", "autocast", 2))),
        ("wrong coefficient", double_coefficient, WITH_LOSS, (("mixtral", "autocast", 1), ("qwen3_moe", "bf16", 1))),
    ):
        for family, dtype, seed in placed:
            job = MixtureJob(family=family, dtype=dtype, seed=seed, break_model=break_model, config=config, name=name)
            jobs.append(job)
    return jobs


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--router-loss", action="store_true", help="sound jobs whose loss holds their routers'")
    parser.add_argument("--faults", action="store_true")
    given, arguments = parser.parse_known_args()
    jobs = list_broken_jobs() if given.faults else list_sound_jobs(given.seeds, given.families.split(","))
    if given.router_loss:
        jobs = [replace(job, config=WITH_LOSS) for job in jobs]
    answers = Answers(given, "mixtures", more=arguments)
    print(answers.machine)
    num_wrong = 0
    for job in jobs:
        name = f"{job.name} {job.family} {job.dtype} {job.seed}"
        verdict = answers.ask(name, partial(judge_job, job, arguments))
        is_wrong = (verdict["outcome"] == "DIFFERS") != (job.break_model is not None)
        num_wrong += is_wrong
        findings = verdict["first"]["findings"] if verdict["first"] else []
        text = "; ".join(
            f"{finding['name']} {finding['difference']:.3g}"
            for finding in findings
            if finding["status"].startswith("differs")
        )
        print(f"{'WRONG ' * is_wrong}{name}: {verdict['outcome']} {verdict['reason'] or ''} {text}", flush=True)
    print(f"{num_wrong} of {len(jobs)} judged wrongly")
    return int(num_wrong > 0)
