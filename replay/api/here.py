"""Replay in this process, as each rank that a launcher started does."""

from contextlib import ExitStack

from replay.api.run import ReplayedRun
from replay.options.spec import ReplaySpec
from replay.output.printing import open_silence, print_json
from replay.processes.error_reports import read_own_rank
from replay.runner.run import run


def run_here(spec: ReplaySpec, *, show_traceback: bool, as_json: bool = False) -> ReplayedRun:
    """Replay as `spec` says, and print header, passes and summary on rank 0, or with `as_json` the result alone.

    Raises UsageError for options that cannot be satisfied here.
    """
    with ExitStack() as stack:
        screen = stack.enter_context(open_silence()) if as_json else None
        finished = run(spec, show_traceback=show_traceback, screen=screen)
    if as_json and read_own_rank() == 0:
        # The log also tells what is wrong with it, and has the passes of all ranks.
        print_json(ReplayedRun.read(finished.folder))
    return ReplayedRun(folder=finished.folder, file=finished.file, records=finished.records)
