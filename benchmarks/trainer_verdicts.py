"""Print the verdict on a clean bf16 Trainer job, and on the same job broken in three ways.

    python -m benchmarks trainer_verdicts --model llama-3.1-8b --num-layers 8 --inputs inputs/my-run

Each job trains with transformers' Trainer (bf16=True, sdpa, two micro-batches a step, clipped, a warm-up of a quarter
of the steps) on captured rows, from weights that are random by name, is recorded by `capture run`, and is replayed in a
process of its own with the options that say where the weights are. Prints two lines per job: its class, what the
Trainer logged last, the outcome and the first cause; and what the verdict covers.
"""

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Answers, make_parser, run_to_end

KINDS = {
    "clean": "nothing is broken",
    "gradients-x10": "every gradient is ten times too large",
    "detached": "no gradient goes through one layer's attention",
    "mean-of-means": "micro-batches of unequal tokens are averaged as means, which the replay does too",
}
EXPECTED = {"clean": "REPRODUCED", "gradients-x10": "DIFFERS", "detached": "DIFFERS", "mean-of-means": "REPRODUCED"}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", help="a preset, model folder or config.json. Default: the config beside the inputs")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--inputs", type=Path, default=Path("inputs/sample"))
    parser.add_argument("--steps", type=int, default=2, help="of two passes each. Default: %(default)s")
    parser.add_argument("--only", action="append", choices=KINDS)
    parser.add_argument("--job", choices=KINDS, help="train, in this process")
    given = parser.parse_args()
    if given.job:
        train(given)
        return 0
    answers = Answers(given, "trainer_verdicts")
    print(
        f"{answers.machine}\n{'job':<16}{'seconds':>8}  {'logged':<34}{'expected':<12}outcome, first cause", flush=True
    )
    num_wrong = 0
    for kind in given.only or KINDS:
        answer = answers.ask(kind, partial(record_and_replay, kind, given))
        print(f"{kind:<16}{answer['seconds']:8.0f}  {answer['logged']:<34}{EXPECTED[kind]:<12}", end="")
        print(answer["outcome"], answer["cause"])
        print(f"{'':<26}{answer['coverage']}", flush=True)
        num_wrong += answer["outcome"] != EXPECTED[kind]
    return int(num_wrong > 0)


def record_and_replay(kind: str, given: argparse.Namespace) -> dict[str, Any]:
    folder = (given.out or Path(tempfile.mkdtemp())).resolve() / kind
    began = time.monotonic()
    model = ["--model", given.model] if given.model else []
    model += ["--num-layers", str(given.num_layers)] if given.num_layers else []
    job = ["-m", "benchmarks", "trainer_verdicts", "--job", kind, "--steps", str(given.steps)]
    job += ["--inputs", str(given.inputs.resolve())]
    record = [sys.executable, "-m", "capture", "run", "--to", str(folder / "captures")]
    said = run_to_end([*record, *job, "--out", str(folder), *model])
    logged = [line.removeprefix("logged ") for line in said.splitlines() if line.startswith("logged ")]
    typed = ["--inputs", str(folder / "captures"), "--random-weights", *model, "--backend", "fsdp2"]
    typed += ["--quiet", "--log-folder", str(folder / "logs")]
    run_to_end([sys.executable, "-m", "replay", *typed], allowed=(0, 1))
    [run] = (folder / "logs").glob("*/run.json")
    verdict = json.loads(run.read_text())["verdict"]
    return {
        "seconds": time.monotonic() - began,
        "logged": logged[-1],
        "outcome": verdict["outcome"],
        "cause": next((f"{cause['sureness']}: {cause['sentence']}" for cause in verdict["causes"]), ""),
        "coverage": " ".join(f"{name} {value}" for name, value in verdict["coverage"].items()),
    }


def train(given: argparse.Namespace) -> None:
    """Train optimizer steps of two micro-batches each; print what the Trainer logged."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from actor_init.model import build_on_meta, find_model, materialise
    from actor_init.spec import ActorSpec
    from capture import capture_files, read_actor_config, read_micro_batch

    spec = ActorSpec(model=given.model, num_layers=given.num_layers, random_weights=True)
    captured = None if given.model else read_actor_config(given.inputs)
    source = find_model(spec, captured, str(given.inputs))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_on_meta(source.config, attention="sdpa", dtype=torch.float32)
    materialise(model, source.weights, device)
    rows: list[dict[str, Any]] = []
    num_passes = 2 * given.steps
    for path in capture_files(given.inputs):
        batch = read_micro_batch(path)
        if batch.trains and len(rows) < num_passes:
            keep = slice(0, None if len(rows) % 2 else max(batch.sequences_BS.shape[1] // 3, 4))  # unequal
            ids, mask = batch.sequences_BS[:, keep], batch.attention_mask_BS[:, keep]
            has_label = mask & mask.roll(1, dims=1)  # a row's first token has no token before it to predict it
            rows.append({"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~has_label, -100)})

    class Logged(TrainerCallback):  # type: ignore[misc]
        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "grad_norm" in logs:
                print(f"logged loss {logs['loss']:.4f} norm {logs['grad_norm']:.4f}", flush=True)

    if given.job == "gradients-x10":
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 10)
    if given.job == "detached":
        projection = model.get_submodule("model.layers.1.self_attn.o_proj")
        projection.register_forward_hook(lambda module, args, output: output.detach())
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(given.out / "trainer"),
            learning_rate=1e-5,
            logging_steps=1,
            max_steps=given.steps,
            warmup_steps=given.steps // 4,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            report_to=[],
            save_strategy="no",
            bf16=True,
            use_cpu=device.type == "cpu",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=lambda samples: samples[0],
        callbacks=[Logged()],
    )
    if given.job == "mean-of-means":
        trainer.model_accepts_loss_kwargs = False
    trainer.train()
