"""Ask questions that are lines of shell, one after the other, within a limit of time; the next call goes on.

A question has a limit of its own. One that the total cuts off is asked again by the next call with the same OUT; one
that reached its own limit is not. `OUT/<name>.jsonl` has a line for each that ended, with its exit code, seconds and
last lines; `OUT/output.txt` has all that they printed.
"""

import argparse
import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Answers, make_parser, run
from capture import read_actor_config

LEAST_SECONDS = 30  # that are left, for a question to be begun
SHOWN_LINES = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    name: str
    seconds: int  # its limit
    line: str  # of shell


def make_campaign_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of what a campaign's call is given."""
    parser = make_parser(doc)
    parser.add_argument("--inputs", type=Path, default=Path("inputs/sample"))
    parser.add_argument("--total", type=float, default=560, help="seconds for this call")
    parser.add_argument("--only", default="", help="questions whose name matches this regular expression")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short rows")
    parser.add_argument("--list", action="store_true", help="print the questions, and ask none")
    return parser


def write_tiny_config(folder: Path) -> Path:
    """Write the config of the sample's model, which stands for every model of a tiny campaign, and return its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(read_actor_config(ROOT / "inputs" / "sample")))
    return path


def ask(questions: Iterable[Question], given: argparse.Namespace, title: str) -> int:
    """Ask the questions that were asked for and have no answer yet; return 0 if all of these have ended with 0."""
    chosen = [question for question in questions if re.search(given.only, question.name)]
    if given.list:
        for question in chosen:
            print(f"{question.name} ({question.seconds} s)\n    {question.line}")
        return 0
    if given.out is None:
        raise SystemExit("--out is where answers are kept")
    answers = Answers(given, title)
    ends = time.monotonic() + given.total
    for question in chosen:
        left = ends - time.monotonic()
        if question.name in answers.known or left < LEAST_SECONDS:
            continue
        answer = _answer(question, min(question.seconds, left), given.out)
        if answer["exit_code"] is not None or left >= question.seconds:
            answers.keep(question.name, answer)
    for question in chosen:
        known = answers.known.get(question.name)
        said = "not answered" if known is None else f"exit code {known['exit_code']} after {known['seconds']:.0f} s"
        print(f"{question.name:<50}{said}")
    ended = [answers.known.get(question.name, {"exit_code": None})["exit_code"] for question in chosen]
    return int(any(exit_code != 0 for exit_code in ended))


def _answer(question: Question, limit: float, out: Path) -> dict[str, Any]:
    print(f"== {question.name}: {question.line}", flush=True)
    began = time.monotonic()
    ended = run(["bash", "-c", question.line], limit=limit)
    seconds = time.monotonic() - began
    with (out / "output.txt").open("a") as file:
        file.write(f"== {question.name}: {question.line}\n{ended.output}\n")
    shown = [line[:400] for line in ended.output.splitlines()[-SHOWN_LINES:]]
    print("\n".join(shown))
    print(f"exit code {ended.exit_code} after {seconds:.0f} s", flush=True)
    return {"line": question.line, "exit_code": ended.exit_code, "seconds": round(seconds, 1), "shown": shown}
