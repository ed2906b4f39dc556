"""Run `replay report LOG...`: read the logs, write the page."""

from collections.abc import Sequence
from pathlib import Path

from actor_init.spec import UsageError
from replay.report.printing import open_console, print_pairs
from replay.report.text import MOST_RUNS
from replay.run_page.comparing import changes
from replay.run_page.page import page
from replay.runner.result import Run

FILE_NAME = "report.html"


def write_report(folders: Sequence[Path], to: Path | None) -> int:
    """Write the page into the first run's folder, or to the file `to`, and return the exit code 0.

    Raises UsageError for a folder that holds no run, or if the file cannot be written.
    """
    if len(folders) > MOST_RUNS:
        raise UsageError(f"at most {MOST_RUNS} logs fit on one page, not {len(folders)}. Try: replay report LOG LOG")
    runs = [Run.read(folder) for folder in folders]
    path = to or runs[0].folder / FILE_NAME
    try:
        path.write_text(page(runs, changes(runs), path.parent), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}. Give a file that can be written, as --to report.html") from error
    problems = [("problem", f"{run.folder.name}: {text}") for run in runs for text in run.problems]
    print_pairs(open_console(None), [*problems, ("report", str(path))])
    return 0
