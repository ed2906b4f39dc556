"""Minimise ten planted failures, and count the runs that each takes.

    python -m benchmarks planted_failures --only hang

tests/helpers/planted_failures.py has the failures, and how small each has to become. The exit code is 1 if one is left
larger, or took more than 40 runs.
"""

import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from actor_init.as_json import from_json
from benchmarks.harness import Answers, make_parser, markdown, run
from capture import capture_files
from capture.file_format.capture_file import read_call
from replay.commands.minimise.cutting import CaptureShape
from replay.commands.minimise.trials import MinimiseTrial
from tests.helpers.planted_failures import PLANTED, Planted

MOST_RUNS = 40
COLUMNS = ("failure", "runs", "files", "rows", "tokens", "layers", "processes", "options", "repro.py", "s")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="part of the name of a failure")
    parser.add_argument("--keep", type=Path, help="a folder for the logs")
    given = parser.parse_args()
    answers = Answers(given, "planted_failures")
    print(answers.machine)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="planted-") as home:
        for number, (name, planted) in enumerate(PLANTED.items()):
            if given.only in name:
                folder = (given.keep or Path(home)) / str(number)
                rows.append(answers.ask(name, partial(minimised, name, planted, folder)))
                print(" | ".join(rows[-1]["row"]), flush=True)
    print(markdown([COLUMNS, *(one["row"] for one in rows)]))
    return 0 if all(one["is_right"] for one in rows) else 1


def minimised(name: str, planted: Planted, home: Path) -> dict[str, Any]:
    """Minimise one failure; return its row, and whether it became as small as it can."""
    home.mkdir(parents=True)
    inputs = planted.inputs(home)
    typed = [*planted.minimise, *planted.arguments, "--inputs", str(inputs), "--log-folder", str(home / "logs")]
    began = time.monotonic()
    (home / "printed.txt").write_text(run([sys.executable, "-m", "replay", "minimise", *typed]).output)
    seconds = time.monotonic() - began
    (folder,) = (home / "logs").glob("*-minimise")
    result = json.loads((folder / "minimise.json").read_text())["result"]
    trials = [from_json(MinimiseTrial, trial, source=str(folder)) for trial in result["trials"]]
    num_runs = sum(trial.num_runs for trial in trials)
    if not (folder / "smallest").is_dir():
        failed = [name, str(num_runs), f"failed, see {home / 'printed.txt'}", *["-"] * (len(COLUMNS) - 3)]
        return {"row": failed, "is_right": False}
    shapes = [CaptureShape.read(read_call(path)) for path in capture_files(folder / "smallest" / "inputs")]
    left = next(trial for trial in reversed(trials) if trial.what == "smallest").candidate
    rows, tokens = sum(one.num_rows for one in shapes), sum(one.num_rows * one.num_columns for one in shapes)
    layers = left.spec.actor.num_layers or result["num_layers"] or 0
    own = [word for word in left.arguments if word.startswith("--") and word not in ("--inputs", "--num-layers")]
    options = [word for word in own if word not in planted.options and word not in ("--backend", "--timeout")]
    shown = "shows it" if (folder / "smallest" / "repro.py").is_file() else "none"
    sizes = (num_runs, len(shapes), rows, tokens, layers, left.num_processes)
    most = (MOST_RUNS, planted.files, planted.rows, planted.tokens, planted.layers, planted.processes)
    is_small = all(size <= bound for size, bound in zip(sizes, most, strict=True))
    row = [name, *map(str, sizes), " ".join(own) or "none", shown, f"{seconds:.0f}"]
    return {"row": row, "is_right": is_small and not options and result["failure"]["kind"] == planted.kind}
