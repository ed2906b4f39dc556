"""Replay from Python: `replay.run`, and the processes in which other functions open their actors."""

import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, Unpack

from actor_init.spec import ParallelSpec, UsageError
from replay.api.run import ReplayedRun
from replay.campaign.campaign_options import list_words
from replay.options.option_parsing import build_replay_spec, check_options, list_options
from replay.options.path_checks import check_paths
from replay.options.run_options import RunOptions
from replay.options.spec import ReplaySpec
from replay.options.value_checks import check_value
from replay.processes.child_job import ChildJob
from replay.processes.launch import refuse_process_group
from replay.processes.pool import OUTPUT, REFUSED_EXIT_CODE, ProcessResult, RunningTask, Task
from replay.runlog.run_file import RUN_FILE
from replay.runlog.writer import add_log_folder_note, create_folder

if TYPE_CHECKING:
    from replay.campaign.result import GrowingResult

T = TypeVar("T")
GrowingT = TypeVar("GrowingT", bound="GrowingResult")
# The time that ranks get to write the log of a run that was interrupted, or of one whose other ranks ended.
GRACE_SECONDS = 30.0


class RunFailedError(RuntimeError):
    """A replay whose processes ended before it had a log, or before the result that was wanted.

    exit_code  of a rank; negative: the number of the signal that ended it
    output     the file with what its processes printed
    """

    def __init__(self, child: ProcessResult) -> None:
        super().__init__(f"the replay ended without a result: {child.error}. What it printed is in {child.output}")
        self.exit_code = child.exit_code
        self.output = child.output


def run(
    inputs: str | os.PathLike[str] | None = None, *, processes: int | None = None, **options: Unpack[RunOptions]
) -> ReplayedRun:
    """Replay captures in processes of their own, and return the run.

    The caller's process keeps its memory, its CUDA context, its signal handlers and its working folder: nothing is
    replayed in it. The options are those of `replay` on the command line; what is not given is the job's. A pass that
    fails is in the result, and does not raise.

    inputs     folder of captures; None: the sample that ships with the project
    processes  how many to start, as a launcher would; None: tp x ring
    options    as `replay --help-all` lists them, with `_` for `-`: `max_inputs=8`, `step=True`, `compile=True`

    Raises UsageError for an option or a file that cannot be, or inside an open process group; RunFailedError where the
    processes ended without a log. On KeyboardInterrupt the ranks are ended; the log then says that it was interrupted.
    """
    spec = build_spec({"inputs": inputs, **options})
    num_processes = count_processes(spec.actor.parallel, processes)
    refuse_process_group("run", "Call it elsewhere, or start the ranks with: torchrun -m replay")
    return run_in_processes(spec, num_processes)


def build_spec(options: Mapping[str, object]) -> ReplaySpec:
    """Build a spec from options by name; None stands for one that is not given. Raises UsageError for a wrong one."""
    return build_replay_spec(check_options(options, [option.parameter for option in list_options()]))


def count_processes(parallel: ParallelSpec, processes: int | None) -> int:
    """Return how many processes to start. Raises UsageError for a number that tp x ring does not divide."""
    needed = parallel.tp * parallel.ring
    num_processes = needed if processes is None else check_value("processes", processes, int)
    if num_processes < 1 or num_processes % needed:
        raise UsageError(
            f"processes={processes!r} is not allowed. Give a multiple of tp x ring, which is {needed} here, or none"
        )
    return num_processes


def run_in_processes(spec: ReplaySpec, num_processes: int, *, python: str = "") -> ReplayedRun:
    """Replay in that many processes on this machine, and read their log.

    python  path of another environment's interpreter; empty: this one
    """
    child = run_child(spec, spec.measure.name, num_processes, python=python)
    return read_result(child, RUN_FILE, ReplayedRun.read)


def run_command(command: str, own: Mapping[str, object], spec: ReplaySpec, processes: int | None) -> ProcessResult:
    """Run a command of several actors with its own options, as they would be typed, and return how it ended."""
    num_processes = count_processes(spec.actor.parallel, processes)
    return run_child(spec, command, num_processes, words=[command, *list_words(own)])


def run_child(
    spec: ReplaySpec, name: str, num_processes: int, *, words: Sequence[str] = (), python: str = ""
) -> ProcessResult:
    """Run a replay, or the command that `words` begin with, in processes; return how they ended.

    name    of the folder of its logs
    words   name and own options of the command; none: a replay
    python  path of another environment's interpreter; empty: this one

    On KeyboardInterrupt the ranks are ended.
    """
    check_paths(spec)
    # Absolute, since the caller may change its working folder before it asks the run for its tables.
    home = create_folder(spec.measure.log_folder, name).absolute()
    job = ChildJob(spec=spec).with_log_folder(home)
    output = home / OUTPUT
    task = Task(job=job, num_processes=num_processes, output=output, limit=math.inf, python=python, words=words)
    with _delay_interruption() as raise_interruption:
        running = RunningTask.start(task)
    try:
        raise_interruption()
        running.ranks.wait()
    except KeyboardInterrupt as interruption:
        running.ranks.end(grace=GRACE_SECONDS, first_signal=signal.SIGINT)
        add_log_folder_note(interruption, next((path for path in home.iterdir() if path.is_dir()), home))
        raise
    finally:
        # Of an exception here, such as that of a second interruption, no rank may outlive the call.
        running.ranks.end(grace=0.0 if running.ranks.exit_code is None else GRACE_SECONDS)
    return running.finish()


@contextmanager
def _delay_interruption() -> Iterator[Callable[[], None]]:
    """Let no Ctrl-C interrupt the block, and give a function that raises the one that came meanwhile.

    A process that is about to start would run on with nobody to end it.
    """
    numbers: list[int] = []

    def raise_interruption() -> None:
        if numbers:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield raise_interruption
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: numbers.append(number))
    try:
        yield raise_interruption
    finally:
        signal.signal(signal.SIGINT, before)


def read_result(child: ProcessResult, file: str, read: Callable[[Path], T]) -> T:
    """Read what ended processes left, from the folder that holds `file`. Raises what kept them from leaving it."""
    for path in child.logs.glob(f"*/{file}"):
        return read(path.parent)
    if child.exit_code == REFUSED_EXIT_CODE:
        text = child.refusal or child.error
        shutil.rmtree(child.logs)
        raise UsageError(text)
    raise RunFailedError(child)


def read_whole_result(child: ProcessResult, file: str, read: Callable[[Path], GrowingT]) -> GrowingT:
    """Read what ended processes left, as `read_result` does. Raises RunFailedError too where they broke off."""
    from replay.campaign.result import ResultStatus

    result = read_result(child, file, read)
    if result.status is not ResultStatus.FINISHED:
        raise RunFailedError(child)
    return result
