"""Run a script or module with its model recorded, and nothing else changed: `capture run`.

    capture run [--to FOLDER] [--module NAME] train.py ARGUMENTS
    torchrun --nproc-per-node 2 -m capture run train.py ARGUMENTS

The script sees the command line, the path and the `__main__` that python would give it. What it raises, and the exit
code that it leaves with, pass through.
"""

import io
import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from capture.child_processes import leave_mark, marks_folder, recorded_children, take_marks
from capture.facts import Setting
from capture.file_format.micro_batch import CaptureError
from capture.record.job_facts import read_rank_and_world_size
from capture.record.optimizer_hooks import RunningStepHook
from capture.record.recorder import Recorder, call_at_child_exit, hold_notes, take_held_notes
from capture.recordings import recording
from capture.search import Search, TrainedLanguageModel, is_called


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
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
        if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
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
class Order:
    """What to record, and where.

    folder       an absolute path: the job may go to another folder
    module_name  class of the module to record, in place of the model that is trained
    arguments    the forward's names to those of a capture
    settings     of `recording`, already checked
    marks        folder in which child processes say that they record
    """

    folder: str
    module_name: str | None
    arguments: Mapping[str, str]
    settings: Mapping[str, Any]
    marks: str

    def recording(self, module: nn.Module) -> Recorder:
        return recording(module, self.folder, arguments=self.arguments, **self.settings)


