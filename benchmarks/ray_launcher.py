"""Measure what starting a replay's ranks on Ray costs: in the time of a pass, and in start-up.

    python -m benchmarks ray_launcher --workers 2 --rounds 6 --backend fsdp2 --tp 2 --max-inputs 12

Runs the same replay under torchrun, under `--launcher ray` with a cluster of its own, and under torchrun again, the
control. Other options are the replay's. A pass takes as long as on its slowest rank, and is held against torchrun's on
the same input in the same round.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, Answers, Column, Sample, alternate, make_parser, table
from replay.runlog.reader import read_records

COLUMNS = (
    Column("median pass ms", "s", ".1f", 1e3),
    Column("of torchrun's", "s", ".4f", of="torchrun"),
    Column("first pass after s", "until first pass", ".1f"),
    Column("whole s", "whole", ".1f"),
)


def main() -> int:
    parser = make_parser(__doc__, rounds=6)
    parser.add_argument("--workers", type=int, default=2)
    given, replay_arguments = parser.parse_known_args()
    here = Path(sys.executable).parent
    torchrun = [str(here / "torchrun"), "--standalone", "--nproc-per-node", str(given.workers), "-m", "replay"]
    on_ray = [sys.executable, "-m", "replay", "--launcher", "ray", "--processes", str(given.workers)]
    commands = {"torchrun": torchrun, "Ray": on_ray, "torchrun again": torchrun}
    series = {name: partial(measured, [*command, *replay_arguments]) for name, command in commands.items()}
    answers = Answers(given, "ray_launcher", more=replay_arguments)
    figures = alternate(series, answers, rounds=given.rounds)
    print(f"{answers.machine}, {len(figures['Ray'])} passes each\n\n{table('ranks started by', figures, COLUMNS)}")
    return 0


def measured(command: list[str], number: int) -> list[Sample]:
    """Run a replay, and return the seconds of each counted pass, with those until the first and of the whole run."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        until_first_pass, output = None, []
        with subprocess.Popen(
            [*command, "--log-folder", folder],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                output.append(line)
                if until_first_pass is None and line.startswith("pass 1 of "):
                    until_first_pass = time.monotonic() - began
        total = time.monotonic() - began
        assert process.returncode == 0, "".join(output)
        assert until_first_pass is not None
        (log,) = Path(folder).iterdir()
        records = read_records(log)
    seconds: dict[int, float] = defaultdict(float)
    for record in records:
        if not record.warmup:
            assert record.cost.seconds is not None
            seconds[record.index] = max(seconds[record.index], record.cost.seconds)
    run = {"until first pass": until_first_pass, "whole": total}
    return [{"s": seconds[index], **run} for index in sorted(seconds)]
