"""What benchmarks share: contestants that alternate, ratios with their spread, answers that are kept, limits of time.

With `--out FOLDER` each answer is a line of JSON in FOLDER as soon as it is there, behind a first line that says on
what it was measured and with which arguments. The next call goes on after the last; it is refused if either is another.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, TypeVar

from replay.runlog.writer import list_versions

ROOT = Path(__file__).resolve().parent.parent
HOW_MUCH = ("out", "rounds", "only", "total")  # arguments that may be others when a benchmark goes on
T = TypeVar("T")
Sample = Mapping[str, float]
Contestant = Callable[[int], Sequence[Sample]]  # of a round's number: what it measured in that round, by name


def make_parser(doc: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser that knows `--out`, and `--rounds` of a benchmark with rounds."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep answers in this folder, and go on with those that are there")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="that count. Default: %(default)s")
    return parser


def describe_machine() -> str:
    """Return the device and the versions that figures depend on, in a line."""
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    device = f"{len(gpus)} x {gpus[0]}" if gpus else f"CPU, {os.cpu_count()} cores"
    return ", ".join([device, *(f"{name} {version}" for name, version in list_versions().items() if version)])


class Answers:
    """Answers to questions, by the question's name: those in the file, and those that come."""

    def __init__(self, given: argparse.Namespace, title: str, *, more: Sequence[str] = (), writes: bool = True) -> None:
        self.machine = describe_machine()
        self.known: dict[str, Any] = {}
        self._writes = writes and given.out is not None
        self._path = Path(given.out or ".") / (re.sub(r"\W+", "-", title) + ".jsonl")
        arguments = {name: str(value) for name, value in vars(given).items() if name not in HOW_MUCH}
        head = {"machine": self.machine, "arguments": arguments, "more": list(more)}
        lines = self._path.read_text().splitlines() if given.out is not None and self._path.exists() else []
        if lines and json.loads(lines[0]) != head:
            raise SystemExit(f"{self._path} is of\n{lines[0]}\nand not of\n{json.dumps(head)}\nTry another --out")
        self.known.update(pair for line in lines[1:] for pair in json.loads(line).items())
        if not lines:
            self._write(head)
        elif writes:
            print(f"{len(lines) - 1} answers are in {self._path} and are not asked again", file=sys.stderr)

    def ask(self, name: str, answer: Callable[[], T]) -> T:
        """Return the answer that is known, or else that of the function, which is kept: a value of JSON."""
        if name not in self.known:
            self.keep(name, answer())
        known: T = self.known[name]
        return known

    def keep(self, name: str, answer: object) -> None:
        self.known[name] = answer
        self._write({name: answer})

    def _write(self, line: object) -> None:
        if self._writes:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


class Column(NamedTuple):
    """A column of a table: what was measured under `key`, or its ratio to what another contestant had beside it."""

    title: str
    key: str
    shown: str = ".2f"
    scale: float = 1.0
    of: str = ""  # the other contestant: the cell is the median of the ratios, and their quartiles
    is_speed: bool = False  # the other's over the own
    reduce: Callable[[Sequence[float]], float] = median

    def cell(self, figures: Mapping[str, Sequence[Sample]], name: str) -> str:
        own = [sample[self.key] for sample in figures[name] if self.key in sample]
        if not own:
            return "-"
        if not self.of:
            return format(self.reduce(own) * self.scale, self.shown)
        other = [sample[self.key] for sample in figures[self.of]]
        pairs = [(b, a) if self.is_speed else (a, b) for a, b in zip(own, other, strict=True)]
        ratios = [a / b for a, b in pairs]
        if len(ratios) == 1:
            return format(ratios[0], self.shown)
        low, middle, high = (format(ratio, self.shown) for ratio in quantiles(ratios, n=4, method="inclusive"))
        return f"{middle} ({low} to {high})"


def alternate(
    contestants: Mapping[str, Contestant], answers: Answers, *, rounds: int, warmup: int = 1
) -> dict[str, list[Sample]]:
    """Measure each contestant once a round; return the samples of each, round by round.

    Every second round has them in the reverse order: what grows steadily, as a device's temperature does, favours none.
    Every call begins with `warmup` rounds that do not count.
    """

    def measure(number: int) -> dict[str, list[Sample]]:
        order = list(contestants) if number % 2 == 0 else list(contestants)[::-1]
        measured = {name: list(contestants[name](number)) for name in order}
        return {name: measured[name] for name in contestants}

    for number in range(warmup):
        measure(number)
    kept = [answers.ask(f"round {number}", partial(measure, number)) for number in range(rounds)]
    return {name: [sample for each in kept for sample in each[name]] for name in contestants}


def table(first: str, figures: Mapping[str, Sequence[Sample]], columns: Sequence[Column]) -> str:
    """Format a row for each contestant, in Markdown."""
    rows = [[name, *(column.cell(figures, name) for column in columns)] for name in figures]
    return markdown([[first, *(column.title for column in columns)], *rows])


def markdown(rows: Sequence[Sequence[object]]) -> str:
    """Format rows of cells, the first of them the head."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([lines[0], "| --- " * len(rows[0]) + "|", *lines[1:]])


class Ended(NamedTuple):
    exit_code: int | None  # None: its time was up
    output: str  # of both streams


def run(command: Sequence[str], *, limit: float | None = None, folder: Path = ROOT) -> Ended:
    """Run a program that finds this project; when its time is up end it with SIGTERM, which launchers pass on."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            return Ended(output=process.communicate(timeout=limit)[0], exit_code=process.returncode)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            return Ended(None, process.communicate(timeout=15)[0])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return Ended(None, process.communicate()[0])


def run_to_end(command: Sequence[str], *, allowed: Sequence[int] = (0,)) -> str:
    """Run a program as `run` does, and return what it printed; another exit code ends this one."""
    ended = run(command)
    if ended.exit_code not in allowed:
        raise SystemExit(f"{' '.join(command)}\n{ended.output[-4000:]}")
    return ended.output