class ModelSearch:
    """Records the job's model from its first call on, in this process or in a fork of it, once there is one."""

    def __init__(self, order: Order, keep: Callable[[Recorder], object]) -> None:
        self.recordings: list[tuple[str, Recorder]] = []
        self.trained = TrainedLanguageModel(order.arguments)
        self._order = order
        self._keep = keep
        self._process = os.getpid()
        self._search = Search(self._is_wanted, self._found)
        self._late_hooks = RunningStepHook()
        hold_notes()

    def end(self) -> None:
        self._search.end()
        self._late_hooks.remove()
        take_held_notes()

    def _is_wanted(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        name = self._order.module_name
        if name is not None:
            return is_called(name, module)
        is_wanted = self.trained(module, args, kwargs)
        if not (is_wanted or torch.is_grad_enabled()) and type(module).__name__ in self.trained.called_without_autograd:
            hold_notes()  # those before were of this pass, which is not recorded
        return is_wanted

    def _found(self, module: nn.Module) -> None:
        recorder = self._order.recording(module)
        self._late_hooks.remove()
        recorder.note_next(**take_held_notes())
        self.recordings.append((type(module).__name__, recorder))
        if os.getpid() == self._process:
            self._keep(recorder)
        else:
            self.end_with_process()

    def end_with_process(self) -> None:
        """Have this process, which multiprocessing has started for a function, say at its end what was recorded."""
        leave_mark(Path(self._order.marks))
        call_at_child_exit(self._sum_up_as_child, order=0)  # the recorder has closed before

    def _sum_up_as_child(self) -> None:
        if self.recordings[0][1].rank == 0:
            print(self.summary(), file=sys.stderr)

    def summary(self) -> str:
        return _summary(self.recordings, self.trained, self._order)


def run(
    job: Job,
    *,
    folder: Path,
    module_name: str | None,
    settings: Mapping[str, Any],
    arguments: Mapping[str, str] | None = None,
) -> None:
    """Run `job` in this process, and record it and the ranks that it starts. Raises what the job raises, no more.

    The parameters are those of `Order`.
    """
    marks = marks_folder()
    order = Order(
        folder=str(folder), module_name=module_name, arguments=arguments or {}, settings=settings, marks=str(marks)
    )
    search = None
    try:
        with ExitStack() as stack:  # so that the recorder is told what the job raises
            search = _search_in(stack, order)
            stack.enter_context(recorded_children(name=job.name, is_module=job.is_module, order=asdict(order)))
            job.run()
    except Exception as error:
        _repeat_for_torchrun(error, job)
        raise
    finally:
        children = take_marks(marks)
        is_first = (
            search.recordings[0][1].rank if search and search.recordings else read_rank_and_world_size()[0]
        ) == 0
        if search is not None and is_first and (search.recordings or not children):
            print(search.summary(), file=sys.stderr)


def run_again() -> None:
    """Run the job that another process runs too and has started again for a rank.

    The command line has the order and the job's. It raises what the job raises, and sums up where it recorded rank 0.
    """
    _, text, name, *arguments = sys.argv
    order = Order(**json.loads(text))
    job = Job(name=name, is_module=not Path(name).is_file(), arguments=arguments)
    with ExitStack() as stack:
        _search_in(stack, order)
        job.run()


def record_spawned(text: str) -> None:
    """Search for the model in a process that multiprocessing has spawned, to which `text` is the order."""
    order = Order(**json.loads(text))
    search = ModelSearch(order, lambda recorder: search.end_with_process())


def _search_in(stack: ExitStack, order: Order) -> ModelSearch:
    """Search until the context ends, which closes the recorder too."""
    search = ModelSearch(order, stack.enter_context)
    stack.callback(search.end)
    return search


def _repeat_for_torchrun(error: Exception, job: Job) -> None:
    """Have torchrun print the job's name and traceback, as it would print those of a job with `@record`.

    Its headline, `capture FAILED`, names what it was told to start; no process that it starts can change that.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not Path(path).exists():
        with suppress(OSError, ValueError, KeyError, TypeError):  # the job ends as it would
            get_error_handler().record_exception(error)
            written = json.loads(Path(path).read_text())
            shown = written["message"]["extraInfo"]
            shown["py_callstack"] = f"{job.name} FAILED, not capture, which only ran it\n{shown['py_callstack']}"
            Path(path).write_text(json.dumps(written))


def folder_for(job: Job, asked: Path | None) -> Path:
    """Choose the folder: what was asked for, or `inputs/<time>-<script>`, with the time at which the whole job began.

    Raises CaptureError for a script that does not exist, and if ranks cannot agree on a time.
    """
    if not job.is_module and not Path(job.name).is_file():
        raise CaptureError(f"{job.name}: no such script. Try: capture run train.py, or capture run -m package.module")
    if asked is not None:
        return asked.absolute()
    began = datetime.now().astimezone()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        began = _start_of(os.getppid()).astimezone()
    return Path("inputs").absolute() / f"{began:%Y%m%d-%H%M%S}-{job.short_name}"


def _start_of(process: int) -> datetime:
    """Read when a process was started from Linux's /proc: clock ticks since boot, and the time of the boot."""
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    except (OSError, StopIteration):
        why = "several ranks need one folder, and here they cannot tell when their launcher was started"
        raise CaptureError(f"{why}. Try: capture run {Setting('to', 'inputs/my-run')} ...") from None
    return datetime.fromtimestamp(int(booted.split()[1]), timezone.utc) + timedelta(
        seconds=ticks / os.sysconf("SC_CLK_TCK")
    )


def _summary(recordings: Sequence[tuple[str, Recorder]], trained: TrainedLanguageModel, order: Order) -> str:
    for name, recorder in recordings:  # one at most
        refused = "dropped" if recorder.refusal is None else f"dropped ({recorder.refusal})"
        others = {
            refused: recorder.num_dropped,
            "left out by what to keep": recorder.num_not_kept,
            "of generation with a cache skipped": recorder.num_skipped - recorder.not_recorded.total(),
        }
        for reason, count in recorder.not_recorded.items():
            others[f"training pass{'es' * (count > 1)} not recorded ({reason})"] = count
        more = "".join(f", {count} {what}" for what, count in others.items() if count)
        passes = "1 pass" if recorder.num_written == 1 else f"{recorder.num_written} passes"
        return f"capture: {passes} of {name}{more}, in {recorder.folder}"
    if order.module_name is not None:
        return f"capture: nothing recorded: no module of class {order.module_name} was called in this process"
    if order.arguments:
        named = ", ".join(f"{theirs} ({ours})" for theirs, ours in order.arguments.items())
        return (
            f"capture: nothing recorded: no module that is trained was called with {named} as rows of token ids. "
            "--arguments has the names that the outermost module's forward gives its arguments"
        )
    passed_over = ", ".join(sorted(trained.called_without_autograd))
    if passed_over:
        return (
            f"capture: nothing recorded: no causal LM was called with autograd on, but without: {passed_over}. "
            f"Try: capture run --module {min(trained.called_without_autograd)} ..."
        )
    if trained.alike is not None:
        return f"capture: nothing recorded: {trained.alike.why_not()}"
    return (
        "capture: nothing recorded: no causal LM (a module with a model's config and an output head, called with token "
        "ids) was trained in this process. Try: capture run --module NAME ..., with the class of the module to record"
    )
