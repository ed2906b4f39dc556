"""Replay families in one world under one form, and write a line for each as it is done.

python -m benchmarks.families.worker FAMILIES_FOLDER RESULTS.jsonl FORM FAMILY,FAMILY
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers

from actor_init.spec import ParallelSpec, UsageError
from actor_init.world import World
from benchmarks.families.forms import FORMS, Form
from replay.command_line.cli import parse_command_line
from replay.options.option_parsing import format_error_with_flags
from replay.runner.run import run_in
from replay.watch.watcher import Watch


def main() -> None:
    """Replay what the command line names."""
    home, results = Path(sys.argv[1]), Path(sys.argv[2])
    form = FORMS[sys.argv[3]]
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with World.from_env(ParallelSpec(tp=form.tp, ring=form.ring)) as world, _errors_are_raised():
        for family in sys.argv[4].split(","):
            if world.rank == 0:
                _append(results, {"family": family, "form": form.name, "begun": True})
            found = outcome(world, form, home / family, home / "inputs")
            each = world.gather(found)
            if world.rank == 0:
                worst = max(each, key=lambda one: ("loss", "refused", "raw").index(next(iter(one))))
                _append(results, {"family": family, "form": form.name, **worst})


def outcome(world: World, form: Form, model: Path, inputs: Path) -> dict[str, Any]:
    """Return loss, norm and what was resolved, or the line of the refusal, or the raw error."""
    with tempfile.TemporaryDirectory() as logs:
        where = ["--model", str(model), "--inputs", str(inputs), "--log-folder", logs, "--timeout", "600"]
        try:
            spec = parse_command_line([*form.arguments, "--dtype", "fp32", "--quiet", *where]).args[0].spec
            run = run_in(world, spec)
            dist.barrier()
            if world.rank:
                return {"loss": None}  # rank 0 has the log of the run
            facts = run.start.facts
        except UsageError as refusal:
            return {"refused": format_error_with_flags(refusal)}
        except Exception as error:  # whatever it was, it is the finding
            if "--traceback" in sys.argv:
                raise
            return {"raw": f"{type(error).__name__}: {str(error)[:300]}"}
        record = run.records[0]
        if record.error:
            kind = "refused" if "Try:" in record.error else "raw"
            return {kind: record.error}
        found = {"loss": record.result.loss, "grad_norm": record.result.grad_norm}
        return {**found, "kernel": facts["attention_kernel"], "plan": facts.get("tp_plan")}


@contextmanager
def _errors_are_raised() -> Iterator[None]:
    """An error in a pass of several ranks is raised here, and does not end the process."""

    def stop_all(_: Watch, error: BaseException) -> NoReturn:
        raise error

    with patch.object(Watch, "stop_all", stop_all):
        yield


def _append(results: Path, line: dict[str, Any]) -> None:
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
