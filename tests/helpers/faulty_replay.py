"""A replay with a fault on one rank: `torchrun [...] -m tests.helpers.faulty_replay KIND PHASE RANK ARGUMENTS`.

KIND is a key of FAULTS; PHASE is forward, backward or step of RANK's second pass, or end, behind it. Starting up may
take long on a busy machine and is no fault: once the first pass is done, --timeout is HANG_SECONDS, but where the rank
itself says what it failed with, for which it may write a snapshot of its memory first, or is ended from outside.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

import replay.runner.replayer
import replay.runner.run
import replay.watch.shutdown
import replay.watch.watcher
from replay.command_line.cli import run_and_leave
from replay.objective.objective import compute_negated_mean
from replay.runner.replayer import Replayer
from replay.watch.watcher import HELD_SECONDS, Watch, watch_run

FAULTY_PASS = 2
HANG_SECONDS = 6.0
# The watch's own are for a rank that is dead to all the others. A rank of a busy machine is not.
SILENT_SECONDS, BUSY_SECONDS = (3.0, 6.0), (60.0, 60.0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def nothing() -> None:
    pass


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crashed() -> None:
    ctypes.string_at(0)


def raised() -> None:
    raise RuntimeError("broken on purpose")


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory on purpose")


def out_of_host_memory() -> None:
    bytearray(1 << 62)


def left() -> None:
    sys.exit(0)


def left_hard() -> None:
    os._exit(0)


def terminated() -> NoReturn:
    os.kill(os.getpid(), signal.SIGTERM)
    blocked()


def blocked() -> NoReturn:
    threading.Event().wait()
    raise AssertionError("nobody sets it")


def asleep() -> NoReturn:
    """Stands still until it is ended from outside: --timeout, however late the signal comes, has no part in it."""
    blocked()


def blocked_after_collective() -> None:
    """The others pass one border more than this rank, which has entered as many collectives."""
    dist.all_reduce(torch.zeros(1, device=DEVICE))
    blocked()


def blocked_before_async() -> NoReturn:
    blocked()


def waiting_for_async() -> None:
    """No frame of torch's collectives is on the stack: torch waits in C."""
    dist.all_reduce(torch.zeros(1, device=DEVICE), async_op=True).wait()


def blocked_before_new_group() -> NoReturn:
    blocked()


def making_a_group() -> None:
    """No collective that is counted, but a wait for all ranks."""
    dist.new_group()


def slow_and_going_on() -> None:
    """Work of twice --timeout without any collective, of which each part is done long before it: this is no race."""
    for _ in range(24):
        time.sleep(HANG_SECONDS / 12)
        WATCHES[0].tracker.report_progress()


def network_cut() -> None:
    """Torch's own connections break, and both processes live on."""
    spared = {peer.connection.getpeername() for peer in WATCHES[0]._peers.by_rank.values()}
    for name in os.listdir("/proc/self/fd"):
        try:
            held = socket.socket(fileno=os.dup(int(name)))
            is_tcp = held.type == socket.SOCK_STREAM and held.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and held.getpeername() not in spared:
                held.shutdown(socket.SHUT_RDWR)
            held.close()
        except OSError:
            continue


def holding_python() -> None:
    """Blocked in native code that keeps Python's lock: no other thread of this process runs."""
    ctypes.PyDLL(None).pause()


def holding_python_first() -> None:
    """The other rank goes on for some time, so that the watchdog in C strikes before anybody asks."""
    holding_python()


def busy() -> None:
    time.sleep(HANG_SECONDS / 2)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def extra_collective() -> None:
    dist.all_reduce(torch.zeros(1, device=DEVICE))


def mismatched_collective() -> None:
    """Meets the others' all_reduce of one number, which then fails on the ranks that did nothing wrong."""
    dist.all_reduce(torch.zeros(4096, device=DEVICE))


def compiling() -> None:
    """The compiler is at work for ever, on this rank alone."""
    torch.compile(lambda x: x + 1, backend=lambda graph, inputs: blocked())(torch.zeros(1))


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        nothing,
        killed,
        crashed,
        raised,
        out_of_memory,
        out_of_host_memory,
        left,
        left_hard,
        terminated,
        blocked,
        asleep,
        blocked_after_collective,
        blocked_before_async,
        blocked_before_new_group,
        slow_and_going_on,
        network_cut,
        holding_python,
        holding_python_first,
        stopped,
        extra_collective,
        mismatched_collective,
        compiling,
    )
}

NO_HANG = ("raised", "out_of_memory", "out_of_host_memory", "left", "terminated", "asleep")
# Of these a rank, or what is left of it, does not answer; elsewhere all do, as soon as a busy machine lets them.
SILENT = ("holding_python", "holding_python_first", "stopped", "mismatched_collective")
MEANWHILE: dict[str, Callable[[], None]] = {  # what the other rank does in that place
    "blocked_before_async": waiting_for_async,
    "blocked_before_new_group": making_a_group,
    "holding_python_first": busy,
}
WATCHES: list[Watch] = []


def main() -> NoReturn:
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]  # deepspeed's own
    kind, phase, rank, *typed = arguments
    # The fault is in the loss that this puts in the place of the mean.
    sys.argv[1:] = [*typed, "--loss", "stand-in"]
    vars(replay.runner.run)["watch_run"] = _watched
    answer_seconds, patience_seconds = SILENT_SECONDS if kind in SILENT else BUSY_SECONDS
    vars(replay.watch.watcher)["ANSWER_SECONDS"] = answer_seconds
    vars(replay.watch.shutdown)["PATIENCE_SECONDS"] = patience_seconds
    has_fault = int(os.environ.get("RANK", 0)) == int(rank)
    vars(replay.runner.replayer)["compute_negated_mean"] = _faulty(
        FAULTS[kind] if has_fault else MEANWHILE.get(kind, nothing), phase, may_hang=kind not in NO_HANG
    )
    run_and_leave()


@contextmanager
def _watched(*arguments: Any, **given: Any) -> Iterator[Watch]:
    with watch_run(*arguments, **given) as watch:
        WATCHES.append(watch)
        yield watch


def _faulty(fault: Callable[[], None], phase: str, *, may_hang: bool) -> Callable[..., Any]:
    """`compute_negated_mean`, the end of forward, with `fault` there or where the gradient sets out."""
    num_calls = 0

    def strike(*_: Any) -> None:
        if fault is not nothing:
            os.write(1, f"FAULT {time.time()}\n".encode())  # in one piece, which print() is not: ranks share the output
        fault()

    def loss(log_probs_BA: Any, inputs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == FAULTY_PASS and may_hang:
            WATCHES[0].timeout = HANG_SECONDS
            WATCHES[0]._stacks.reset_watchdog(HANG_SECONDS + HELD_SECONDS)
        if num_calls == FAULTY_PASS and phase == "forward":
            strike()
        if num_calls == FAULTY_PASS and phase == "backward":
            log_probs_BA.register_hook(strike)
        if num_calls == FAULTY_PASS and phase == "step":
            register_optimizer_step_pre_hook(strike)
        return compute_negated_mean(log_probs_BA, inputs)

    reopen_after_failure = Replayer.reopen_after_failure

    def fail_and_reopen(replayer: Replayer) -> None:
        if num_calls == FAULTY_PASS and phase == "end":
            strike()
        reopen_after_failure(replayer)

    type.__setattr__(Replayer, "reopen_after_failure", fail_and_reopen)
    return loss


if __name__ == "__main__":
    main()
