"""Minimise ten planted failures, and count the runs that each takes.

    python benchmarks/planted_failures.py --only hang

tests/helpers/planted_failures.py has the failures, and how small each has to become. The exit code is 1 if one is left
larger, or took more than 40 runs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from actor_init.as_json import from_json
from capture import capture_files
from capture.file_format.capture_file import read_call
from replay.commands.minimise.cutting import CaptureShape
from replay.commands.minimise.trials import MinimiseTrial
from tests.helpers.planted_failures import PLANTED, Planted

ROOT = Path(__file__).resolve().parent.parent
MOST_RUNS = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the name of a failure")
    parser.add_argument("--keep", type=Path, help="a folder for the logs")
    arguments = parser.parse_args()
    print("| failure | runs | files | rows | tokens | layers | processes | options | repro.py | s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    is_right = True
    with tempfile.TemporaryDirectory(prefix="planted-") as home:
        for number, (name, planted) in enumerate(PLANTED.items()):
            if arguments.only in name:
                is_right &= minimised(name, planted, (arguments.keep or Path(home)) / str(number))
    return 0 if is_right else 1


def minimised(name: str, planted: Planted, home: Path) -> bool:
    """Minimise one failure, print its row, and tell whether it became as small as it can."""
    home.mkdir(parents=True)
    inputs = planted.inputs(home)
    typed = [*planted.minimise, *planted.arguments, "--inputs", str(inputs), "--log-folder", str(home / "logs")]
    began = time.monotonic()
    with (home / "printed.txt").open("w") as printed:
        subprocess.run(
            [sys.executable, "-m", "replay", "minimise", *typed], cwd=ROOT, stdout=printed, stderr=printed, check=False
        )
    seconds = time.monotonic() - began
    (folder,) = (home / "logs").glob("*-minimise")
    result = json.loads((folder / "minimise.json").read_text())["result"]
    trials = [from_json(MinimiseTrial, trial, source=str(folder)) for trial in result["trials"]]
    num_runs = sum(trial.num_runs for trial in trials)
    if not (folder / "smallest").is_dir():
        print(f"| {name} | {num_runs} | failed, see {home / 'printed.txt'} |", flush=True)
        return False
    shapes = [CaptureShape.read(read_call(path)) for path in capture_files(folder / "smallest" / "inputs")]
    left = next(trial for trial in reversed(trials) if trial.what == "smallest").candidate
    rows, tokens = sum(one.num_rows for one in shapes), sum(one.num_rows * one.num_columns for one in shapes)
    layers = left.spec.actor.num_layers or result["num_layers"] or 0
    own = [word for word in left.arguments if word.startswith("--") and word not in ("--inputs", "--num-layers")]
    options = [word for word in own if word not in planted.options and word not in ("--backend", "--timeout")]
    shown = "shows it" if (folder / "smallest" / "repro.py").is_file() else "none"
    sizes = (num_runs, len(shapes), rows, tokens, layers, left.num_processes)
    print(
        f"| {name} | {' | '.join(map(str, sizes))} | {' '.join(own) or 'none'} | {shown} | {seconds:.0f} |", flush=True
    )
    most = (MOST_RUNS, planted.files, planted.rows, planted.tokens, planted.layers, planted.processes)
    is_small = all(size <= bound for size, bound in zip(sizes, most, strict=True))
    return is_small and not options and result["failure"]["kind"] == planted.kind


if __name__ == "__main__":
    sys.exit(main())
