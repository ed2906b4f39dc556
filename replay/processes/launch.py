"""Start the processes that --tp and --ring need, as torchrun would, if only one was started."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from actor_init.spec import ParallelSpec, UsageError
from replay.options.needed_tensors import check_objective_needs, find_lack
from replay.options.path_checks import check_paths
from replay.options.spec import ReplaySpec
from replay.processes.supervisor import ChildGroup, start_process

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# The time that ranks get to report what happened, as under torchrun.
GRACE_SECONDS = 30.0


def count_missing_processes(parallel: ParallelSpec) -> int:
    """Return how many processes to start here; 0 if one is enough, or a launcher started more than one."""
    needed = parallel.tp * parallel.ring
    return needed if needed > 1 and int(os.environ.get("WORLD_SIZE", 1)) == 1 else 0


def refuse_launcher(command: str) -> None:
    """Raise UsageError if a launcher started several of a command that starts processes itself."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"{command} starts its own processes. Try: replay {command}, without a launcher and its WORLD_SIZE"
        )


def refuse_process_group(function: str, advice: str = "Call it elsewhere") -> None:
    """Raise UsageError where this process is one of several: each of them would start what `replay.<function>` does.

    Also where Python lets this process start none.
    """
    if multiprocessing.current_process().daemon:
        raise UsageError(
            f"replay.{function} starts its own processes, and this one is daemonic, as workers of multiprocessing.Pool "
            "are: it may start none",
            advice="Call it elsewhere, or in a worker of concurrent.futures.ProcessPoolExecutor",
        )
    rank, world_size, whose = os.environ.get("RANK"), int(os.environ.get("WORLD_SIZE", "1")), "a launcher's processes"
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world_size, whose = distributed.get_rank(), distributed.get_world_size(), "an open process group"
    if world_size > 1:
        raise UsageError(
            f"replay.{function} starts its own processes, and this one is rank {rank} of {world_size} of {whose}",
            advice=advice,
        )


def start_missing(spec: ReplaySpec, arguments: Sequence[str], *, needs: Sequence[str] = ()) -> int | None:
    """Check what was typed as paths, and what the inputs have; then start the processes that are missing, if any are.

    arguments  the command line, which each process gets
    needs      names of tensors of which each pass has to have one

    Returns their exit code; None where this process is to do the work. Raises UsageError.
    """
    check_paths(spec)
    check_objective_needs(spec.measure.loss, spec.inputs)
    if needs and (lack := find_lack(spec.inputs, needs)) is not None:
        raise UsageError(lack)
    num_processes = count_missing_processes(spec.actor.parallel)
    return relaunch(num_processes, arguments) if num_processes else None


def relaunch(num_processes: int, arguments: Sequence[str]) -> int:
    """Run `replay` with `arguments` in that many processes on this machine, and return their exit code.

    Raises UsageError if the machine has GPUs, but fewer than that.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and num_gpus < num_processes:
        raise UsageError(
            f"tp x ring needs {num_processes} GPUs and this machine has {num_gpus}. "
            f"Try: tp x ring of at most {num_gpus}, or CUDA_VISIBLE_DEVICES= for a CPU"
        )
    print(f"replay: tp x ring needs {num_processes} processes and 1 was started; starting them", file=sys.stderr)
    return start_processes(num_processes, ["-u", str(Path(__file__).parents[1]), *arguments])


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without a launcher's variables, with thread counts as torchrun sets them: ranks share the
    cores.
    """
    kept_variables = {
        name: value
        for name, value in environment.items()
        if not name.startswith("TORCHELASTIC_") and name not in LAUNCHER_VARIABLES
    }
    return {"OMP_NUM_THREADS": "1"} | kept_variables


def list_gpus(number: int) -> list[str]:
    """Return the first `number` of this process's GPUs, as values for its children's CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (visible.split(",") if visible else [str(index) for index in range(number)])[:number]


def open_rank_store() -> "TCPStore":
    """Open the store where the ranks of a run meet, as torchrun's agent does: here, so that no one else takes its
    port.
    """
    from torch.distributed import TCPStore

    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def list_rank_variables(num_processes: int, port: int) -> list[dict[str, str]]:
    """Return the variables that torchrun sets for each process of a run whose `open_rank_store` listens on `port`."""
    shared = {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    shared |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": str(True)}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank)} | shared for rank in range(num_processes)]


def start_processes(num_processes: int, arguments: Sequence[str]) -> int:
    """Run this Python with `arguments` in that many processes, as torchrun would, and return their exit code.

    A signal that would end this process is passed on to them first; the exit code is then 128 plus its number, as a
    shell's.
    """
    store = open_rank_store()
    # torchrun sets this variable too.
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"} | without_launcher(os.environ)
    command = [sys.executable, *arguments]
    with _raise_signals() as raiser:
        ranks = None
        try:
            # A rank that has begun as a signal is raised would run on with nobody to end it.
            with raiser.delay():
                ranks = ChildGroup.start(
                    partial(start_process, command, environment | variables)
                    for variables in list_rank_variables(num_processes, store.port)
                )
            exit_code = ranks.wait()
            assert exit_code is not None, "there is no time limit"
            ranks.end(grace=GRACE_SECONDS)
            return exit_code
        except _SignalReceived as received:
            if ranks is not None:
                # A second signal ends the grace period: the ranks are killed below.
                with suppress(_SignalReceived):
                    ranks.end(grace=GRACE_SECONDS, first_signal=received.number)
            return 128 + received.number
        finally:
            if ranks is not None:
                ranks.end(grace=GRACE_SECONDS, first_signal=signal.SIGKILL)


class _SignalReceived(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _SignalRaiser:
    """Raises _SignalReceived on a signal; for one that comes in the block of `delay`, behind that block."""

    def __init__(self) -> None:
        self._is_delayed = False
        self._delayed_number: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_delayed:
            raise _SignalReceived(number)
        self._delayed_number = number

    @contextmanager
    def delay(self) -> Iterator[None]:
        self._is_delayed = True
        try:
            yield
        finally:
            self._is_delayed = False
        if self._delayed_number is not None:
            raise _SignalReceived(self._delayed_number)


@contextmanager
def _raise_signals() -> Iterator[_SignalRaiser]:
    """Raise _SignalReceived on a signal that would end this process, if this is the main thread."""
    raiser = _SignalRaiser()
    if threading.current_thread() is not threading.main_thread():
        yield raiser
        return
    # nohup has SIGHUP ignored, and what is ignored stays so.
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, raiser.handle) for number in handled}
    try:
        yield raiser
    finally:
        for number, earlier_handler in before.items():
            signal.signal(number, earlier_handler)
