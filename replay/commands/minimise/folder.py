"""Write the folder of a minimised failure: inputs, one command, versions, the output, a README, `repro.py`.

smallest/
  inputs/        captures, and actor.json
  run.sh         the command
  output.txt     what it printed
  versions.json
  README.md
  repro.py       if torch and transformers alone show the failure; repro.pt is what it loads
"""

import json
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from actor_init.spec import Head
from capture.facts import flag_of
from capture.file_format.capture_file import read_call
from capture.file_format.listing import capture_files
from capture.folder_tools.redact import TokenRedaction, redact_folder
from replay.commands.minimise.cutting import Candidate, CaptureShape, write_inputs
from replay.commands.minimise.failure import JOB_DIFFERENCES, ReplayFailure, ReplayLog
from replay.commands.minimise.standalone import GRACE_SECONDS, Standalone, write_standalone
from replay.commands.minimise.trials import MinimiseLog, ParityCell
from replay.options.option_parsing import spec_from_dict
from replay.options.path_checks import list_file_options
from replay.options.spec import ReplaySpec
from replay.output.text import join_lines, pluralise
from replay.processes.child_job import ChildJob
from replay.processes.pool import ProcessResult
from replay.runlog.writer import list_versions

SMALLEST = "smallest"
INPUTS = "inputs"


