"""Have the ranks that a job starts itself recorded too, though they are other processes.

A launcher inside a script starts the other ranks in one of three ways. While `recorded_children` is open

* the same script or module, started again for a rank (Lightning's default): it is started as `capture run` does
* a new interpreter that multiprocessing spawns for a function of the job or of torch.multiprocessing: it searches for
  the model before it calls the function
* a fork of this process: it has this process's search already

Other processes, such as data loaders' workers, are started as ever.
"""

import json
import multiprocessing
import multiprocessing.popen_spawn_posix
import multiprocessing.spawn
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_RANK_VARIABLES = ("RANK", "LOCAL_RANK")
_TARGETS = ("torch.multiprocessing.spawn", "__main__")  # modules of functions that may train
_ROOT = str(Path(__file__).resolve().parent.parent)
_IMPORTABLE = f"import sys; sys.path += [] if {_ROOT!r} in sys.path else [{_ROOT!r}]; "


@contextmanager
def recorded_children(*, name: str, is_module: bool, order: Mapping[str, Any]) -> Iterator[None]:
    """Have processes that are started in this context recorded as `order` says.

    name   of the job, as it was typed
    order  plain data for JSON, given to `capture.run.run_again` and `capture.run.record_spawned`
    """
    starts_again = _SameJob(name, is_module)
    text = json.dumps(order)

    def command_for(command: Any, environment: Any) -> Any:
        if not starts_again(command) or not any(one in (environment or os.environ) for one in _RANK_VARIABLES):
            return command
        rest = command[3 if is_module else 2 :]
        again = f"{_IMPORTABLE}from capture.run import run_again; run_again()"
        return [command[0], "-c", again, text, command[2 if is_module else 1], *rest]

    start, launch = subprocess.Popen.__init__, multiprocessing.popen_spawn_posix.Popen._launch  # type: ignore[attr-defined]
    command_line = multiprocessing.spawn.get_command_line
    is_of_rank: list[bool] = []

    def our_start(self: Any, args: Any, *more: Any, **settings: Any) -> None:
        start(self, command_for(args, settings.get("env")), *more, **settings)

    def our_launch(self: Any, process: Any) -> None:
        is_of_rank.append(getattr(getattr(process, "_target", None), "__module__", None) in _TARGETS)
        try:
            launch(self, process)
        finally:
            is_of_rank.pop()

    def our_command_line(**settings: Any) -> list[str]:
        command = command_line(**settings)
        if is_of_rank and is_of_rank[-1] and "-c" in command:
            place = command.index("-c") + 1
            search = f"{_IMPORTABLE}from capture.run import record_spawned; record_spawned({text!r}); "
            command[place] = search + command[place]
        return command

    replaced: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = [
        (subprocess.Popen, "__init__", start, our_start),
        (multiprocessing.popen_spawn_posix.Popen, "_launch", launch, our_launch),
        (multiprocessing.spawn, "get_command_line", command_line, our_command_line),
    ]
    for owner, attribute, _, ours in replaced:
        setattr(owner, attribute, ours)
    try:
        yield
    finally:
        for owner, attribute, original, ours in replaced:
            if getattr(owner, attribute) is ours:  # else somebody has wrapped ours, which only passes on
                setattr(owner, attribute, original)


class _SameJob:
    """Tells whether a command starts the job that runs here."""

    def __init__(self, name: str, is_module: bool) -> None:
        self._name = name
        self._script = None if is_module else Path(name).resolve()

    def __call__(self, command: Any) -> bool:
        if not isinstance(command, list | tuple) or not all(isinstance(part, str) for part in command):
            return False
        if self._script is None:
            return list(command[:3]) == [sys.executable, "-m", self._name]
        return len(command) > 1 and command[0] == sys.executable and Path(command[1]).resolve() == self._script


def marks_folder() -> Path:
    """Choose a folder in which this process's children say that they record."""
    return Path(tempfile.gettempdir()) / f"capture-run-{os.getuid()}-{os.getpid()}-{os.urandom(4).hex()}"


def leave_mark(folder: Path) -> None:
    """Say that this process records. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / str(os.getpid())).touch()


def take_marks(folder: Path) -> Sequence[int]:
    """List the processes that left a mark, and remove the folder."""
    if not folder.is_dir():
        return []
    paths = list(folder.iterdir())
    for path in paths:
        path.unlink()
    folder.rmdir()
    return sorted(int(path.name) for path in paths)
