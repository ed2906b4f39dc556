"""Recording jobs that end badly, forked from a process that has loaded torch, for `black_box/test_incidents.py`.

Prints a JSON object: for each job how it ended (`exit 0`, `signal 15`).
"""

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch._dynamo  # an optimizer's first step imports it: here once for all jobs
from torch import Tensor, nn

from capture import Recorder, recording
from capture.black_box.flight_recorder import Spool
from capture.black_box.incidents import read_incidents
from capture.black_box.salvage import salvage
from capture.file_format.capture_file import EncodedCall
from capture.record import background_writer
from capture.record.retention import RetentionSettings

NUM_PASSES = 6
MAX_SECONDS = 60


class TinyModel(nn.Module):
    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids


def record(folder: Path) -> Recorder:
    model = TinyModel()
    recorder = recording(model, folder, flight_recorder=4)
    for _ in range(NUM_PASSES):
        model(torch.ones(2, 4, dtype=torch.long))
    return recorder


def wait_for_a_signal(ready: Callable[[], None]) -> NoReturn:
    ready()
    while True:
        signal.pause()


def waits(folder: Path, ready: Callable[[], None]) -> None:
    record(folder)
    wait_for_a_signal(ready)


def waits_for_the_disk(folder: Path, ready: Callable[[], None]) -> None:
    record(folder).flush()
    wait_for_a_signal(ready)


def hangs_in_c(folder: Path, ready: Callable[[], None]) -> None:
    """As a collective does whose peer is gone: the GIL is free, and a signal does not end the call."""
    record(folder)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)
    ready()
    libc.pthread_mutex_lock(mutex)


def has_its_own_handler(folder: Path, ready: Callable[[], None]) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(9))
    record(folder)
    wait_for_a_signal(ready)


def catches_the_interrupt(folder: Path, ready: Callable[[], None]) -> None:
    try:
        with record(folder):
            wait_for_a_signal(ready)
    except KeyboardInterrupt:
        sys.exit(7)


def keeps_now_and_goes_on(folder: Path, ready: Callable[[], None]) -> None:
    with record(folder) as recorder:
        ready()
        while not read_incidents(folder):
            recorder.flush()
        model = TinyModel()
        model(torch.ones(2, 4, dtype=torch.long))
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def has_a_child_that_is_ended(folder: Path, ready: Callable[[], None]) -> None:
    with record(folder):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, b".")
            while True:
                signal.pause()
        os.read(reading, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
    ready()


def breaks_uncaught(folder: Path, ready: Callable[[], None]) -> None:
    record(folder)
    ready()
    raise RuntimeError("the loop broke")


def leaves_at_once(folder: Path, ready: Callable[[], None]) -> None:
    model = TinyModel()
    recorder = recording(model, folder)
    for _ in range(NUM_PASSES):
        model(torch.ones(2, 4, dtype=torch.long))
    recorder.flush()
    ready()
    os._exit(5)


def aborts(folder: Path, ready: Callable[[], None]) -> None:
    """As a process group's watchdog does."""
    record(folder).flush()
    ready()
    os.abort()


class Spooled:
    """What has come into shared memory, from here on: the parts of each pass, by its number."""

    def __init__(self) -> None:
        self._parts: dict[int, set[str]] = {}
        self._changed = threading.Condition()
        put = Spool.put

        def noted(spool: Spool, encoded: EncodedCall) -> None:
            put(spool, encoded)
            with self._changed:
                self._parts[encoded.step] = set(encoded.body)
                self._changed.notify_all()

        Spool.put = noted  # type: ignore[method-assign, assignment]

    def wait_for(self, number: int, parts: set[str]) -> None:
        with self._changed:
            came = self._changed.wait_for(lambda: parts <= self._parts.get(number, set()), MAX_SECONDS)
        assert came, (number, parts, self._parts)


class HangingModel(nn.Module):
    """Calls `hang` in its forward number NUM_PASSES."""

    def __init__(self, hang: Callable[[], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.hang = hang
        self.num_forwards = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.num_forwards += 1
        if self.num_forwards > NUM_PASSES:
            self.hang()
        loss: Tensor = (self.weight * input_ids).sum()
        return loss


def train(model: HangingModel, folder: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording(model, folder, flight_recorder=4)
    while True:
        model(torch.ones(2, 4, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()


def dies_soon_in_a_forward(folder: Path, ready: Callable[[], None]) -> None:
    """The writer's thread has done what the forward before roused it for, and is not roused again."""
    background_writer.MAX_DELAY_SECONDS = 10.0**6
    spooled = Spooled()

    def hang() -> None:
        spooled.wait_for(NUM_PASSES - 1, {"tensors"})
        wait_for_a_signal(ready)

    train(HangingModel(hang), folder)


def hangs_in_a_forward(folder: Path, ready: Callable[[], None]) -> None:
    spooled = Spooled()

    def hang() -> None:
        spooled.wait_for(NUM_PASSES, {"tensors"})
        wait_for_a_signal(ready)

    train(HangingModel(hang), folder)


def hangs_after_a_step(folder: Path, ready: Callable[[], None]) -> None:
    spooled, model = Spooled(), HangingModel(lambda: None)

    def hang(*_: object) -> None:
        if model.num_forwards > NUM_PASSES:
            spooled.wait_for(NUM_PASSES, {"outputs", "weights", "step"})
            wait_for_a_signal(ready)

    torch.optim.Optimizer.zero_grad = hang  # type: ignore[method-assign, assignment]
    train(model, folder)


def leaves_without_closing(folder: Path, ready: Callable[[], None]) -> None:
    model = TinyModel()
    recording(model, folder)
    for _ in range(NUM_PASSES):
        model(torch.ones(2, 4, dtype=torch.long))
    ready()


JOBS = {
    "SIGTERM": (waits, signal.SIGTERM),
    "SIGQUIT": (waits, signal.SIGQUIT),
    "SIGTERM in C": (hangs_in_c, signal.SIGTERM),
    "SIGTERM handled": (has_its_own_handler, signal.SIGTERM),
    "SIGINT": (catches_the_interrupt, signal.SIGINT),
    "SIGUSR1": (keeps_now_and_goes_on, signal.SIGUSR1),
    "child": (has_a_child_that_is_ended, None),
    "uncaught": (breaks_uncaught, None),
    "os._exit": (leaves_at_once, None),
    "SIGABRT": (aborts, None),
    "SIGKILL": (waits_for_the_disk, signal.SIGKILL),
    "SIGKILL soon in a forward": (dies_soon_in_a_forward, signal.SIGKILL),
    "SIGKILL in a forward": (hangs_in_a_forward, signal.SIGKILL),
    "SIGKILL after a step": (hangs_after_a_step, signal.SIGKILL),
    "left open": (leaves_without_closing, None),
}


def main() -> None:
    torch.set_num_threads(1)
    folder, endings = Path(sys.argv[1]), {}
    for name, (job, number) in JOBS.items():
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            os.close(reading)
            job(folder / name, lambda writing=writing: os.close(writing))  # type: ignore[misc]
            return
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        if number is not None:
            os.kill(process, number)
        _, status = os.waitpid(process, 0)
        code = os.waitstatus_to_exitcode(status)
        salvage(folder / name, RetentionSettings())
        endings[name] = f"signal {-code}" if code < 0 else f"exit {code}"
    print(json.dumps(endings), file=sys.__stdout__)


if __name__ == "__main__":
    main()
