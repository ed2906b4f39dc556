"""Hand a process of its own what it replays, here or on another machine, as versioned JSON.

    {"format": 1, "spec": {"actor": {"backend": "fsdp2"}, "measure": {"log_folder": "logs/night"}}}

The file has only the settings that differ from their defaults. So another version of micro-replay, such as that of an
environment of `parity --python`, can read the job if it knows these settings; one that it does not know is refused by
name.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Self

from actor_init.as_json import parse_json, to_json
from actor_init.spec import UsageError
from capture.facts import Setting
from capture.file_format.folder_layout import find_recording_folder
from replay.options.option_parsing import (
    CommandAction,
    build_replay_spec,
    find_values_without_option,
    format_command_line,
    refuse_typed,
    spec_from_dict,
)
from replay.options.spec import ReplaySpec, find_sample_folder
from replay.processes.error_reports import read_own_rank

FORMAT = 1
FILE = "job.json"
# Beside it a child that refuses leaves its sentence, in which settings are marks.
REFUSAL = "refusal.txt"
NO_OPTION = "# and what no option sets: "


@dataclass(frozen=True, kw_only=True, slots=True)
class _JobFile:
    format: int
    spec: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildJob:
    """A replay in a process of its own, or in several."""

    spec: ReplaySpec

    @classmethod
    def from_options(cls, given: Mapping[str, Any], file: Path | None) -> Self:
        """Return the job that was typed as options, by parameter name, or that of a file, which has all options."""
        if file is None:
            return cls(spec=build_replay_spec(given))
        refuse_typed(given, f"{Setting('job', file)} has all options")
        return cls.read(file)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a job's file. Raises UsageError, which names the file, for one that this version cannot run."""
        try:
            return cls.parse(path.read_text(encoding="utf-8"), source=str(path))
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is no job of a replay: {error}") from error

    @classmethod
    def parse(cls, text: str, *, source: str) -> Self:
        """Read a job. Raises UsageError, whose message begins with `source`, for one that this version cannot run."""
        try:
            file_format = json.loads(text).get("format")
        except (ValueError, AttributeError) as error:
            raise UsageError(f"{source} is no job of a replay: {error}") from error
        if file_format != FORMAT:
            raise UsageError(f"{source} is a job of format {file_format}; this version runs {FORMAT} alone")
        job_file = parse_json(_JobFile, text, source=source)
        return cls(spec=spec_from_dict(job_file.spec, source=source))

    @property
    def text(self) -> str:
        """Return the JSON, which `parse` reads."""
        job_file = {"format": FORMAT, "spec": _list_changed_settings(self.spec)}
        return json.dumps(job_file, indent=1, allow_nan=False) + "\n"

    def write(self) -> Path:
        """Write the job into its log folder, and return the file."""
        # This imports torch, for which neither the command line nor a child that reads its job may wait.
        from capture.file_format.atomic_write import write_atomically

        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / FILE
        write_atomically(path, self.text.encode())
        return path

    @property
    def logs(self) -> Path:
        """Return the folder that holds the folder of its run."""
        return self.spec.measure.log_folder

    @property
    def inputs(self) -> Path:
        """Return the folder of its inputs."""
        folder, file = self.spec.inputs.inputs, self.spec.inputs.input_file
        if file is not None:
            return find_recording_folder(file.absolute())
        return find_sample_folder() if folder is None else folder.absolute()

    def with_log_folder(self, folder: Path) -> Self:
        return replace(self, spec=replace(self.spec, measure=replace(self.spec.measure, log_folder=folder)))

    def on_node(self, logs: Path, copy: str | Path | None) -> Self:
        """Return the job as it runs on another machine.

        logs  its log folder there
        copy  of its folder of inputs there; None: the machine sees the folder itself
        """
        job = self.with_log_folder(logs)
        if copy is None:
            return job
        file = self.spec.inputs.input_file
        if file is None:
            inputs = replace(self.spec.inputs, inputs=Path(copy))
        else:
            inputs = replace(self.spec.inputs, input_file=Path(copy) / file.absolute().relative_to(self.inputs))
        return replace(job, spec=replace(job.spec, inputs=inputs))

    def repeat_line(self, *, num_processes: int = 1, python: str = "") -> str:
        """Return the command line that people type for this job; a comment has what no option sets.

        torchrun --nproc-per-node 2 -m replay --backend fsdp2  # and what no option sets: details=True
        """
        line = shlex.join(self.repeat_words(num_processes=num_processes, python=python))
        return f"{line}  {self.remark}" if self.remark else line

    @property
    def remark(self) -> str:
        """Return a comment, as a shell reads it, with what no option sets; empty if there is nothing."""
        settings = ", ".join(f"{name}={value}" for name, value in find_values_without_option(self.spec).items())
        return f"{NO_OPTION}{settings}" if settings else ""

    def repeat_words(self, *, num_processes: int = 1, python: str = "") -> list[str]:
        """Return the words of `repeat_line`."""
        ranks = ["--nproc-per-node", str(num_processes)] if num_processes > 1 else []
        if python:
            program = [python, *(["-m", "torch.distributed.run", *ranks] if ranks else []), "-m", "replay"]
        else:
            program = ["torchrun", *ranks, "-m", "replay"] if ranks else ["replay"]
        return [*program, *format_command_line(self.spec)]


def leave_refusal(action: CommandAction, folder: Path) -> int:
    """Run a child's action. Leave the sentence of a refusal for the process that started it, which spells settings."""
    try:
        return action()
    except UsageError as error:
        if read_own_rank() == 0:
            (folder / REFUSAL).write_text(error.text, encoding="utf-8")
        raise


def _list_changed_settings(part: Any) -> dict[str, Any]:
    """Return the fields of a part of a spec that are not at their default."""
    default = type(part)()
    return {
        spec_field.name: _list_changed_settings(value) if is_dataclass(value) else to_json(value)
        for spec_field in fields(part)
        if (value := getattr(part, spec_field.name)) != getattr(default, spec_field.name)
    }
