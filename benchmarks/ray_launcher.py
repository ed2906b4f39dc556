"""Measure what starting a replay's ranks on Ray costs: in the time of a pass, and in start-up.

    python benchmarks/ray_launcher.py --workers 2 --rounds 6 --backend fsdp2 --tp 2 --max-inputs 12

Runs the same replay under torchrun, under `--launcher ray` with a cluster of its own, and under torchrun again, the
control. They take turns, in another order each round. Other options are the replay's. A pass takes as long as on its
slowest rank, and is held against torchrun's on the same input: in the same round (pairs), and the fastest of all rounds
against the fastest, which what else the machine does disturbs least.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from replay.runlog.reader import read_records
from replay.runlog.writer import list_versions

ROOT = Path(__file__).parent.parent
SERIES = ("torchrun", "ray", "torchrun again")


class Run(NamedTuple):
    pass_seconds: list[float]  # of counted passes
    until_first_pass: float  # seconds from the command to the line of the first pass
    total: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    arguments, replay_arguments = parser.parse_known_args()
    here = Path(sys.executable).parent
    torchrun = [str(here / "torchrun"), "--standalone", "--nproc-per-node", str(arguments.workers), "-m", "replay"]
    on_ray = [sys.executable, "-m", "replay", "--launcher", "ray", "--processes", str(arguments.workers)]
    commands = dict(zip(SERIES, (torchrun, on_ray, torchrun), strict=True))
    runs: dict[str, list[Run]] = defaultdict(list)
    for number in range(arguments.rounds):
        turn = number % len(SERIES)
        for name in SERIES[turn:] + SERIES[:turn]:
            runs[name].append(_run([*commands[name], *replay_arguments]))
            print(
                f"round {number + 1}, {name}: {statistics.median(runs[name][-1].pass_seconds) * 1e3:.1f} ms", flush=True
            )
    _print(runs)
    installed = ", ".join(f"{package} {number}" for package, number in list_versions().items() if number)
    print(f"\n{os.cpu_count()} cores; {installed}, ray {version('ray')}")
    return 0


def _run(command: list[str]) -> Run:
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
    return Run([seconds[index] for index in sorted(seconds)], until_first_pass, total)


def _print(runs: dict[str, list[Run]]) -> None:
    columns = (
        "ranks started by",
        "median pass ms",
        "of medians",
        "of pairs",
        "of fastest",
        "first pass after s",
        "whole s",
    )
    print(f"\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    every, fastest = {}, {}
    for name in SERIES:
        rounds = [run.pass_seconds for run in runs[name]]
        every[name] = [seconds for one in rounds for seconds in one]
        fastest[name] = [min(same_input) for same_input in zip(*rounds, strict=True)]
    first = SERIES[0]
    for name in SERIES:
        median = statistics.median(every[name])
        ratios = [median / statistics.median(every[first])]
        ratios += [_median_ratio(series[name], series[first]) for series in (every, fastest)]
        until_first_pass = statistics.median(run.until_first_pass for run in runs[name])
        total = statistics.median(run.total for run in runs[name])
        values = " | ".join(f"{ratio:.4f}" for ratio in ratios)
        print(f"| {name} | {median * 1e3:.1f} | {values} | {until_first_pass:.1f} | {total:.1f} |")
    print(f"\n{len(every[first])} passes each, of {len(runs[first])} rounds")


def _median_ratio(series: list[float], others: list[float]) -> float:
    return statistics.median(own / other for own, other in zip(series, others, strict=True))


if __name__ == "__main__":
    sys.exit(main())
