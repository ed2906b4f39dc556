"""Say whether a change of the code left every number of forty replays as it was, bit by bit.

    python -m benchmarks.same_numbers main                    # about five minutes on two cores
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

from benchmarks.same_numbers.comparison import compare, read_run

ROOT = Path(__file__).parents[2]
LIMIT = 600  # seconds for one replay, and in which a rank of it has to go on: compiling takes long on a busy machine
MOST_SHOWN = 40  # differences of a configuration
DATA_RANKS = "torchrun --standalone --nproc-per-node 2 -m "


class Configuration(NamedTuple):
    """A replay of the first inputs of the sample, or of a job of job.py."""

    options: str
    job: str = ""  # "": the sample
    launcher: str = ""  # --tp and --ring start their ranks themselves
    exit_code: int = 0
    damaged: int | None = None  # which of the inputs is cut off

    @property
    def command(self) -> str:
        model = " --model model" if self.job else ""
        most = "" if self.job or "--pick-inputs" in self.options else " --max-inputs 3"
        return f"{self.launcher}replay --inputs inputs{model}{most} --log-folder logs --timeout {LIMIT} {self.options}"


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
    "zero 2": Configuration("--zero-stage 2 --gradient-checkpointing --loss sft"),
    "zero 2, data ranks": Configuration("--zero-stage 2 --shuffle-inputs --grad-accumulation 2", launcher=DATA_RANKS),
    "zero 3": Configuration("--zero-stage 3 --no-packing --step --optimizer sgd --momentum 0.9 --profile --max-inputs 2"),
    "zero 3, data ranks": Configuration("--zero-stage 3 --step --shuffle-inputs", launcher=DATA_RANKS),
    "zero 3, tp 2": Configuration("--zero-stage 3 --tp 2 --max-inputs 2 --no-packing"),
    "fsdp2": Configuration("--backend fsdp2 --step --learning-rate 1e-3 --trace"),
    "fsdp2, stage 2": Configuration("--backend fsdp2 --zero-stage 2 --no-packing --reverse-rows"),
    "fsdp2, compiled": Configuration("--backend fsdp2 --compile --max-inputs 2"),
    "fsdp2, checkpointing": Configuration("--backend fsdp2 --gradient-checkpointing --attention eager --profile --max-inputs 2"),
    "fsdp2, tp 2": Configuration("--backend fsdp2 --tp 2 --max-inputs 2 --step --details"),
    "fsdp2, tp 2, sequence": Configuration("--backend fsdp2 --tp 2 --sequence-parallel --max-inputs 2"),
    "fsdp2, ring 2": Configuration("--backend fsdp2 --ring 2 --max-inputs 2 --dtype bf16 --trace"),
    "fsdp2, data ranks": Configuration("--backend fsdp2 --step --pad-to longest --no-packing", launcher=DATA_RANKS),
    "ddp": Configuration("--backend ddp --trace --details"),
    "ddp, steps": Configuration("--backend ddp --step --grad-accumulation 2 --window mean-of-means --max-inputs 4"),
    "ddp, compiled": Configuration("--backend ddp --compile --gradient-checkpointing --max-inputs 2"),
    "ddp, fused": Configuration("--backend ddp --kernels fused --whole-logits --no-packing --loss sft"),
    "ddp, data ranks": Configuration("--backend ddp --grad-accumulation 2 --step", launcher=DATA_RANKS),
    "zero 1, damaged": Configuration("--verdict strict --pad-tokens 64", damaged=2),
    # a GPT-2 with dropout
    "dropout, ddp": Configuration("--backend ddp --no-packing --loss sft --step --learning-rate 1e-3 --max-norm 1", "dropout"),
    "dropout, zero 1": Configuration("--no-packing --loss sft --dtype bf16", "dropout"),
    "dropout, fsdp2 packed": Configuration("--backend fsdp2 --loss sft --grad-accumulation 2 --trace", "dropout"),
    "no states, ddp": Configuration("--backend ddp --no-packing --loss sft", "no-states"),
    "no states, zero 2": Configuration("--zero-stage 2 --no-packing --step --details", "no-states"),
    # a Llama with the objective of PPO, and pairs for that of DPO
    "policy, ddp": Configuration("--backend ddp --loss policy --step --learning-rate 1e-3 --max-norm 1e9", "policy"),
    "policy, zero 1": Configuration("--loss policy --kl-coefficient 0.1 --reduction window-tokens --dtype bf16", "policy"),
    "policy, fsdp2": Configuration("--backend fsdp2 --loss policy --dual-clip 3 --second-opinion --dtype bf16", "policy"),
    "dpo": Configuration("--backend ddp --loss dpo --label-smoothing 0.1", "policy"),
    "own function": Configuration("--backend ddp --loss own.py:loss", "policy"),
    "own function, zero 3": Configuration("--zero-stage 3 --loss own.py:entropy --gradient-checkpointing", "policy"),
    # a pass that fails between others
    "beyond, fsdp2": Configuration("--backend fsdp2 --loss sft --pick-inputs 0,3,1", "beyond", exit_code=1),
    "too long, zero 1": Configuration("--loss sft --no-packing --pick-inputs 0,3,1", "too-long", exit_code=1),
}
OWN = '''
def loss(inputs):
    ratio = (inputs.log_probs_BA - inputs.of_tokens("old_log_probs")).exp()
    return -(ratio * inputs.of_tokens("advantages"))[inputs.action_mask_BA].mean()


def entropy(inputs):
    return loss(inputs) - 0.1 * inputs.entropies()[inputs.action_mask_BA].mean()
'''


class Run(NamedTuple):
    exit_code: int
    output: str
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """A tree of the code, a folder for what it writes, and its processes' variables."""

    code: Path
    home: Path
    environment: Mapping[str, str]

    @classmethod
    def opened(cls, code: Path, home: Path) -> Self:
        """Start the tree's own warm processes (tests/warm), which import it once and fork for each replay."""
        home.mkdir()
        # nothing of the user's but where to find programs
        environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": str(code),
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
        starting = [sys.executable, "-c", "from tests.warm import warm_bin; print(warm_bin())"]
        # no pipe for stderr: the server of the warm processes would hold it open
        programs = subprocess.run(starting, cwd=code, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        environment["PATH"] = f"{programs.stdout.strip()}{os.pathsep}{environment['PATH']}"
        tree = cls(code=code, home=home, environment=environment)
        tree._check_imports()
        return tree

    def _check_imports(self) -> None:
        """Two runs of one tree would always be the same."""
        asking = "import replay, actor_init, capture; print(*(m.__path__[0] for m in (replay, actor_init, capture)))"
        said = self.process(["python", "-c", asking], self.home).stdout.split()
        assert said == [str(self.code / name) for name in ("replay", "actor_init", "capture")], f"not {self.code}: {said}"

    def process(self, command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, or kill it and all that it started."""
        with subprocess.Popen(
            command,
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=LIMIT)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(command, process.returncode, output)

    def replay(self, name: str, configuration: Configuration, sources: Path) -> Run:
        """Replay a copy of the inputs: what a replay measures, it keeps beside them."""
        folder = self.home / re.sub("[^a-z0-9]+", "-", name)
        job = configuration.job or "sample"
        shutil.copytree(sources / job, folder)
        (folder / "own.py").write_text(OWN)
        if configuration.damaged is not None:
            path = sorted((folder / "inputs").glob("*.pkl"))[configuration.damaged]
            path.write_bytes(path.read_bytes()[:-20])
        process = self.process(shlex.split(configuration.command), folder)
        logs = list((folder / "logs").glob("*/run.json"))
        read = read_run(logs[0].parent) if logs else {}
        return Run(process.returncode, process.stdout, read)


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
    home = Path(tempfile.mkdtemp(prefix="same-numbers-"))
    began = time.monotonic()
    trees, sources = prepare(arguments.base, home)
    different = [name for name in arguments.only if not is_same(name, trees, sources)]
    num_same = len(arguments.only) - len(different)
    print(f"{num_same} of {len(arguments.only)} configurations are the same, in {time.monotonic() - began:.0f} s")
    if not different:
        shutil.rmtree(home)
        return 0
    print(f"others: {', '.join(different)}. Their logs are in {home}")
    return 1


def prepare(base: str, home: Path) -> tuple[Sequence[Tree], Path]:
    """Take BASE out of git, open both trees, and have BASE record the jobs. Returns BASE's tree first."""
    code, sources = home / "base-code", home / "sources"
    code.mkdir()
    archive = subprocess.run(["git", "archive", base], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x"], cwd=code, input=archive.stdout, check=True)
    with ThreadPoolExecutor() as threads:
        trees = list(threads.map(Tree.opened, (code, ROOT), (home / "base", home / "here")))
    recorded = trees[0].process(["python", str(Path(__file__).with_name("job.py")), str(sources)], home)
    assert recorded.returncode == 0, recorded.stdout
    shutil.copytree(code / "inputs" / "sample", sources / "sample" / "inputs")
    return trees, sources


def is_same(name: str, trees: Sequence[Tree], sources: Path) -> bool:
    """Run one configuration in both trees, and print what came of it."""
    configuration = CONFIGURATIONS[name]
    began = time.monotonic()
    with ThreadPoolExecutor() as threads:
        runs = list(threads.map(lambda tree: tree.replay(name, configuration, sources), trees))
    base, here = runs
    comparison = compare(base.values, here.values)
    has_run = all(run.exit_code == configuration.exit_code for run in runs)
    word = "the same" if comparison.is_same and has_run else "NOT THE SAME"
    print(f"{name:24} {comparison.num_compared:6,} values, {word}, {time.monotonic() - began:.0f} s", flush=True)
    for difference in comparison.differences[:MOST_SHOWN]:
        print(f"    {difference.path}: {difference.base} in BASE, {difference.here} here")
    if len(comparison.differences) > MOST_SHOWN:
        print(f"    and {len(comparison.differences) - MOST_SHOWN} more")
    for tree, run in zip(("BASE", "here"), runs, strict=True):
        if run.exit_code != configuration.exit_code:
            last = "\n        ".join(run.output.splitlines()[-8:])
            print(f"    exit code {run.exit_code} of {tree}, not {configuration.exit_code}:\n        {last}")
    return comparison.is_same and has_run


if __name__ == "__main__":
    sys.exit(main())