class CheckCandidate(Protocol):
    def __call__(
        self, candidate: Candidate, inputs: Path, what: str, folder: Path = Path()
    ) -> tuple[ReplayFailure | None, ProcessResult]:
        """Replay these inputs in `folder`; return the failure, if it is the one that is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallestFolder:
    """The folder of what was found.

    failure      as its last run showed it; None: that run did not
    redaction    what became of --redact, in words; empty: it was not asked for
    outside      files and folders that it needs and does not hold
    """

    folder: Path
    candidate: Candidate
    failure: ReplayFailure | None
    redaction: str
    outside: Sequence[str]
    standalone: Standalone
    num_rows: int
    num_tokens: int
    num_files: int


def write_folder(log: MinimiseLog, best: Candidate, check: CheckCandidate, *, is_whole: bool) -> SmallestFolder:
    """Write `best` into a new folder, run it there, and say in a README what it is. An earlier one is replaced."""
    home = log.folder / f".{SMALLEST}"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(mode=0o700)
    write_inputs(home / INPUTS, log.plan.sources, best)
    redaction = _redact_inputs(home, best, log.failure, check) if log.plan.redact else ""
    candidate, outside, failure, child = _run_in_folder(home, best, check)
    shutil.copy(child.output, home / "output.txt")
    start = ReplayLog.read(child.logs).start
    settled = candidate.spec if start is None else spec_from_dict(start.spec)
    assert log.failure is not None
    seconds = min(log.plan.limits.run, candidate.spec.measure.timeout + GRACE_SECONDS)
    # Of the user's files, which the run named as copies in the folder, the model's config alone is read again here.
    model = _make_paths_absolute(best).spec.actor.model
    standalone = write_standalone(
        home,
        replace(settled, actor=replace(settled.actor, model=model)),
        failure or log.failure,
        num_processes=candidate.num_processes,
        seconds=seconds,
    )
    (home / "run.sh").write_text(format_run_script(candidate, log.plan.parity), encoding="utf-8")
    (home / "run.sh").chmod(0o700)
    (home / "versions.json").write_text(json.dumps(list_versions(), indent=1) + "\n", encoding="utf-8")
    shapes = [CaptureShape.read(read_call(path)) for path in capture_files(home / INPUTS)]
    folder = log.folder / SMALLEST
    smallest = SmallestFolder(
        folder=folder,
        candidate=candidate,
        failure=failure,
        redaction=redaction,
        outside=outside,
        standalone=standalone,
        num_rows=sum(shape.num_rows for shape in shapes),
        num_tokens=sum(shape.num_rows * shape.num_columns for shape in shapes),
        num_files=len(shapes),
    )
    (home / "README.md").write_text(_format_readme(log, smallest, is_whole=is_whole), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(home, folder)
    return smallest


def _redact_inputs(home: Path, best: Candidate, failure: ReplayFailure | None, check: CheckCandidate) -> str:
    """Replace the inputs by redacted ones that still show the failure, if there are any; say what became of it."""
    assert failure is not None
    reason = f"NOT redacted: {INPUTS}/ holds the captured tokens"
    if failure.kind in JOB_DIFFERENCES:
        return f"{reason}. Redaction removes the job's numbers, which the failure is a difference from"
    for tokens in (TokenRedaction.ZERO, TokenRedaction.PERMUTE):
        target = home / "redacted"
        shutil.rmtree(target, ignore_errors=True)
        redact_folder(home / INPUTS, target, tokens)
        shown_failure, _ = check(best, target, f"redacted, {tokens.value}")
        if shown_failure is not None:
            shutil.rmtree(home / INPUTS)
            os.replace(target, home / INPUTS)
            return f"redacted as capture redact --tokens {tokens.value} does"
    shutil.rmtree(home / "redacted", ignore_errors=True)
    return f"{reason}. With other tokens it did not fail"


def _run_in_folder(
    home: Path, best: Candidate, check: CheckCandidate
) -> tuple[Candidate, Sequence[str], ReplayFailure | None, ProcessResult]:
    """Run what the folder holds, in the folder: first with copies of the user's files, else with the files themselves.

    Returns what was run, what it needs from elsewhere, the failure if it was shown, and the run.
    """
    portable = _copy_files(home, best)
    for candidate in dict.fromkeys((portable, _make_paths_absolute(best))):
        shown_failure, child = check(candidate, Path(INPUTS), SMALLEST, home)
        if shown_failure is not None:
            break
    if candidate != portable:
        for path in _list_files(portable.spec):
            (home / path.name).unlink(missing_ok=True)
    outside = [str(path) for path in _list_paths(candidate.spec) if path.is_absolute()]
    return candidate, outside, shown_failure, child


def _copy_files(home: Path, best: Candidate) -> Candidate:
    """Copy single files that the options name into `home`, and name the copies; folders are named by whole paths."""
    candidate = _make_paths_absolute(best)
    spec = candidate.spec
    copies = {path: shutil.copy(path, home) for path in _list_files(spec) if path.is_file()}
    for setting, path in list_file_options(spec):
        if path in copies:
            candidate = candidate.with_option(flag_of(setting.name), setting.value.replace(str(path), path.name))
    return candidate


def _make_paths_absolute(best: Candidate) -> Candidate:
    for setting, path in list_file_options(best.spec):
        if path.exists():
            typed = setting.value.replace(str(path), str(path.absolute()))
            best = best.with_option(flag_of(setting.name), typed)
    return best


def _list_paths(spec: ReplaySpec) -> list[Path]:
    return [path for _, path in list_file_options(spec)]


def _list_files(spec: ReplaySpec) -> list[Path]:
    return [
        path
        for setting, path in list_file_options(spec)
        if setting.name != "weights" and path.suffix in (".py", ".json")
    ]


def format_run_script(candidate: Candidate, cell: ParityCell | None) -> str:
    """Return run.sh: the replay of the candidate, or of a parity cell and its reference, which it compares."""
    lines = ["#!/bin/sh", 'cd "$(dirname "$0")" || exit 2']
    if cell is None:
        lines.append(f"exec {_make_job(candidate.spec).repeat_line(num_processes=candidate.num_processes)}")
    else:
        reference, cell_job = (
            _make_job(_add_trace(cell.build_reference(candidate))),
            _make_job(_add_trace(candidate.spec)),
        )
        lines += [
            *(job.remark for job in (reference, cell_job) if job.remark),
            'logs="logs/$(date +%Y%m%d-%H%M%S)"',
            f'{shlex.join(reference.repeat_words(num_processes=cell.num_processes))} --log-folder "$logs/reference" &&',
            f'{shlex.join(cell_job.repeat_words(num_processes=candidate.num_processes))} --log-folder "$logs/cell" &&',
            'exec replay compare "$logs/reference" "$logs/cell" --threshold 0',
        ]
    return "\n".join(lines) + "\n"


def _make_job(spec: ReplaySpec) -> ChildJob:
    return ChildJob(spec=replace(spec, inputs=replace(spec.inputs, inputs=Path(INPUTS))))


def _add_trace(spec: ReplaySpec) -> ReplaySpec:
    """Return the spec of a run of parity with --trace in place of its details, unless its rows are in reverse."""
    if spec.inputs.reverse_rows:
        return spec
    # The trace needs whole logits, whatever was typed.
    actor, measure = replace(spec.actor, head=Head.AUTO), replace(spec.measure, details=False, trace=True)
    return replace(spec, actor=actor, measure=measure)


def _format_readme(log: MinimiseLog, smallest: SmallestFolder, *, is_whole: bool) -> str:
    failure = smallest.failure or log.failure
    assert failure is not None
    standalone = smallest.standalone
    smaller = (
        "No file, row, layer, rank or option of it can be left out alone, as far as was tried."
        if is_whole
        else f"The search ended after {pluralise(log.num_runs, 'run')}: something smaller may show it too. "
        f"Go on: `{log.campaign.continue_command} --max-runs N`."
    )
    shown = "* `./run.sh` shows it; `output.txt` is what it printed. It needs micro-replay, of `versions.json`."
    if smallest.failure is None:
        shown = (
            "* THE LAST RUN, IN THIS FOLDER, DID NOT SHOW IT: `output.txt` says what it did. `./run.sh` may show it "
            "if the failure does not come each time."
        )
    lines = ["# A failure, as small as was found", "", f"    {join_lines(failure.text)}", "", shown]
    if standalone.shows:
        lines.append(
            f"* `python repro.py` shows it with torch and transformers alone. Its weights are {standalone.weights}."
        )
    else:
        lines.append(f"* There is no repro.py for torch and transformers alone: {join_lines(standalone.why)}.")
    lines += [f"* Inputs: {smallest.redaction}."] if smallest.redaction else []
    lines += [f"* It needs what is not in this folder: {', '.join(smallest.outside)}."] if smallest.outside else []
    lines += [
        "",
        *_format_size_table(log, smallest),
        "",
        f"{smaller} `{log.campaign.command_line}` found it in {pluralise(log.num_runs, 'run')}; "
        f"the failure came in run {log.num_tries} of the replay as typed.",
    ]
    return "\n".join(lines) + "\n"


def _format_size_table(log: MinimiseLog, written: SmallestFolder) -> list[str]:
    """Set the replay as it was typed beside the smallest that fails, in lines of Markdown."""
    candidate = written.candidate
    first = next(trial for trial in log.trials if trial.found is not None)
    smallest = shlex.join(candidate.arguments) or "none but the inputs"
    return [
        "| | as typed | smallest |",
        "|---|---|---|",
        f"| files | {len(log.plan.sources)} | {written.num_files} |",
        f"| rows | {log.num_rows} | {written.num_rows} |",
        f"| tokens, padding included | {log.num_tokens} | {written.num_tokens} |",
        f"| layers | {log.num_layers or 'not known'} | {candidate.spec.actor.num_layers or log.num_layers or 'all'} |",
        f"| processes | {log.plan.num_processes} | {candidate.num_processes} |",
        f"| options | `{shlex.join(first.candidate.arguments) or 'none'}` | `{smallest}` |",
    ]
