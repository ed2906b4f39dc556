"""Say whether a change of the code left every number of forty replays as it was, bit by bit.

    python -m benchmarks.same_numbers main                    # 130 s of processor time for each tree
    python -m benchmarks.same_numbers HEAD --only 'ddp' 'fsdp2, tp 2'
    python -m benchmarks.same_numbers HEAD --list

It takes the tree of the commit BASE out of git, and runs it and the tree at hand side by side on a CPU, one thread a
process, over configurations of the sample that ships and of tiny jobs that BASE records (job.py). All values of
both logs are compared as they are written, but for those that comparison.py masks, each with a reason. It exits with 1
if a value differs, if nothing was compared, or if a replay ended otherwise than it is meant to; then the logs are kept.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks.same_numbers.comparison import compare, read_log

ROOT = Path(__file__).parents[2]
LIMIT = 600  # seconds for a replay, and in which a rank of it has to go on: compiling takes long on a busy machine
MOST_SHOWN = 12  # differences of a configuration
SAMPLE = "sample"
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
    "zero 0": Configuration("--zero-stage 0 --step --learning-rate 1e-3 --details"),
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
    "fsdp2, stage 2": Configuration("--backend fsdp2 --zero-stage 2 --no-packing --reverse-rows"),
    "fsdp2, compiled": Configuration("--backend fsdp2 --compile --max-inputs 2"),
    "fsdp2, eager": Configuration("--backend fsdp2 --zero-stage 2 --attention eager --profile --max-inputs 2"),
    "fsdp2, tp 2": Configuration("--backend fsdp2 --tp 2 --max-inputs 2 --step --details"),
    "fsdp2, tp 2, sequence": Configuration("--backend fsdp2 --tp 2 --sequence-parallel --max-inputs 2"),
    "fsdp2, ring 2": Configuration("--backend fsdp2 --ring 2 --max-inputs 2 --dtype bf16 --trace"),
    "fsdp2, data ranks": Configuration("--backend fsdp2 --step --pad-to longest --no-packing", launcher=TWO_RANKS),
    "ddp": Configuration("--backend ddp --trace --details"),
    "ddp, steps": Configuration("--backend ddp --step --grad-accumulation 2 --window mean-of-means --max-inputs 4"),
    "ddp, compiled": Configuration("--backend ddp --compile --gradient-checkpointing --max-inputs 2"),
    "ddp, fused": Configuration("--backend ddp --kernels fused --whole-logits --no-packing --loss sft"),
    "ddp, data ranks": Configuration("--backend ddp --grad-accumulation 2 --step", launcher=TWO_RANKS),
    # a GPT-2 with dropout
    "dropout, ddp": Configuration("--backend ddp --no-packing --loss sft --step --max-norm 1", "dropout"),
    "dropout, zero 1": Configuration("--no-packing --loss sft --dtype bf16", "dropout"),
    "dropout, fsdp2": Configuration("--backend fsdp2 --loss sft --grad-accumulation 2 --trace", "dropout"),
    "no states, ddp": Configuration("--backend ddp --no-packing --loss sft", "no-states"),
    "no states, zero 2": Configuration("--zero-stage 2 --no-packing --step --details", "no-states"),
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


class Ended(NamedTuple):
    exit_code: int
    output: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """A tree of the code, and a folder for what it writes."""

    home: Path
    environment: Mapping[str, str]

    @classmethod
    def opened(cls, code: Path, home: Path) -> Self:
        """Start the tree's own warm processes (tests/warm), which import it once and fork for each replay."""
        home.mkdir()
        # torch seeds each process by chance, which decides masks of dropout where the job's random states are not known
        (home / "seeded.py").write_text("import torch\n\ntorch.manual_seed(0)\n")
        # nothing of the user's but where to find programs; as for inductor, what tests/conftest.py says
        environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": f"{code}{os.pathsep}{home}",
            "HOME": str(home),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            "WARM_HOME": str(home),
            "WARM_OWNER": str(os.getpid()),
        }
        # no pipe for stderr: the server of the warm processes would hold it open
        asking = [sys.executable, "-c", "from tests.warm import warm_bin; print(warm_bin(('seeded',)))"]
        asked = subprocess.run(asking, cwd=code, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        environment["PATH"] = f"{asked.stdout.strip()}{os.pathsep}{environment['PATH']}"
        tree = cls(home=home, environment=environment)
        # two runs of one tree would always be the same
        said = tree.run("python -c 'import replay, actor_init, capture; print(replay, actor_init, capture)'", home)
        assert said.output.count(f"from '{code}/") == 3, f"not from {code}: {said.output}"
        return tree

    def run(self, command: str, folder: Path) -> Ended:
        """Run a program to its end; after LIMIT it is killed."""
        process = subprocess.Popen(
            shlex.split(command),
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return Ended(process.returncode, output)

    def replay(self, name: str, sources: Path) -> tuple[Ended, Mapping[str, Any]]:
        """Replay a copy of the inputs, beside which a replay keeps what it measured. Returns its log, too."""
        configuration, folder = CONFIGURATIONS[name], self.home / re.sub("[^a-z0-9]+", "-", name)
        shutil.copytree(sources / configuration.job, folder)
        (folder / "own.py").write_text(OWN)
        if configuration.damaged is not None:
            path = sorted((folder / "inputs").glob("*.pkl"))[configuration.damaged]
            path.write_bytes(path.read_bytes()[:-20])
        ended = self.run(configuration.command, folder)
        logs = list((folder / "logs").glob("*/run.json"))
        return ended, read_log(logs[0].parent) if logs else {}


def opened_trees(base: str, home: Path) -> Sequence[Tree]:
    """Take BASE out of git, open it and the tree at hand, and have BASE record the jobs in `home/sources`."""
    code, sources = home / "code-of-base", home / "sources"
    code.mkdir()
    archive = subprocess.run(["git", "archive", base], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x"], cwd=code, input=archive.stdout, check=True)
    with ThreadPoolExecutor() as threads:
        trees = list(threads.map(Tree.opened, (code, ROOT), (home / "base", home / "here")))
    recorded = trees[0].run(f"python {Path(__file__).with_name('job.py')} {sources}", home)
    assert recorded.exit_code == 0, recorded.output
    shutil.copytree(code / "inputs" / "sample", sources / SAMPLE / "inputs")
    return trees


def is_same(name: str, trees: Sequence[Tree]) -> bool:
    """Replay one configuration in both trees at a time, and print what came of it."""
    began, meant = time.monotonic(), CONFIGURATIONS[name].exit_code
    with ThreadPoolExecutor() as threads:
        runs = list(threads.map(lambda tree: tree.replay(name, tree.home.parent / "sources"), trees))
    comparison = compare(*(log for _, log in runs))
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
            print(*(f"        {line}" for line in ended.output.splitlines()[-8:]), sep="\n")
    return is_same


if __name__ == "__main__":
    sys.exit(main())
