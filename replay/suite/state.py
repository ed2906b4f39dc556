"""Keep a suite on disk: its options, its inputs, and finished configurations.

LOGS/<time>-suite/suite.json     the options and the machine; at the end the results
                  inputs/        training inputs, unless --output-dir is given
                  <name>.log     output of a configuration
                  <name>.jsonl   a line per step, written after the last step
                  runs/<name>/   log of its replay
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

from actor_init.as_json import from_json, parse_json, to_json
from actor_init.spec import UsageError
from capture.file_format.atomic_write import write_atomically
from replay.on_ray.executor import Executor
from replay.processes.devices import Machine
from replay.runlog.reader import PastRun
from replay.runlog.writer import create_folder
from replay.suite.inputs import SuiteInputs, prepare_inputs
from replay.suite.loss_curve import Curve, Step
from replay.suite.plan import Planned, SuiteSpec, num_inputs_a_step, planned

SUITE_FILE = "suite.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    folder: Path
    spec: SuiteSpec
    machine: Machine
    inputs: SuiteInputs

    @classmethod
    def begin(cls, spec: SuiteSpec, logs: Path, where: Executor) -> Self:
        """Begin a suite. Raises UsageError, and leaves no folder, if there are no inputs or too few GPUs."""
        machine = where.machine(spec.num_gpus, "--num-gpus")
        inputs_a_step = num_inputs_a_step(planned(spec, machine))
        folder = create_folder(logs, "suite").resolve()
        try:
            inputs = prepare_inputs(spec, (spec.output_dir or folder).resolve() / "inputs", inputs_a_step)
        except BaseException:
            shutil.rmtree(folder)
            raise
        begun = cls(folder=folder, spec=spec, machine=machine, inputs=inputs)
        begun.write("running", {})
        return begun

    @classmethod
    def read(cls, folder: Path, where: Executor) -> Self:
        """Read a suite. Raises UsageError if `folder` is not a suite that can continue here."""
        path = folder / SUITE_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            written = from_json(_File, values, source="it is damaged, or of another version", ignore_others=True)
            if written.format != FORMAT:
                raise UsageError(f"it is of format {written.format}, and this version goes on with {FORMAT} alone")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"--continue {folder}: {path} cannot be read: {reason}. Give a folder that a suite left in logs/"
            ) from error
        suite = cls(folder=folder.resolve(), spec=written.spec, machine=written.machine, inputs=written.inputs)
        where.refuse_other(suite.machine, folder)
        if not suite.inputs.folder.is_dir():
            raise UsageError(f"--continue {folder}: its inputs in {suite.inputs.folder} are gone. Try: replay suite")
        runnable = [one.name for one in suite.plan if not one.reason]
        done = [name for name in runnable if suite._curve_file(name).exists()]
        if done and len(done) < len(runnable):
            PastRun.read(suite._logs_of(done[0])).refuse_other_versions(suite.folder)
        return suite

    @property
    def plan(self) -> list[Planned]:
        return planned(self.spec, self.machine)

    @property
    def inputs_a_step(self) -> int:
        return num_inputs_a_step(self.plan)

    def write(self, status: str, results: Mapping[str, Any]) -> None:
        """Write suite.json; `results` are by configuration."""
        whole = {
            "format": FORMAT,
            "status": status,
            "spec": self.spec,
            "machine": self.machine,
            "inputs": self.inputs,
            "inputs_a_step": self.inputs_a_step,
            "configurations": results,
        }
        text = json.dumps(to_json(whole), indent=2, allow_nan=False)
        write_atomically(self.folder / SUITE_FILE, f"{text}\n".encode())

    def curve(self, name: str) -> Curve | None:
        """Return the curve of a finished configuration, else None."""
        path = self._curve_file(name)
        if not path.exists():
            return None
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            steps = [parse_json(Step, line, source=f"line {number}") for number, line in enumerate(lines, start=1)]
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{path} is damaged: {error}. Remove it, and: replay suite --continue {self.folder}"
            ) from error
        return Curve(steps=steps)

    def write_curve(self, name: str, curve: Curve) -> None:
        lines = [json.dumps(to_json(step), allow_nan=False) for step in curve.steps]
        write_atomically(self._curve_file(name), "".join(f"{line}\n" for line in lines).encode())

    def room_for(self, name: str) -> tuple[Path, Path]:
        """Return the log folder of a configuration and its output file; those of an earlier attempt are moved aside."""
        logs, output = self._logs_of(name), self.folder / f"{name}.log"
        for earlier in (path for path in (logs, output) if path.exists()):
            tries = (earlier.with_name(f"{earlier.name}.{number}") for number in count(1))
            earlier.rename(next(path for path in tries if not path.exists()))
        return logs, output

    def _curve_file(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def _logs_of(self, name: str) -> Path:
        """Return the folder that holds the log of its replay."""
        return self.folder / "runs" / name

    @property
    def is_untouched(self) -> bool:
        return not any(self.folder.glob("*.jsonl"))

    def discard(self) -> None:
        for folder in (self.inputs.folder, self.folder):
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """The fields of suite.json that --continue reads."""

    format: int
    spec: SuiteSpec
    machine: Machine
    inputs: SuiteInputs
