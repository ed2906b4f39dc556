"""Try capture and replay in environments with other releases of torch, transformers and DeepSpeed, and print a table.

    python -m benchmarks version_table old/bin/python new/bin/python --results stacks.json
    python -m benchmarks version_table old/bin/python --results stacks.json --only capture deepspeed
    python -m benchmarks version_table --results stacks.json      # prints what is there

Each environment needs this project (`pip install --no-deps -e .`) and what is to be tried. Results are added to the
file as they come, by the versions that were found; what is there is not tried again. A replay counts as `works` if the
sample's first pass is REPRODUCED, and a recording if it has every pass and its checksums hold. docs/trust.md has the
table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.harness import Ended, markdown, run
from replay.output.text import join_lines

PACKAGES = ("torch", "transformers", "deepspeed")
JOB = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    ids = torch.randint(0, 64, (2, 12))
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
REPLAY = ("--max-inputs", "1", "--dtype", "fp32")
TRIALS: Mapping[str, Sequence[str]] = {
    "capture": (),
    "deepspeed": REPLAY,
    "fsdp2": (*REPLAY, "--backend", "fsdp2"),
    "ddp": (*REPLAY, "--backend", "ddp"),
    "tp deepspeed": (*REPLAY, "--tp", "2"),
    "tp fsdp2": (*REPLAY, "--backend", "fsdp2", "--tp", "2"),
    "ring": (*REPLAY, "--ring", "2"),
    "compile": (*REPLAY, "--backend", "ddp", "--compile"),
    "parity": ("parity", "--matrix", "quick", "--max-inputs", "2"),
}


def typed(python: str, arguments: Sequence[str], folder: Path, limit: float) -> Ended:
    """Run `python ARGUMENTS` in `folder`, for `limit` seconds at most."""
    own = str(Path(python).absolute())
    ended = run([own, *arguments], folder=folder, limit=limit)
    return ended._replace(output=ended.output.replace(own, "python"))


def stack_of(python: str) -> str:
    """Name an environment by its versions: `torch 2.8.0, transformers 4.57.6, deepspeed 0.16.5, python 3.11.7`."""
    code = f"""
import platform
from importlib.metadata import PackageNotFoundError, version
for name in {PACKAGES}:
    try:
        print(name, version(name).partition("+")[0], end=", ")
    except PackageNotFoundError:
        print("no", name, end=", ")
print("python", platform.python_version())"""
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def outcome(trial: str, python: str, limit: float) -> str:
    """Say `works`, `refused: LINE` or `fails: WHY`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if trial == "capture":
            (folder / "job.py").write_text(JOB)
            recorded = typed(python, ["-m", "capture", "run", "--to", "kept", "job.py"], folder, limit)
            checked = typed(python, ["-m", "capture", "check", "kept"], folder, limit)
            if recorded.exit_code == checked.exit_code == 0 and "2 files" in checked.output:
                return "works"
            return f"fails: {last_line(recorded.output + checked.output)}"
        done = typed(python, ["-m", "replay", *TRIALS[trial]], folder, limit)
    if done.exit_code is None:
        return f"fails: not finished within {limit:.0f} s"
    if done.exit_code == 0 and (trial == "parity" or "REPRODUCED: 1 of 1 pass" in done.output):
        return "works"
    said = [line.removeprefix("replay: ") for line in done.output.splitlines() if line.startswith("replay: ")]
    said = [line for line in said if not line.endswith("starting them")] or [last_line(done.output)]
    return f"{'refused' if done.exit_code == 2 else 'fails'}: {join_lines(said[0])[:300]}"


def last_line(output: str) -> str:
    return ([line for line in output.splitlines() if line.strip()] or ["it said nothing"])[-1]


def table(results: Mapping[str, Mapping[str, str]]) -> str:
    """Format the results as Markdown, with the lines of what does not work below."""
    trials = list(TRIALS)
    rows: list[list[str]] = []
    notes: list[str] = []
    for stack, found in results.items():
        rows.append([stack])
        for trial in trials:
            word, _, why = found.get(trial, "not tried").partition(": ")
            if why and why not in notes:
                notes.append(why)
            rows[-1].append(f"{word} [{notes.index(why) + 1}]" if why else word)
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, start=1)]
    return "\n".join([markdown([["stack", *trials], *rows]), "", *numbered])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", help="Interpreters of the environments.")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="For one trial.")
    given = parser.parse_args()
    results: dict[str, dict[str, str]] = json.loads(given.results.read_text()) if given.results.exists() else {}
    for python in given.pythons:
        own = results.setdefault(stack_of(python), {})
        for trial in given.only:
            if trial not in own:
                own[trial] = outcome(trial, python, given.limit)
                print(f"{stack_of(python)}: {trial}: {own[trial]}", file=sys.stderr, flush=True)
                given.results.write_text(json.dumps(results, indent=1))
    print(f"micro-replay {version('micro-replay')}\n\n{table(results)}")
    return 0
