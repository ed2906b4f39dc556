"""Say whether a change of the code left every word of wrong command lines as it was.

    python -m benchmarks same_refusals main                   # some minutes
    python -m benchmarks same_refusals HEAD --only 'inspect' 'tp 3'
    python -m benchmarks same_refusals HEAD --list

It takes the tree of the commit BASE out of git as `python -m benchmarks same_numbers` does, and types the lines of
lines.py in copies of one folder, in both trees at a time. Standard output, standard error and exit code are compared,
but for what MASKS hides, each with a reason. It prints what differs, and exits with 1 if something does, if nothing
was compared, or if a line is refused in neither tree.
"""

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import unified_diff
from pathlib import Path
from typing import NamedTuple

from benchmarks.same_numbers.trees import Ended, Tree, opened_trees
from benchmarks.same_refusals.lines import command_lines, make_folder


class Mask(NamedTuple):
    """What legitimately differs between two runs of one line."""

    pattern: str
    shown: str
    reason: str


MASKS = (
    Mask(r"(?m)^replay: rank [1-9]: .*\n", "", "rank 0 speaks for all; its launcher may end another before it does"),
    Mask(r"(?m)^\[transformers\] .*\n", "", "a warning of transformers', which several ranks write in any order"),
    Mask(r"\d{8}-\d{6}(?=-)", "TIME", "when it was, in the name of a log's folder"),
    Mask(r"\d+(\.\d+)? (ms|s|min|MiB|GiB)\b", "SOME", "time and memory that something took on this machine"),
    Mask(r"\bpid \d+", "pid N", "number of a process"),
    Mask(r"(?<=\.py:)\d+\b", "LINE", "where in the code: in a traceback's line, or a warning's"),
)


class Comparison(NamedTuple):
    num_lines: int  # of both streams in BASE, and one for the exit code
    differences: Sequence[str]  # a diff

    @property
    def is_same(self) -> bool:
        return self.num_lines > 0 and not self.differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="a commit of this repository")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="the lines that have one of these texts")
    parser.add_argument("--list", action="store_true", help="print the lines and end")
    arguments = parser.parse_args()
    lines = [line for line in command_lines() if any(text in line for text in arguments.only or [""])]
    if arguments.list:
        print(*lines, sep="\n")
        return 0
    began, home = time.monotonic(), Path(tempfile.mkdtemp(prefix="same-refusals-"))
    trees = opened_trees(arguments.base, home)
    folder = make_folder(trees[0], home / "sources")
    for tree in trees:
        shutil.copytree(folder, tree.home / "typed")
    num_compared, different = 0, []
    for line in lines:
        with ThreadPoolExecutor() as threads:
            base, here = threads.map(lambda tree, line=line: tree.run(line, tree.home / "typed"), trees)
        comparison = compare(masked(base, trees[0]), masked(here, trees[1]))
        num_compared += comparison.num_lines
        if not comparison.is_same or base.exit_code == 0:
            different.append(line)
            print(f"{line}\n    {'not the same' if not comparison.is_same else 'refused in neither tree'}:", flush=True)
            print(*(f"    {text}" for text in comparison.differences), sep="\n")
    shutil.rmtree(home, ignore_errors=True)
    print(f"{num_compared:,} lines of {len(lines)} wrong command lines, in {time.monotonic() - began:.0f} s: ", end="")
    print(f"not the same are those of {len(different)}" if different else "the same" if num_compared else "NOTHING")
    return 1 if different or not num_compared else 0


def masked(ended: Ended, tree: Tree, masks: Sequence[Mask] = MASKS) -> Mapping[str, Sequence[str]]:
    """Return the lines of each stream, without what the masks hide and without the tree's own folders."""

    def lines_of(text: str) -> Sequence[str]:
        for path, shown in ((tree.home, "HOME"), (tree.code, "CODE")):
            text = text.replace(str(path), shown)
        for mask in masks:
            text = re.sub(mask.pattern, mask.shown, text)
        return text.splitlines()

    return {
        "exit code": [str(ended.exit_code)],
        "standard output": lines_of(ended.output),
        "standard error": lines_of(ended.errors),
    }


def compare(base: Mapping[str, Sequence[str]], here: Mapping[str, Sequence[str]]) -> Comparison:
    """Compare the streams of one command line, by their names."""
    differences = [
        text
        for stream in {**base, **here}
        for text in unified_diff(base.get(stream, ()), here.get(stream, ()), f"BASE {stream}", "here", lineterm="", n=0)
    ]
    return Comparison(sum(map(len, base.values())), differences)


if __name__ == "__main__":
    sys.exit(main())
