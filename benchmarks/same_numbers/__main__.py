"""Say whether a change of the code left every number of forty replays as it was, bit by bit.

    python -m benchmarks same_numbers main                    # 130 s of processor time for each tree
    python -m benchmarks same_numbers HEAD --only 'ddp' 'fsdp2, tp 2'
    python -m benchmarks same_numbers HEAD --list

It takes the tree of the commit BASE out of git, and runs it and the tree at hand side by side on a CPU, one thread a
process, over configurations of the sample that ships and of tiny jobs that BASE records (job.py). All values of
both logs are compared as they are written, but for those that comparison.py masks, each with a reason. It exits with 1
if a value differs, if nothing was compared, or if a replay ended otherwise than it is meant to; then the logs are kept.
"""

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.same_numbers.comparison import compare, read_log
from benchmarks.same_numbers.trees import LIMIT, SAMPLE, Ended, Tree, opened_trees

MOST_SHOWN = 12  # differences of a configuration
TWO_RANKS = "torchrun --standalone --nproc-per-node 2 -m "


class Configuration(NamedTuple):
    """A replay of the first three inputs of the sample, or of a job of job.py."""

    options: str
    job: str = SAMPLE
    launcher: str = ""  # --tp and --ring start their ranks themselves
    exit_code: int = 0
    damaged: int | None = None  # which of the inputs is cut off

    @property
    def command(self) -> str:
        which = "--max-inputs 3" if self.job == SAMPLE else "--model model"
        return f"{self.launcher}replay --inputs inputs {which} --log-folder logs --timeout {LIMIT} {self.options}"


