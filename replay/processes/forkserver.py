"""Start replay processes from a fork server that has already imported torch and DeepSpeed.

Most of a short replay's time is spent on imports. The fork server is Python's own (`multiprocessing`): it imports
`forkserver_preload.py` and nothing else, so that processes forked from it have no threads, no GPU and no state of a
run.
"""

import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from replay.processes.launch import without_launcher
from replay.processes.supervisor import end_with_parent

PRELOAD = ["replay.processes.forkserver_preload"]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOAD)
_lock = threading.Lock()


def forget_server() -> None:
    """Have a fork of this process start a server of its own. The parent's is no child of it that it could wait for."""
    global _lock
    # Another thread may have held the lock, or that of the server, as this process was forked.
    _lock = threading.Lock()
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        # The parent's server ends when its last client has gone, and this process is none.
        os.close(server._forkserver_alive_fd)
    server.__init__()
    CONTEXT.set_forkserver_preload(PRELOAD)


os.register_at_fork(after_in_child=forget_server)


def start(
    program: Path, arguments: Sequence[str], environment: Mapping[str, str], output: Path, folder: Path
) -> ForkServerProcess:
    """Run `python program arguments` in `folder`, in a forked process with its own session; output is appended to the
    file `output`.
    """
    process = CONTEXT.Process(
        target=_run_in_fork, args=(program, list(arguments), dict(environment), output, folder.absolute())
    )
    # The first process starts the server, which inherits this environment. Environment and main module are the whole
    # process's: of two threads that start processes one waits.
    with _lock, _temporary_environment(_build_server_environment()), _without_main_module():
        process.start()
    return process


def _build_server_environment() -> dict[str, str]:
    """Return the fork server's environment: it must not initialise CUDA, which forked processes could not use.

    With NVML torch can count GPUs without initialising CUDA; if no GPU is visible, torch knows without NVML.
    """
    import torch

    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    if not torch.cuda.is_available():
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return without_launcher(os.environ) | variables


def _run_in_fork(*task: Any) -> None:
    """Run the task in a process that ends with the command that asked for it, however that ends.

    One that ran on would write beside what --continue runs again.
    """
    end_with_parent()
    # Python ends the server when its last client has gone, and each fork is a client while it has this descriptor.
    forget_server()
    _run(*task)


def _run(program: Path, arguments: list[str], environment: dict[str, str], output: Path, folder: Path) -> None:
    import torch

    # The fork server has made itself the default start method of its forks.
    multiprocessing.set_start_method(None, force=True)
    os.setsid()
    os.chdir(folder)
    with output.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _replace_environment(environment)
    # Without NVML the server has initialised CUDA to count GPUs, and a fork of it cannot use CUDA.
    if torch.cuda._is_in_bad_fork():
        os.execve(sys.executable, [sys.executable, "-u", str(program), *arguments], environment)
    sys.argv = [str(program), *arguments]
    runpy.run_path(str(program), run_name="__main__")


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Hide the program that runs. multiprocessing would run a user's script again in each forked process."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _temporary_environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    _replace_environment(values)
    try:
        yield
    finally:
        _replace_environment(before)


def _replace_environment(values: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(values)
