"""Measure what a verdict costs a replay: whole processes with one and without one, alternating.

    python -m benchmarks verdict_cost --out /tmp/cost                        # on a CPU: a tiny model
    python -m benchmarks verdict_cost --out /tmp/cost --hidden 1024 --layers 8 --tokens 1024

transformers' Trainer trains in bf16 (fp32 weights, autocast) with a warm-up, and is recorded twice: with all that a
verdict needs, and without what the job computed. The third series, the second kind again, is the control. With a
verdict a replay steps as the job did, so the last two columns are without norms and steps. A second table has the parts
of a replay (parts.py), first those to which a verdict adds most, by the median of the rounds. Two rounds, and one
before them that does not count, are nine replays.
"""

import argparse
import json
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness import Answers, Column, Contestant, Sample, alternate, make_parser, markdown, run_to_end, table
from benchmarks.verdict_cost.parts import STEPS

BUT_FOR_STEPS = "CPU but for steps"
COLUMNS = (
    Column("median s", "s"),
    Column("time / without", "s", ".3f", of="without"),
    Column("CPU s", "CPU"),
    Column("CPU / without", "CPU", ".3f", of="without"),
    Column("CPU s but for steps", BUT_FOR_STEPS),
    Column("/ without", BUT_FOR_STEPS, ".3f", of="without"),
)
WALL, PROCESSOR = " (wall)", " (CPU)"


def main() -> int:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48, help="of each of a pass's two rows")
    parser.add_argument("--passes", type=int, default=40, help="as many steps")
    parser.add_argument("--job", choices=("with", "without"), help="train and record, in this process")
    given = parser.parse_args()
    given.out = given.out or Path("verdict_cost")
    if given.job:
        train(given)
        return 0
    answers = Answers(given, "verdict_cost")
    for kind in ("with", "without"):
        shutil.rmtree(given.out / kind, ignore_errors=True)
        command = [sys.executable, "-m", "benchmarks", "verdict_cost", "--job", kind, "--out", str(given.out)]
        run_to_end(
            [*command, *(f"--{name}={getattr(given, name)}" for name in ("hidden", "layers", "tokens", "passes"))]
        )

    def replay(kind: str) -> Contestant:
        def measure(number: int) -> list[Sample]:
            folder = given.out / kind
            logs = folder / f"logs-{time.monotonic_ns()}"
            inputs = ["--inputs", str(folder / "captures"), "--model", str(folder / "model"), "--backend", "fsdp2"]
            parts = folder / "parts.json"
            began, processor_before = time.monotonic(), read_processor_seconds()
            run_to_end(
                [sys.executable, "-m", "benchmarks.verdict_cost.parts", str(parts), *inputs, "--quiet", "-o", str(logs)]
            )
            sample = {"s": time.monotonic() - began, "CPU": read_processor_seconds() - processor_before}
            [log] = logs.glob("*/run.json")
            verdict = json.loads(log.read_text())["verdict"]
            outcome = "REPRODUCED" if kind == "with" else "CANNOT TELL"
            assert verdict["outcome"] == outcome, verdict
            sample[BUT_FOR_STEPS] = sample["CPU"]
            for part, (wall, processor) in json.loads(parts.read_text()).items():
                sample |= {part + WALL: wall, part + PROCESSOR: processor}
                sample[BUT_FOR_STEPS] -= processor if part.endswith(STEPS) else 0.0
            return [sample]

        return measure

    series = {"with a verdict": replay("with"), "without": replay("without"), "without again": replay("without")}
    figures = alternate(series, answers, rounds=given.rounds)
    print(f"{answers.machine}: {given.passes} passes\n\n{table('replay', figures, COLUMNS)}")
    print(f"\n{format_parts(figures['with a verdict'], figures['without'])}")
    return 0


def read_processor_seconds() -> float:
    """Return those of the processes that this one has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def format_parts(with_verdict: Sequence[Sample], without: Sequence[Sample]) -> str:
    """Format the median seconds of each part; 0 where a replay has none of it."""

    def compare(name: str) -> list[float]:
        own, other = (median(sample.get(name, 0.0) for sample in samples) for samples in (with_verdict, without))
        return [own, other, own - other]

    parts = {name.removesuffix(WALL) for sample in with_verdict for name in sample if name.endswith(WALL)}
    seconds = {part: [*compare(part + WALL), *compare(part + PROCESSOR)] for part in parts}
    rows = [
        [part, *(f"{each:.3f}" for each in seconds[part])] for part in sorted(parts, key=lambda part: -seconds[part][2])
    ]
    return markdown([["part", "wall s", "without", "more", "CPU s", "without", "more"], *rows])


def train(given: argparse.Namespace) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from capture import recording

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=given.hidden,
        intermediate_size=2 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=max(given.hidden // 64, 2),
        num_key_value_heads=max(given.hidden // 128, 1),
    )
    model = LlamaForCausalLM(config)
    folder = given.out / given.job
    model.save_pretrained(folder / "model")
    rows = [
        {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        for ids in torch.randint(1024, (2 * given.passes, given.tokens))
    ]
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=2,
        max_steps=given.passes,
        learning_rate=1e-4,
        warmup_steps=max(given.passes // 4, 1),
        lr_scheduler_type="cosine",
        bf16=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    with recording(model, folder / "captures", reproduce=given.job == "with"):
        Trainer(model=model, args=arguments, train_dataset=rows).train()
