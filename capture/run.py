"""Run a script or module with its model recorded, and nothing else changed: `capture run`.

    capture run [--to FOLDER] [--module NAME] train.py ARGUMENTS
    torchrun --nproc-per-node 2 -m capture run train.py ARGUMENTS

The script sees the command line, the path and the `__main__` that python would give it. What it raises, and the exit
code that it leaves with, pass through.
"""

import io
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from capture.file_format.micro_batch import CaptureError
from capture.record.job_facts import rank_and_world_size
from capture.record.recorder import Recorder, recording
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


def run(job: Job, *, folder: Path, module_name: str | None, settings: Mapping[str, Any]) -> None:
    """Run `job` in this process. Raises what the job raises, and nothing else.

    folder       an absolute path: the job may go to another folder
    module_name  class of the module to record, in place of the model that is trained
    settings     of `recording`, already checked
    """
    recordings: list[tuple[str, Recorder]] = []
    trained = TrainedLanguageModel()

    def is_wanted(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return trained(module, args, kwargs) if module_name is None else is_called(module_name, module)

    try:
        with ExitStack() as stack:  # so that the recorder is told what the job raises

            def found(module: nn.Module) -> None:
                recorder = stack.enter_context(recording(module, folder, **settings))
                recordings.append((type(module).__name__, recorder))

            stack.callback(Search(is_wanted, found).end)
            job.run()
    except Exception as error:
        _repeat_for_torchrun(error)
        raise
    finally:
        if rank_and_world_size()[0] == 0:
            print(_summary(recordings, trained, module_name), file=sys.stderr)


def _repeat_for_torchrun(error: Exception) -> None:
    """Have torchrun print the job's traceback below its own `capture FAILED`, as it would for a job with `@record`."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not Path(path).exists():
        with suppress(OSError):  # the job ends as it would
            get_error_handler().record_exception(error)


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
        raise CaptureError(
            "several ranks need one folder, and here they cannot tell when their launcher was started. "
            "Try: capture run --to inputs/my-run ..."
        ) from None
    return datetime.fromtimestamp(int(booted.split()[1]), timezone.utc) + timedelta(
        seconds=ticks / os.sysconf("SC_CLK_TCK")
    )


def _summary(recordings: Sequence[tuple[str, Recorder]], trained: TrainedLanguageModel, module_name: str | None) -> str:
    for name, recorder in recordings:  # one at most
        others = {
            "dropped": recorder.num_dropped,
            "left out by what to keep": recorder.num_not_kept,
            "of generation with a cache skipped": recorder.num_skipped,
        }
        more = "".join(f", {count} {what}" for what, count in others.items() if count)
        passes = "1 pass" if recorder.num_written == 1 else f"{recorder.num_written} passes"
        return f"capture: {passes} of {name}{more}, in {recorder.folder}"
    if module_name is not None:
        return f"capture: nothing recorded: no module of class {module_name} was called in this process"
    passed_over = ", ".join(sorted(trained.called_without_autograd))
    if passed_over:
        return (
            f"capture: nothing recorded: no causal LM was called with autograd on, but without: {passed_over}. "
            f"Try: capture run --module {min(trained.called_without_autograd)} ..."
        )
    return (
        "capture: nothing recorded: no causal LM (a module with a model's config and an output head, called with token "
        "ids) was trained in this process. Try: capture run --module NAME ..., with the class of the module to record"
    )
