"""Replay a tiny model of every causal LM family of the installed transformers, under five forms.

    python -m benchmarks families --home /tmp/families                        # all: about ten minutes on two cores
    python -m benchmarks families --home /tmp/families --only mixtral,phi3 --forms 'tp 2,ring 2'
    python -m benchmarks families --home /tmp/families --table-only

Each is compared with the plain model, each document alone, in fp32: its loss to 1e-5 and its gradient norm to 1e-4. The
tables of docs/models.md are what it prints. It exits with 1 if a number was wrong, an error raw or a process died.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers

from benchmarks.families.configs import families
from benchmarks.families.forms import FORMS
from benchmarks.families.models import save_family, write_inputs
from benchmarks.families.results import read_results, table, verdict


def main() -> int:
    """Make the models that lack, replay them, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--home", type=Path, required=True, help="A folder for models and results.")
    parser.add_argument("--only", default=",".join(families()), help="Families, with commas between.")
    parser.add_argument("--forms", default=",".join(FORMS), help="Forms, with commas between.")
    parser.add_argument("--table-only", action="store_true", help="Replay nothing; print what was found before.")
    given = parser.parse_args()
    named, forms = given.only.split(","), given.forms.split(",")
    if not given.table_only:
        _make(given.home, named)
        for form in forms:
            _replay(given.home, form, named)
    paths = [path for form in forms if (path := _results(given.home, form)).exists()]
    outcomes = {key: one for key, one in read_results(paths).items() if key[0] in named}
    print(table(given.home, outcomes, forms))
    return int(any(verdict(given.home, one) in ("wrong", "raw error", "died") for one in outcomes.values()))


def _make(home: Path, named: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if not (home / "inputs").exists():
        write_inputs(home / "inputs")
    for family in named:
        if not (home / family / "answer.json").exists():
            save_family(family, home / family)


def _replay(home: Path, form: str, named: list[str]) -> None:
    ranks = FORMS[form].num_ranks
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    program = ["-m", "benchmarks.families.worker", str(home), str(_results(home, form)), form, ",".join(named)]
    subprocess.run(
        [sys.executable, *launcher, *program],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=(home / f"{form}.log").open("w"),
        stderr=subprocess.STDOUT,
        check=False,
    )


def _results(home: Path, form: str) -> Path:
    return home / f"{form}.jsonl"


if __name__ == "__main__":
    sys.exit(main())
