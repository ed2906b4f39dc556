"""Read a line that people are shown back into the job that it repeats."""

import shlex
from argparse import ArgumentParser
from dataclasses import replace
from typing import NamedTuple

from replay.options.spec import ReplaySpec
from replay.processes.child_job import NO_OPTION
from tests.helpers.typed import spec_of


class Repeated(NamedTuple):
    spec: ReplaySpec
    num_processes: int = 1
    python: str = ""


def repeated_by(line: str) -> Repeated:
    """Parse a line as a shell, a launcher and `replay` do, and set what its comment says."""
    words = shlex.split(line, comments=True)
    python = "" if words[0] in ("replay", "torchrun") else words.pop(0)
    if words[:2] == ["-m", "torch.distributed.run"]:
        words[:2] = ["torchrun"]
    num_processes = 1
    if words[0] == "torchrun":
        launcher = ArgumentParser()
        launcher.add_argument("--nproc-per-node", type=int, required=True)
        given, words = launcher.parse_known_args(words[1:])
        num_processes = given.nproc_per_node
    if words[0] == "-m":
        del words[0]
    assert words[0] == "replay"
    return Repeated(_with_remark(spec_of(words[1:]), line.partition(NO_OPTION)[2]), num_processes, python)


def _with_remark(spec: ReplaySpec, said: str) -> ReplaySpec:
    fields = dict(setting.split("=") for setting in said.split(", ")) if said else {}
    known = {"details": "True", "reverse_rows": "True", "trials": "False"}
    assert all(known.get(name) == value for name, value in fields.items()), said
    if "details" in fields:
        spec = replace(spec, measure=replace(spec.measure, details=True))
    if "trials" in fields:
        spec = replace(spec, measure=replace(spec.measure, trials=False))
    if "reverse_rows" in fields:
        spec = replace(spec, inputs=replace(spec.inputs, reverse_rows=True))
    return spec
