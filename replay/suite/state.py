"""Keep a suite on disk: its options, its inputs, and finished configurations.

LOGS/<time>-suite/suite.json        the options and the machine; at the end the results
                  inputs/           training inputs, unless --output-dir is given
                  initial-weights/  model folder of --save-init-weights, unless --storage is given
                  states/           of --save-state, unless --storage is given
                  <name>.log        output of a configuration
                  <name>.jsonl      a line per step, written after the last step
                  runs/<name>/      log of its replay

STORAGE/<name of the folder>/ holds the states of each configuration, and copies of suite.json, the curves and the
inputs: enough to go on where LOGS is not.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Self

from actor_init.as_json import from_json, json_bytes, parse_json, to_json
from actor_init.saving.huggingface import check_folder
from actor_init.spec import UsageError
from capture.file_format.atomic_write import write_atomically
from replay.on_ray.executor import Executor
from replay.processes.devices import Machine
from replay.runlog.reader import PastRun
from replay.runlog.writer import create_folder, refuse_other_versions
from replay.suite.inputs import SuiteInputs, prepare_inputs
from replay.suite.loss_curve import Curve, Step
from replay.suite.plan import Planned, SuiteSpec, num_inputs_a_step, planned
from replay.wording import in_flags

SUITE_FILE = "suite.json"
INPUTS = "inputs"
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
            inputs = prepare_inputs(spec, (spec.output_dir or folder).resolve() / INPUTS, inputs_a_step)
            begun = cls(folder=folder, spec=spec, machine=machine, inputs=inputs)
            if (copy := begun._copy()) is not None:
                check_folder(copy, "storage")
                shutil.copytree(inputs.folder, copy / INPUTS)
        except BaseException:
            shutil.rmtree(folder)
            raise
        begun.write("running", {})
        return begun

    @classmethod
    def read(cls, folder: Path, where: Executor) -> Self:
        """Read a suite. Raises UsageError if `folder` is not a suite that can continue here."""
        written = _read(folder)
        inputs = written.inputs
        if not inputs.folder.is_dir() and (folder / INPUTS).is_dir():  # it came from the storage
            inputs = replace(inputs, folder=(folder / INPUTS).resolve())
        suite = cls(folder=folder.resolve(), spec=written.spec, machine=written.machine, inputs=inputs)
        where.refuse_other(suite.machine, folder)
        if not suite.inputs.folder.is_dir():
            raise UsageError(f"--continue {folder}: its inputs in {suite.inputs.folder} are gone. Try: replay suite")
        runnable = [one.name for one in suite.plan if not one.reason]
        done = [name for name in runnable if suite._curve_file(name).exists()]
        if done and len(done) < len(runnable):
            refuse_other_versions(PastRun.read(suite._logs_of(done[0])).versions, suite.folder)
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
        self._write_file(self.folder / SUITE_FILE, json_bytes(whole, indent=2))

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
                f"{path} is damaged: {in_flags(error)}. Remove it, and: replay suite --continue {self.folder}"
            ) from error
        return Curve(steps=steps)

    def write_curve(self, name: str, curve: Curve) -> None:
        lines = [json.dumps(to_json(step), allow_nan=False) for step in curve.steps]
        self._write_file(self._curve_file(name), "".join(f"{line}\n" for line in lines).encode())

    @property
    def storage(self) -> str | None:
        """Return where the states of its configurations are kept, each in a folder of its name; None: nowhere."""
        if self.spec.save_every is None:
            return None
        return str(self.folder / "states") if self.spec.storage is None else f"{self.spec.storage}/{self.folder.name}"

    def states_of(self, name: str) -> Path | None:
        """Return the folder for the states of a configuration that is not trained by Ray Train."""
        return None if self.storage is None else Path(self.storage) / name / "states"

    @property
    def init_weights(self) -> Path:
        """Return the folder for --save-init-weights, which all nodes share if --storage is given."""
        return (self._copy() or self.folder) / "initial-weights"

    @property
    def inputs_for_all(self) -> Path:
        """Return the folder of the inputs, which all nodes share if --storage is given."""
        copy = self._copy()
        return self.inputs.folder if copy is None else copy / INPUTS

    def _copy(self) -> Path | None:
        """Return the folder in the storage for copies of what this folder holds."""
        is_folder = self.spec.storage is not None and "://" not in self.spec.storage
        return Path(str(self.storage)) if is_folder else None

    def _write_file(self, path: Path, data: bytes) -> None:
        write_atomically(path, data)
        if (copy := self._copy()) is not None:
            copy.mkdir(parents=True, exist_ok=True)
            write_atomically(copy / path.name, data)

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
        for folder in (self.inputs.folder, self.folder, self._copy()):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)


def folder_named(name: str, logs: Path, storage: str | None) -> Path:
    """Return the folder of the suite called `name`; if it is not below `logs`, it is made from the copy in `storage`.

    Raises UsageError if it is in neither.
    """
    folder = logs / name
    if (folder / SUITE_FILE).is_file():
        return folder
    copy = Path(storage) / name if storage is not None else None
    if copy is None or not (copy / SUITE_FILE).is_file():
        places = [str(logs), *([storage] if storage is not None else [])]
        advice = "the name of a suite" if storage is not None else "--storage too, or --log-folder"
        raise UsageError(
            f"--resume-from {name}: there is no suite of that name in {' or '.join(places)}. Give {advice}"
        )
    try:
        folder.mkdir(parents=True)
        for path in (*copy.glob("*.jsonl"), copy / SUITE_FILE):
            shutil.copy2(path, folder)
        shutil.copytree(copy / INPUTS, folder / INPUTS)
    except OSError as error:
        raise UsageError(f"--log-folder {logs}: {error}. Give a folder where you may write") from None
    return folder


def read_spec(folder: Path) -> SuiteSpec:
    """Read the options of the suite in `folder`. Raises UsageError if it is none."""
    return _read(folder).spec


def _read(folder: Path) -> "_File":
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
    return written


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """The fields of suite.json that --continue reads."""

    format: int
    spec: SuiteSpec
    machine: Machine
    inputs: SuiteInputs
