"""Imports once and forks for each program that is asked of it.

    python -m tests.warm.server SOCKET STAND_IN OWNER PADDING [MODULE ...]

Only this process forks, and it has one thread, also after what it computes: that makes forking after `import torch`
safe. It says `ready` when it can be asked, and ends after the process OWNER. See tests/warm/__init__.py.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import random
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tests.warm import GARBAGE_THRESHOLDS, GRAPHS, ROOT

IMPORTS = (  # none that is run with -m: runpy warns of those that are there already
    "replay.processes.forkserver_preload",
    "torch.distributed.launcher.api",
    "deepspeed.checkpoint",
    # What DeepSpeed imports as its engine is made, and `capture` before it runs a job.
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "capture.run",
)
MAX_PASSED, FIRST_FREE = 16, 500  # descriptors of a program, and a number above all of theirs
RAY_WORKER_IMPORTS = ("fsspec", "jsonschema", "pandas", "pyarrow.fs", "pydantic.v1", "requests")


class Program(NamedTuple):
    """What comes after `python` on a command line, and where it runs."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    streams: dict[int, int]  # by the number that the program is to find it by


def serve(address: str, owner: int, more_imports: Sequence[str]) -> Program:
    """Returns in a fork, with what is to be run there."""
    ended = os.pidfd_open(owner)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    on_ray = RAY_WORKER_IMPORTS if importlib.util.find_spec("ray") else ()
    # To look for garbage takes a fifth of the time of imports, and in each fork it would copy every page.
    gc.disable()
    for name in (*IMPORTS, *on_ray, *more_imports):
        importlib.import_module(name)
    # What each would make for itself: the first model and its backward, and DeepSpeed's answers from the compiler.
    layouts: Any = importlib.import_module("actor_init.probe.layout_choice")
    models: Any = importlib.import_module("transformers")
    assert layouts.explain_not_packed(models.LlamaConfig()) == ""
    assert importlib.import_module("deepspeed.ops").__compatible_ops__
    # torchrun's agent asks `inspect` for names of its callers, which goes through all modules for each frame: 2.5 s.
    rendezvous: Any = sys.modules["torch.distributed.elastic.rendezvous.dynamic_rendezvous"]
    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    gc.enable()
    assert len(_threads()) == 1, f"a fork would lose this process's other threads: {_threads()}"
    print("ready", flush=True)
    keepers: set[int] = set()
    while True:
        ready, _, _ = select.select([listener.fileno(), ended], [], [])
        if listener.fileno() not in ready:
            for keeper in keepers:
                os.waitpid(keeper, 0)
            shutil.rmtree(Path(address).parent, ignore_errors=True)
            os._exit(0)
        connection, _ = listener.accept()
        keepers = {keeper for keeper in keepers if os.waitpid(keeper, os.WNOHANG) == (0, 0)}
        keeper = os.fork()
        if keeper == 0:
            listener.close()
            os.close(ended)
            return keep(connection)
        keepers.add(keeper)
        connection.close()


def _threads() -> list[str]:
    """Names of this process's threads. The CUDA driver's own is not among them: no fork uses a GPU that is hidden."""
    names = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
    return [name for name in names if not name.startswith("cuda0")]


def keep(connection: socket.socket) -> Program:
    """Fork once more, and tell the stand-in how the program ends; without a stand-in the program is ended."""
    header, streams, _, _ = socket.recv_fds(connection, 8, MAX_PASSED)
    with connection.makefile("rb") as file:
        arguments, folder, environment, numbers = json.loads(file.read(int.from_bytes(header, "big")))
    process = os.fork()
    if process == 0:
        connection.close()
        return Program(arguments, folder, environment, dict(zip(numbers, streams, strict=True)))
    connection.sendall(f"{process}\n".encode())
    for stream in streams:
        os.close(stream)
    descriptor = os.pidfd_open(process)
    ready, _, _ = select.select([descriptor, connection.fileno()], [], [])
    if descriptor not in ready:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if descriptor in ready:
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(program: Program, stand_in: str) -> list[str]:
    """Put on the program's surroundings. Returns its arguments."""
    # One may have the number that another is to get.
    streams = {number: fcntl.fcntl(stream, fcntl.F_DUPFD, FIRST_FREE) for number, stream in program.streams.items()}
    for stream in program.streams.values():
        os.close(stream)
    for number, stream in streams.items():
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.environment)
    sys.path[1:1] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.executable = stand_in
    multiprocessing.set_executable(stand_in)
    if GRAPHS in os.environ:
        torch: Any = sys.modules["torch"]
        torch.compile = partial(torch.compile, backend="aot_eager")
    random.seed()
    write_command_line([stand_in, *program.arguments])
    return program.arguments


def write_command_line(words: Sequence[str]) -> None:
    """What `ps` shows, and tests that look for processes by their arguments."""
    first, last = (int(field) for field in Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[45:47])
    text = "\0".join(words).encode()[: last - first - 1]
    ctypes.memmove(first, text.ljust(last - first, b"\0"), last - first)


def run_python(arguments: list[str]) -> None:
    """As the interpreter does with its command line."""
    is_path_safe = False
    # As the server was started, and without the program's folder on the path.
    while arguments[0] in ("-u", "-B", "-P"):
        is_path_safe = is_path_safe or arguments[0] == "-P"
        del arguments[0]
    if is_path_safe:
        assert arguments[0] == "-m", arguments
        sys.path[0] = str(ROOT)  # where what it has imported comes from
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        if not is_path_safe:
            sys.path[0] = os.getcwd()
        # The imports above have brought some programs along. runpy warns of a module that is there already.
        sys.modules.pop(arguments[1], None)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[0] = ""
        exec(arguments[1], vars(sys.modules["__main__"]))
    else:
        assert not arguments[0].startswith("-"), f"not one of the options that warm processes know: {arguments[0]}"
        sys.argv = arguments
        path = Path(arguments[0])
        sys.path[0] = str(path.resolve() if path.is_dir() else path.resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def leave(code: object) -> NoReturn:
    """End as the interpreter does, but free no object: that would copy most pages of the server, 0.6 s in each fork."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # As the interpreter's own end does not mind one that is closed.
        if not stream.closed:
            stream.flush()
    os._exit(int(code or 0) & 0xFF)


if __name__ == "__main__":
    arguments = become(serve(sys.argv[1], int(sys.argv[3]), sys.argv[5:]), sys.argv[2])
    try:
        run_python(arguments)
    except SystemExit as end:
        leave(end.code)
    leave(None)
