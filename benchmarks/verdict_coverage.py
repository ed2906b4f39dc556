"""Say how much of a clean Trainer job a default replay judges, and what the verdict costs.

    python benchmarks/verdict_coverage.py --out FOLDER                        # on a CPU: a tiny model
    python benchmarks/verdict_coverage.py --out FOLDER --hidden 1024 --layers 8 --steps 8 --tokens 1024 --rounds 3

The job trains with transformers' Trainer in bf16 (fp32 weights, autocast), with a warm-up, and is recorded by `capture
run`. Its recording is replayed with default options: prints the verdict and its coverage. Then `--passes` passes of it
are replayed with a verdict and without one (the same captures without what the job computed), alternating: prints the
seconds of each and their ratio, after one round that is not counted.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="recordings and logs")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--passes", type=int, default=40, help="of the recording whose cost is measured")
    parser.add_argument("--rounds", type=int, default=0, help="timed replays of each kind; 0: none")
    parser.add_argument("--job", choices=("judged", "bare"), help="train, in this process")
    given = parser.parse_args()
    if given.job:
        train(given, steps=given.steps)
        return 0
    record(given, "judged", steps=given.steps)
    seconds, verdict = replay(given, "judged")
    print(f"default replay of {given.steps} steps: {seconds:.1f} s; {verdict['outcome']}; {verdict['coverage']}")
    if given.rounds:
        measure_cost(given)
    return 0 if verdict["outcome"] == "REPRODUCED" else 1


def measure_cost(given: argparse.Namespace) -> None:
    """Replay as many passes with what the job computed and without it, alternating."""
    for kind in ("judged", "bare"):
        record(given, kind, steps=given.passes)
    seconds: dict[str, list[float]] = {"judged": [], "bare": []}
    for number in range(given.rounds + 1):
        for kind, values in seconds.items():
            duration, _ = replay(given, kind)
            values += [duration] if number else []
    medians = {kind: median(values) for kind, values in seconds.items()}
    print(f"{given.passes} passes: with a verdict {medians['judged']:.1f} s, without {medians['bare']:.1f} s, ", end="")
    print(f"ratio {medians['judged'] / medians['bare']:.3f}, medians of {given.rounds}")


def record(given: argparse.Namespace, kind: str, *, steps: int) -> None:
    """Record the job in a process of its own; `bare` keeps files without what the job computed."""
    folder = given.out / kind
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    settings = [f"--{name}={getattr(given, name)}" for name in ("hidden", "layers", "tokens")]
    job = [__file__, "--out", str(folder), f"--steps={steps}", *settings, "--job", kind]
    program = [
        sys.executable,
        *(["-m", "capture", "run", "--to", str(folder / "captures")] if kind == "judged" else []),
    ]
    _run([*program, *job])


def replay(given: argparse.Namespace, kind: str) -> tuple[float, dict[str, object]]:
    """Replay a recording with default options; return the seconds of the process and its verdict."""
    folder, logs = given.out / kind, given.out / "logs" / f"{kind}-{time.monotonic_ns()}"
    command = ["--inputs", str(folder / "captures"), "--model", str(folder / "model"), "--backend", "fsdp2", "--quiet"]
    began = time.monotonic()
    _run([sys.executable, "-m", "replay", *command, "--log-folder", str(logs)])
    seconds = time.monotonic() - began
    [run] = logs.glob("*/run.json")
    verdict: dict[str, object] = json.loads(run.read_text())["verdict"]
    return seconds, verdict


def train(given: argparse.Namespace, *, steps: int) -> None:
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
    model.save_pretrained(given.out / "model")
    rows = [
        {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        for ids in torch.randint(1024, (2 * steps, given.tokens))
    ]
    arguments = TrainingArguments(
        output_dir=str(given.out / "trainer"),
        per_device_train_batch_size=2,
        max_steps=steps,
        learning_rate=1e-4,
        warmup_steps=max(steps // 4, 1),
        lr_scheduler_type="cosine",
        bf16=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    with recording(model, given.out / "captures") if given.job == "bare" else nullcontext():
        Trainer(model=model, args=arguments, train_dataset=rows).train()


def _run(command: Sequence[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())
