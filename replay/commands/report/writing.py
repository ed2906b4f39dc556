"""Write the page of a run, or of several: `replay report`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actor_init.spec import UsageError
from capture.facts import Setting
from replay.options.spec import find_log
from replay.options.value_checks import check_value
from replay.output.text import MAX_RUNS

if TYPE_CHECKING:
    from replay.runner.result import Run

FILE_NAME = "report.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenReport:
    """A page that was written.

    problems  why the log of a run is not whole, behind the name of its folder
    """

    path: Path
    problems: Sequence[str]

    @property
    def exit_code(self) -> int:
        """0: a log that is not whole has a page too."""
        return 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        return {"path": str(self.path), "problems": list(self.problems)}


def write_report(*logs: "str | os.PathLike[str] | Run", to: str | os.PathLike[str] | None = None) -> WrittenReport:
    """Write one HTML page of a run, or of several beside each other, and return where it is.

    logs  folders of runs, or runs
    to    the file; None: report.html in the first run's folder

    Raises UsageError for a folder that no run left, more logs than fit on a page, and a file that cannot be written.
    """
    if not 1 <= len(logs) <= MAX_RUNS:
        raise UsageError(f"1 to {MAX_RUNS} logs fit on one page, not {len(logs)}. Give the folders of runs")
    folders = [find_log(log) for log in logs]
    from replay.commands.report.page import describe_changes, render_page
    from replay.runner.result import Run

    runs = [Run.read(folder) for folder in folders]
    path = runs[0].folder / FILE_NAME if to is None else check_value("to", to, Path)
    try:
        path.write_text(render_page(runs, describe_changes(runs), path.parent), encoding="utf-8")
    except OSError as error:
        advice = f"Give a file that can be written, as {Setting('to', FILE_NAME)}"
        raise UsageError(f"{path}: {error.strerror}. {advice}") from error
    return WrittenReport(path=path, problems=[f"{run.folder.name}: {text}" for run in runs for text in run.problems])


def print_report(report: WrittenReport) -> None:
    """Print what is wrong with the logs, and where the page is."""
    from replay.output.printing import open_console, print_pairs

    print_pairs(open_console(None), [*(("problem", text) for text in report.problems), ("report", str(report.path))])
