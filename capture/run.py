"""Run a script or module with its model recorded, and nothing else changed: `capture run`.

    capture run [--to FOLDER] [--module NAME] train.py ARGUMENTS
    torchrun --nproc-per-node 2 -m capture run train.py ARGUMENTS

The script sees the command line, the path and the `__main__` that python would give it. What it raises, and the exit
code that it leaves with, pass through.
"""

import atexit
import io
import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from capture.child_processes import choose_marks_folder, leave_mark, record_children, take_marks
from capture.facts import Setting
from capture.file_format.micro_batch import CaptureError
from capture.module_search import ModuleSearch, TrainedLanguageModel, has_class_name
from capture.record.job_facts import read_rank_and_world_size
from capture.record.optimizer_hooks import RunningStepHook
from capture.record.recorder import Recorder, call_at_child_exit, hold_notes, take_held_notes
from capture.recordings import recording


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptJob:
    """A script by its path, or a module by its dotted name, and the arguments that it is given."""

    name: str
    is_module: bool
    arguments: Sequence[str]

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2] if self.is_module else Path(self.name).stem

    def run(self) -> None:
        """Run it as `python NAME` or `python -m NAME` would. Raises what it raises."""
        sys.argv = [self.name, *self.arguments]
        # Under `python -P` nothing is put before the path. The flag is there since Python 3.11.
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.getcwd() if self.is_module else str(Path(self.name).resolve().parent)
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            self._run_script(str(Path(self.name).absolute()))

    def _run_script(self, path: str) -> None:
        """Run a script as `__main__`.

        runpy.run_path would put one path into both sys.argv and `__file__`; python has the typed one in the first and
        the absolute one in the second.
        """
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        main = ModuleType("__main__")
        main.__file__ = path
        main.__loader__ = SourceFileLoader("__main__", path)
        sys.modules["__main__"] = main
        exec(code, vars(main))


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingOrder:
    """What to record, and where. Child processes get it as JSON.

    folder       an absolute path: the job may go to another folder
    module_name  class of the module to record, in place of the model that is trained
    arguments    names that a capture has for arguments, by the forward's names
    settings     settings of `recording`, already checked
    marks        folder in which child processes leave a mark that they record
    """

    folder: str
    module_name: str | None
    arguments: Mapping[str, str]
    settings: Mapping[str, Any]
    marks: str

    def record(self, module: nn.Module) -> Recorder:
        return recording(module, self.folder, arguments=self.arguments, **self.settings)


