"""Run a replay whose parts are timed: `python -m benchmarks.verdict_cost.parts FILE OPTIONS` is `replay OPTIONS`.

FILE gets, by part, its wall and its processor seconds as JSON. A part's seconds are without those of the parts that it
calls, so they add up to the process from here on. On a GPU a part has the time in which the host launches its work;
whoever asks for a number first waits for the device.
"""

import builtins
import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

REST = "the rest"
IMPORTS = "imports"
FLOORS = "floors"
STEPS = "norm, clipping and step"
# By module and name, where it is called from. What is called within the floors is a part of theirs.
PARTS = {
    "replay.runner.run:_PreparedReplay.prepare": "selecting and resolving",
    "replay.runner.run:find_model_differences": "comparing the model",
    "replay.runner.replayer:ReopenableActor._open_backend": "opening the actor",
    "replay.runner.replayer:Replayer.replay": "around a pass",
    "replay.runner.replayer:read_call": "reading a capture",
    "replay.runner.replayer:read_recorded_pass": "what the job recorded",
    "replay.runner.replayer:WeightChecker.check": "comparing weights",
    "replay.runner.replayer:list_log_probs_at": "sampling log-probs",
    "replay.runner.replayer:StepFollower.sample_weights": "sampling weights",
    "replay.runner.replayer:run_pass": "forward and backward",
    "replay.runner.run_pass:ObserverNotifier._notify_after": "sampling gradients and state",
    "actor_init.backends.fsdp2:FSDP2Backend.end_window": STEPS,
    "replay.runner.meter:HostInstrument.synchronize": "waiting for the device",
    "replay.runner.meter:CudaInstrument.synchronize": "waiting for the device",
    "replay.runner.session:Logbook.write": "writing the log",
    "replay.runner.session:Session.report": "the report",
    "replay.runner.session:conclude": "concluding",
    "replay.runner.rounding_floor:RunRepeater.replay_inputs": FLOORS,
    "replay.runner.rounding_floor:compute_floors": "comparing the floors' passes",
    "replay.runner.result:judge_without_causes": "judging",
    "replay.runner.result:run_trials": "trials",
    "replay.runner.result:list_notes": "notes",
    "replay.verdict.judge:JudgedRun.add_causes": "naming causes",
}


def read_clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class Stopwatch:
    """Gives the seconds that pass to the innermost part."""

    def __init__(self, read_clocks: Callable[[], tuple[float, float]] = read_clocks) -> None:
        self.seconds: dict[str, list[float]] = {}  # wall and processor
        self._read_clocks = read_clocks
        self._open = [REST]
        self._since = read_clocks()

    def give(self) -> None:
        """Give what passed since the last call to the part that is open."""
        now = self._read_clocks()
        sums = self.seconds.setdefault(self._open[-1], [0.0, 0.0])
        for number, (end, begin) in enumerate(zip(now, self._since, strict=True)):
            sums[number] += end - begin
        self._since = now

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        is_of_floors = self._open[-1].startswith(FLOORS) and part != IMPORTS
        self.give()
        self._open.append(f"{FLOORS}: {part}" if is_of_floors else part)
        try:
            yield
        finally:
            self.give()
            self._open.pop()

    def time(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            with self.measure(part):
                return function(*arguments, **named)

        return timed


def time_parts(stopwatch: Stopwatch) -> None:
    """Time imports, and each of PARTS from the import of its module on."""
    waiting = dict(PARTS)
    depth = 0

    def time_import(function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            nonlocal depth
            # torch has imports in functions that a pass calls thousands of times.
            if depth or arguments[0] in sys.modules:
                return function(*arguments, **named)
            depth += 1
            try:
                with stopwatch.measure(IMPORTS):
                    return function(*arguments, **named)
            finally:
                depth -= 1
                for target in [each for each in waiting if each.partition(":")[0] in sys.modules]:
                    _replace(target, stopwatch, waiting.pop(target))

        return timed

    vars(builtins)["__import__"] = time_import(builtins.__import__)
    vars(importlib)["import_module"] = time_import(importlib.import_module)


def find_owner(target: str) -> tuple[Any, str]:
    """Return the module or class that has what a key of PARTS names, and its name there. The module is imported."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = sys.modules[module]
    for each in owners:
        owner = getattr(owner, each)
    return owner, name


def _replace(target: str, stopwatch: Stopwatch, part: str) -> None:
    owner, name = find_owner(target)
    function = vars(owner)[name]
    is_of_class = isinstance(function, classmethod)
    timed = stopwatch.time(function.__func__ if is_of_class else function, part)
    setattr(owner, name, classmethod(timed) if is_of_class else timed)


def main() -> None:
    path = Path(sys.argv.pop(1))
    stopwatch = Stopwatch()
    time_parts(stopwatch)
    leave = os._exit

    def write_and_leave(exit_code: int) -> None:
        stopwatch.give()
        path.write_text(json.dumps(stopwatch.seconds))
        leave(exit_code)

    vars(os)["_exit"] = write_and_leave
    runpy.run_module("replay", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