CONFIGURATIONS = {
    # the sample: a Llama of four layers, rows of up to 978 tokens, padded on both sides
    "zero 0": Configuration("--zero-stage 0 --step --learning-rate 1e-3 --trace"),
    "zero 0, no optimizer": Configuration("--zero-stage 0 --optimizer none --no-packing"),
    "zero 1": Configuration("--max-inputs 4"),
    "zero 1, steps": Configuration("--step --learning-rate 1e-3 --max-norm 0.5 --grad-accumulation 2 --max-inputs 4"),
    "zero 1, compiled": Configuration("--compile --max-inputs 2"),
    "zero 1, rollout passes": Configuration("--passes rollout --max-inputs 2"),
    "zero 1, tp 2": Configuration("--tp 2 --max-inputs 2 --step"),
    "zero 1, ring 2": Configuration("--ring 2 --max-inputs 2 --loss sft"),
    "zero 1, damaged": Configuration("--verdict strict --pad-tokens 64", damaged=2, exit_code=1),
    "zero 2": Configuration("--zero-stage 2 --gradient-checkpointing --loss sft"),
    "zero 2, data ranks": Configuration("--zero-stage 2 --shuffle-inputs --grad-accumulation 2", launcher=TWO_RANKS),
    "zero 3": Configuration("--zero-stage 3 --no-packing --step --optimizer sgd --profile --max-inputs 2"),
    "zero 3, data ranks": Configuration("--zero-stage 3 --step --shuffle-inputs", launcher=TWO_RANKS),
    "zero 3, tp 2": Configuration("--zero-stage 3 --tp 2 --max-inputs 2 --no-packing"),
    "fsdp2": Configuration("--backend fsdp2 --step --learning-rate 1e-3 --trace"),
    "fsdp2, stage 2": Configuration("--backend fsdp2 --zero-stage 2 --no-packing"),
    "fsdp2, compiled": Configuration("--backend fsdp2 --compile --max-inputs 2"),
    "fsdp2, eager": Configuration("--backend fsdp2 --zero-stage 2 --attention eager --profile --max-inputs 2"),
    "fsdp2, tp 2": Configuration("--backend fsdp2 --tp 2 --max-inputs 2 --step --trace"),
    "fsdp2, tp 2, sequence": Configuration("--backend fsdp2 --tp 2 --sequence-parallel --max-inputs 2"),
    "fsdp2, ring 2": Configuration("--backend fsdp2 --ring 2 --max-inputs 2 --dtype bf16 --trace"),
    "fsdp2, data ranks": Configuration("--backend fsdp2 --step --pad-to longest --no-packing", launcher=TWO_RANKS),
    "ddp": Configuration("--backend ddp --trace"),
    "ddp, steps": Configuration("--backend ddp --step --grad-accumulation 2 --window mean-of-means --max-inputs 4"),
    "ddp, compiled": Configuration("--backend ddp --compile --gradient-checkpointing --max-inputs 2"),
    "ddp, in chunks": Configuration("--backend ddp --head chunks --no-packing --loss sft"),
    "ddp, data ranks": Configuration("--backend ddp --grad-accumulation 2 --step", launcher=TWO_RANKS),
    # a GPT-2 with dropout
    "dropout, ddp": Configuration("--backend ddp --no-packing --loss sft --step --max-norm 1", "dropout"),
    "dropout, zero 1": Configuration("--no-packing --loss sft --dtype bf16", "dropout"),
    "dropout, fsdp2": Configuration("--backend fsdp2 --loss sft --grad-accumulation 2 --trace", "dropout"),
    "no states, ddp": Configuration("--backend ddp --no-packing --loss sft", "no-states"),
    "no states, zero 2": Configuration("--zero-stage 2 --no-packing --step --trace", "no-states"),
    # a Llama with what the losses of PPO and DPO need
    "policy, ddp": Configuration("--backend ddp --loss policy --step --learning-rate 1e-3 --max-norm 1", "policy"),
    "policy, zero 1": Configuration("--loss policy --kl-coefficient 0.1 --dtype bf16", "policy"),
    "policy, fsdp2": Configuration("--backend fsdp2 --loss policy --second-opinion --dtype bf16", "policy"),
    "dpo": Configuration("--backend ddp --loss dpo --label-smoothing 0.1", "policy"),
    "own function": Configuration("--backend ddp --loss own.py:loss", "policy"),
    "own function, zero 3": Configuration("--zero-stage 3 --loss own.py:entropy --gradient-checkpointing", "policy"),
    # a pass that fails between others
    "beyond, fsdp2": Configuration("--backend fsdp2 --loss sft --pick-inputs 0,3,1", "beyond", exit_code=1),
    "too long, zero 1": Configuration("--loss sft --no-packing --pick-inputs 0,3,1", "too-long", exit_code=1),
}
OWN = """
def loss(inputs):
    ratio = (inputs.log_probs_BA - inputs.of_tokens("old_log_probs")).exp()
    return -(ratio * inputs.of_tokens("advantages"))[inputs.action_mask_BA].mean()


def entropy(inputs):
    return loss(inputs) - 0.1 * inputs.entropies()[inputs.action_mask_BA].mean()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="a commit of this repository")
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the configurations and end")
    arguments = parser.parse_args()
    if arguments.list:
        for name in arguments.only:
            print(f"{name:24} {CONFIGURATIONS[name].command}")
        return 0
    began, home = time.monotonic(), Path(tempfile.mkdtemp(prefix="same-numbers-"))
    trees = opened_trees(arguments.base, home)
    different = [name for name in arguments.only if not is_same(name, trees)]
    num_same = len(arguments.only) - len(different)
    print(f"{num_same} of {len(arguments.only)} configurations are the same, in {time.monotonic() - began:.0f} s")
    if different:
        print(f"not the same: {', '.join(different)}; the logs are in {home}")
        return 1
    shutil.rmtree(home)
    return 0


def replay(tree: Tree, name: str) -> tuple[Ended, Mapping[str, Any]]:
    """Replay a copy of the inputs, beside which a replay keeps what it measured. Returns its log, too."""
    configuration, folder = CONFIGURATIONS[name], tree.home / re.sub("[^a-z0-9]+", "-", name)
    shutil.copytree(tree.home.parent / "sources" / configuration.job, folder)
    (folder / "own.py").write_text(OWN)
    if configuration.damaged is not None:
        path = sorted((folder / "inputs").glob("*.pkl"))[configuration.damaged]
        path.write_bytes(path.read_bytes()[:-20])
    ended = tree.run(configuration.command, folder)
    logs = list((folder / "logs").glob("*/run.json"))
    return ended, read_log(logs[0].parent) if logs else {}


def is_same(name: str, trees: Sequence[Tree]) -> bool:
    """Replay one configuration in both trees at a time, and print what came of it."""
    began, meant = time.monotonic(), CONFIGURATIONS[name].exit_code
    with ThreadPoolExecutor() as threads:
        runs = list(threads.map(lambda tree: replay(tree, name), trees))
    comparison = compare(runs[0][1], runs[1][1])
    is_same = comparison.is_same and all(ended.exit_code == meant for ended, _ in runs)
    said = f"{comparison.num_compared:5,} values, {'the same' if is_same else 'NOT THE SAME'}"
    print(f"{name:24} {said}, {time.monotonic() - began:.0f} s", flush=True)
    for path, in_base, here in comparison.differences[:MOST_SHOWN]:
        print(f"    {path}: {in_base or 'not there'} in BASE, {here or 'not there'} here")
    if (num_more := len(comparison.differences) - MOST_SHOWN) > 0:
        print(f"    and {num_more} more")
    for tree, (ended, _) in zip(trees, runs, strict=True):
        if ended.exit_code != meant:
            print(f"    {tree.home.name} ended with {ended.exit_code}, not {meant}:")
            print(*(f"        {line}" for line in (ended.output + ended.errors).splitlines()[-8:]), sep="\n")
    return is_same


if __name__ == "__main__":
    sys.exit(main())