class ModelSearch:
    """Records the job's model from its first call on, in this process or in a fork of it, once there is one.

    recordings      class name and recorder of what was found: one at most
    language_model  tells the model that is trained from other modules
    close           is called with the recorder, to have it closed when this process's job ends; a fork of this process
                    closes its recorder at its own end
    has_begun       whether there is or was a search in this process
    """

    has_begun: ClassVar[bool] = False

    def __init__(self, order: RecordingOrder, close: Callable[[Recorder], object]) -> None:
        ModelSearch.has_begun = True
        self.recordings: list[tuple[str, Recorder]] = []
        self.language_model = TrainedLanguageModel(order.arguments)
        self._order = order
        self._close = close
        self._process = os.getpid()
        self._search = ModuleSearch(self._accepts, self._record)
        self._running_step_hook = RunningStepHook()
        hold_notes()

    def end(self) -> None:
        self._search.end()
        self._running_step_hook.remove()
        take_held_notes()

    def _accepts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        name = self._order.module_name
        if name is not None:
            return has_class_name(module, name)
        is_trained = self.language_model(module, args, kwargs)
        passed_over = self.language_model.called_without_autograd
        if not (is_trained or torch.is_grad_enabled()) and type(module).__name__ in passed_over:
            # The notes so far belong to this pass, which is not recorded: holding begins anew without them.
            hold_notes()
        return is_trained

    def _record(self, module: nn.Module) -> None:
        recorder = self._order.record(module)
        self._running_step_hook.remove()
        recorder.note_next(**take_held_notes())
        self.recordings.append((type(module).__name__, recorder))
        if os.getpid() == self._process:
            self._close(recorder)
        else:
            self.close_at_child_exit()

    def close_at_child_exit(self) -> None:
        """Have this process, which multiprocessing has started for a function, say at its end what was recorded."""
        leave_mark(Path(self._order.marks))
        # The recorder closes itself with a higher priority, so it has closed by then.
        call_at_child_exit(self._print_as_child, priority=0)

    def _print_as_child(self) -> None:
        if self.recordings[0][1].rank == 0:
            print(self.describe(), file=sys.stderr)

    def describe(self) -> str:
        """Return the last line of `capture run`."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, SystemExit) and not self.recordings:
            # The traceback says why, and no option would have helped.
            return "capture: nothing recorded: the job ended with an error before it trained"
        return _describe_recordings(self.recordings, self.language_model, self._order)

    def describe_job(self) -> str | None:
        """Return the last line at the end of the job that runs in this process; None if it is not this one's to say.

        Rank 0 alone says it; where nothing was recorded here but in children, they say theirs.
        """
        children = take_marks(Path(self._order.marks))
        rank = self.recordings[0][1].rank if self.recordings else read_rank_and_world_size()[0]
        return self.describe() if rank == 0 and (self.recordings or not children) else None


def run(
    job: ScriptJob,
    *,
    folder: Path,
    module_name: str | None,
    settings: Mapping[str, Any],
    arguments: Mapping[str, str] | None = None,
) -> None:
    """Run `job` in this process, and record it and the ranks that it starts. Raises what the job raises, no more.

    Where that ends the process, the job's own traceback is printed first and what was recorded last.

    The parameters are those of `RecordingOrder`.
    """
    error_printer = _ErrorPrinter()
    order = RecordingOrder(
        folder=str(folder),
        module_name=module_name,
        arguments=arguments or {},
        settings=settings,
        marks=str(choose_marks_folder()),
    )
    search = None
    try:
        # The recorder is closed by this stack, so it is told what the job raises.
        with ExitStack() as stack:
            search = _search_in(stack, order)
            stack.enter_context(record_children(name=job.name, is_module=job.is_module, order=asdict(order)))
            job.run()
    except Exception as error:
        _repeat_for_torchrun(error, job)
        raise
    finally:
        if search is not None and (line := search.describe_job()) is not None:
            error_printer.print_last(line)


def record_this_process(folder: Path) -> None:
    """Record the job that runs in this process already, and the ranks that it starts, until the process ends.

    It is what `run` does with the defaults of `capture run`. Where a search has begun in this process, this does
    nothing: under `capture run`, and in a rank that a recorded job has started.
    """
    if ModelSearch.has_begun:
        return
    order = RecordingOrder(
        folder=str(folder),
        module_name=None,
        arguments={},
        settings={"reproduce": True},
        marks=str(choose_marks_folder()),
    )
    module = getattr(sys.modules["__main__"], "__spec__", None)
    stack, process, is_child = ExitStack(), os.getpid(), multiprocessing.parent_process() is not None
    search = _search_in(stack, order)
    name = sys.argv[0] if module is None else module.name
    stack.enter_context(record_children(name=name, is_module=module is not None, order=asdict(order)))

    def end() -> None:
        # A fork of the job that ends as python does comes here too, and the recording is not its own.
        if os.getpid() != process:
            return
        stack.close()
        line = search.describe_job()
        # A child of multiprocessing that trains nothing may be a data loader's worker: it says nothing.
        if line is not None and (search.recordings or not is_child):
            print(line, file=sys.stderr)

    if is_child:
        call_at_child_exit(end, priority=0)
    else:
        atexit.register(end)


class _ErrorPrinter:
    """Prints the error that ends the process as python does for a script run alone, and then the last line."""

    def __init__(self) -> None:
        self._last_line = ""
        self._previous = sys.excepthook
        sys.excepthook = self._print_error

    def print_last(self, line: str) -> None:
        """Print the line now, or behind the error that is being raised, unless the job prints its errors itself."""
        error = sys.exc_info()[1]
        if error is None or isinstance(error, SystemExit) or sys.excepthook != self._print_error:
            print(line, file=sys.stderr)
        else:
            self._last_line = line

    def _print_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trace = _skip_own_frames(trace)
        self._previous(kind, error.with_traceback(trace), trace)
        if self._last_line:
            print(self._last_line, file=sys.stderr)


def _skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the frames of the job alone; None if it did not get as far, as with a syntax error."""
    own = (ScriptJob.run.__code__, ScriptJob._run_script.__code__)
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    last = max((number for number, step in enumerate(frames) if step.tb_frame.f_code in own), default=-1)
    return next((step for step in frames[last + 1 :] if "runpy" not in step.tb_frame.f_code.co_filename), None)


def run_again() -> None:
    """Run the job that another process runs too and has started again for a rank.

    The command line has the order, then the job's name and arguments. Raises what the job raises.
    """
    _, text, name, *arguments = sys.argv
    order = RecordingOrder(**json.loads(text))
    job = ScriptJob(name=name, is_module=not Path(name).is_file(), arguments=arguments)
    with ExitStack() as stack:
        _search_in(stack, order)
        job.run()


