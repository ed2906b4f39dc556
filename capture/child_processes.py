"""Have the ranks that a job starts itself recorded too, though they are other processes.

A launcher inside a script starts the other ranks in one of three ways. While `record_children` is open

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
# A process that multiprocessing starts may train if its function is of one of these modules.
_TRAINING_MODULES = ("torch.multiprocessing.spawn", "__main__")
_ROOT = str(Path(__file__).resolve().parent.parent)
# A child may have another `sys.path`, so the command that starts it begins by making this package importable.
_MAKE_IMPORTABLE = f"import sys; sys.path += [] if {_ROOT!r} in sys.path else [{_ROOT!r}]; "


@contextmanager
def record_children(*, name: str, is_module: bool, order: Mapping[str, Any]) -> Iterator[None]:
    """Have processes that are started in this context recorded as `order` says.

    Three functions of the standard library are replaced while the context is open: one starts a process by its command,
    the second starts a process for a function, and the third, which the second calls, makes the command of such a
    process. The order travels in the command.

    name   the job's name, as it was typed
    order  plain data for JSON, given to `capture.run.run_again` and `capture.run.record_spawned`
    """
    is_same_job = _SameJob(name, is_module)
    text = json.dumps(order)

    def change_command(command: Any, environment: Any) -> Any:
        if not is_same_job(command):
            return command
        if not any(variable in (environment or os.environ) for variable in _RANK_VARIABLES):
            return command
        arguments = command[3 if is_module else 2 :]
        code = f"{_MAKE_IMPORTABLE}from capture.run import run_again; run_again()"
        return [command[0], "-c", code, text, command[2 if is_module else 1], *arguments]

    start, launch = subprocess.Popen.__init__, multiprocessing.popen_spawn_posix.Popen._launch  # type: ignore[attr-defined]
    command_line = multiprocessing.spawn.get_command_line
    # Whether each launch under way, the innermost last, may be that of a rank.
    may_train: list[bool] = []

    def our_start(self: Any, args: Any, *arguments: Any, **settings: Any) -> None:
        start(self, change_command(args, settings.get("env")), *arguments, **settings)

    def our_launch(self: Any, process: Any) -> None:
        may_train.append(getattr(getattr(process, "_target", None), "__module__", None) in _TRAINING_MODULES)
        try:
            launch(self, process)
        finally:
            may_train.pop()

    def our_command_line(**settings: Any) -> list[str]:
        command = command_line(**settings)
        if may_train and may_train[-1] and "-c" in command:
            code_index = command.index("-c") + 1
            search = f"{_MAKE_IMPORTABLE}from capture.run import record_spawned; record_spawned({text!r}); "
            command[code_index] = search + command[code_index]
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
            # Where somebody has wrapped ours meanwhile, it stays: to restore the original would remove the wrapper.
            if getattr(owner, attribute) is ours:
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


def choose_marks_folder() -> Path:
    """Choose a folder in which this process's children leave a mark that they record."""
    return Path(tempfile.gettempdir()) / f"capture-run-{os.getuid()}-{os.getpid()}-{os.urandom(4).hex()}"


def leave_mark(folder: Path) -> None:
    """Leave a mark that this process records. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / str(os.getpid())).touch()


def take_marks(folder: Path) -> Sequence[int]:
    """Return the ids of the processes that left a mark, and remove the folder."""
    if not folder.is_dir():
        return []
    paths = list(folder.iterdir())
    for path in paths:
        path.unlink()
    folder.rmdir()
    return sorted(int(path.name) for path in paths)
