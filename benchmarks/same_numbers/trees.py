"""Two trees of the code side by side, in warm processes: that of a commit, taken out of git, and the one at hand."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

ROOT = Path(__file__).parents[2]
LIMIT = 600  # seconds for a replay, and in which a rank of it has to go on: compiling takes long on a busy machine
SAMPLE = "sample"


class Ended(NamedTuple):
    exit_code: int
    output: str
    errors: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """A tree of the code, and a folder for what it writes."""

    code: Path
    home: Path
    environment: Mapping[str, str]

    @classmethod
    def opened(cls, code: Path, home: Path) -> Self:
        """Start the tree's own warm processes (tests/warm), which import it once and fork for each replay."""
        home.mkdir()
        # The tree's own: it takes hold of private names, which may be called otherwise in the other tree.
        shutil.copy(code / "benchmarks" / "same_numbers" / "first_import.py", home)
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
        asking = [sys.executable, "-c", "from tests.warm import warm_bin; print(warm_bin(('first_import',)))"]
        asked = subprocess.run(asking, cwd=code, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        environment["PATH"] = f"{asked.stdout.strip()}{os.pathsep}{environment['PATH']}"
        tree = cls(code=code, home=home, environment=environment)
        # two runs of one tree would always be the same
        said = tree.run("python -c 'import replay, actor_init, capture; print(replay, actor_init, capture)'", home)
        assert said.output.count(f"from '{code}/") == 3, f"not from {code}: {said.output}{said.errors}"
        return tree

    def run(self, command: str, folder: Path) -> Ended:
        """Run a program to its end; after LIMIT it is killed."""
        process = subprocess.Popen(
            shlex.split(command),
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
        return Ended(process.returncode, output, errors)


def opened_trees(base: str, home: Path) -> Sequence[Tree]:
    """Take BASE out of git, open it and the tree at hand, and have BASE record the jobs in `home/sources`."""
    code, sources = home / "code-of-base", home / "sources"
    code.mkdir()
    archive = subprocess.run(["git", "archive", base], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x"], cwd=code, input=archive.stdout, check=True)
    with ThreadPoolExecutor() as threads:
        trees = list(threads.map(Tree.opened, (code, ROOT), (home / "base", home / "here")))
    recorded = trees[0].run(f"python {Path(__file__).with_name('job.py')} {sources}", home)
    assert recorded.exit_code == 0, recorded.errors
    shutil.copytree(code / "inputs" / SAMPLE, sources / SAMPLE / "inputs")
    return trees