def record_spawned(text: str) -> None:
    """Search for the model in a process that multiprocessing has spawned, to which `text` is the order."""
    order = RecordingOrder(**json.loads(text))
    search = ModelSearch(order, lambda recorder: search.close_at_child_exit())


def _search_in(stack: ExitStack, order: RecordingOrder) -> ModelSearch:
    """Search until the context ends, which closes the recorder too."""
    search = ModelSearch(order, stack.enter_context)
    stack.callback(search.end)
    return search


def _repeat_for_torchrun(error: Exception, job: ScriptJob) -> None:
    """Have torchrun print the job's name and traceback, as it would print those of a job with `@record`.

    Its headline, `capture FAILED`, names what it was told to start; no process that it starts can change that.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not Path(path).exists():
        # Whatever fails here, the job ends with its own error.
        with suppress(OSError, ValueError, KeyError, TypeError):
            get_error_handler().record_exception(error)
            report = json.loads(Path(path).read_text())
            extra_info = report["message"]["extraInfo"]
            headline = f"{job.name} FAILED, not capture, which only ran it"
            extra_info["py_callstack"] = f"{headline}\n{extra_info['py_callstack']}"
            Path(path).write_text(json.dumps(report))


def choose_folder(job: ScriptJob, typed: Path | None) -> Path:
    """Choose the folder: the typed one, or `inputs/<time>-<script>`, with the time at which the whole job began.

    Raises CaptureError if ranks cannot agree on a time.
    """
    if typed is not None:
        return typed.absolute()
    start = datetime.now().astimezone()
    # Several ranks need the same time. They have their launcher in common, so it is the time at which that started.
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        start = _read_start_time(os.getppid()).astimezone()
    return Path("inputs").absolute() / f"{start:%Y%m%d-%H%M%S}-{job.short_name}"


def _read_start_time(process: int) -> datetime:
    """Read when a process was started from Linux's /proc: clock ticks since boot, and the time of the boot."""
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        boot_line = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    except (OSError, StopIteration):
        why = "several ranks need one folder, and here they cannot tell when their launcher was started"
        raise CaptureError(f"{why}. Try: capture run {Setting('to', 'inputs/my-run')} ...") from None
    boot_time = datetime.fromtimestamp(int(boot_line.split()[1]), timezone.utc)
    return boot_time + timedelta(seconds=ticks / os.sysconf("SC_CLK_TCK"))


def _describe_recordings(
    recordings: Sequence[tuple[str, Recorder]], language_model: TrainedLanguageModel, order: RecordingOrder
) -> str:
    """Say what was recorded and what was left out, or why nothing was recorded."""
    for name, recorder in recordings:
        dropped = "dropped" if recorder.refusal is None else f"dropped ({recorder.refusal})"
        counts = {
            dropped: recorder.num_dropped,
            "left out by what to keep": recorder.num_not_kept,
            "of generation with a cache skipped": recorder.num_skipped - recorder.not_recorded.total(),
        }
        for reason, count in recorder.not_recorded.items():
            counts[f"training pass{'es' * (count > 1)} not recorded ({reason})"] = count
        if number := recorder.num_unseen_steps:
            counts[f"step{'s' * (number > 1)} of the optimizer without a forward of it"] = number
        others = "".join(f", {count} {description}" for description, count in counts.items() if count)
        passes = "1 pass" if recorder.num_written == 1 else f"{recorder.num_written} passes"
        return f"capture: {passes} of {name}{others}, in {recorder.folder}"
    if order.module_name is not None:
        return f"capture: nothing recorded: no module of class {order.module_name} was called in this process"
    if order.arguments:
        arguments = ", ".join(f"{forward_name} ({name})" for forward_name, name in order.arguments.items())
        return (
            f"capture: nothing recorded: no module that is trained was called with {arguments} as rows of token ids. "
            "--arguments has the names that the outermost module's forward gives its arguments"
        )
    passed_over = sorted(language_model.called_without_autograd)
    if passed_over:
        return (
            "capture: nothing recorded: no causal LM was called with autograd on, but without: "
            f"{', '.join(passed_over)}. Try: capture run --module {passed_over[0]} ..."
        )
    if language_model.unnamed_tokens is not None:
        return f"capture: nothing recorded: {language_model.unnamed_tokens.explain()}"
    return (
        "capture: nothing recorded: no causal LM (a module with a model's config and an output head, called with token "
        "ids) was trained in this process. Try: capture run --module NAME ..., with the class of the module to record"
    )
