"""Replays in one world, like tests.helpers.replay_worker, that also writes the gathered gradients of every window.

    torchrun ... -m tests.helpers.gradient_worker JOBS.json [TP [RING]]

JOBS.json is a list of {"arguments": [of replay], "gradients": "FILE.pt", "sabotage": NAME, "shapes": "FILE.json"};
the last two may be left out. What is compiled has graphs alone. FILE.pt is a list with a dict for each accumulation
window: parameter name to whole gradient, fp32, as it was before clipping and stepping. FILE.json lists the shapes of
all plain floating tensors that forward and backward made on rank 0. NAME is one of tests.helpers.sabotage.
"""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from actor_init.backends.protocol import Backend, open_backend
from actor_init.schedule_and_norm import StepSettings
from actor_init.spec import ParallelSpec
from actor_init.world import World
from replay.command_line.cli import leave
from replay.runner.run import run_in
from tests.helpers.liger_on_a_cpu import liger_on_a_cpu
from tests.helpers.replay_worker import graphs_alone, proved_once, read_spec
from tests.helpers.sabotage import SABOTAGES
from tests.helpers.unproved_rows import rows_unproved


class ShapeWatch(TorchDispatchMode):
    """Shapes of plain floating tensors, whatever made them; a DTensor shows through its local operations."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            is_real = isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor)  # DTensor asks fakes for shapes
            if is_real and tensor.is_floating_point():
                self.shapes.add(tuple(tensor.shape))
        return made


class WatchedBackend:
    """A backend whose gradients are looked at before the end of each window frees them."""

    def __init__(self, backend: Backend, windows: list[dict[str, Tensor]], watch: ShapeWatch | None) -> None:
        self._backend = backend
        self._windows = windows
        self._watch = watch or nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._watch:
            return self._backend.forward(*args, **kwargs)

    def skip_passes(self, num_passes: int) -> None:
        self._backend.skip_passes(num_passes)

    def backward(self, loss: Tensor) -> None:
        with self._watch:
            self._backend.backward(loss)

    def end_window(self, *, step: bool, settings: StepSettings | None = None) -> float:
        self._windows.append({name: gradient.to("cpu", copy=True) for name, gradient in self._backend.gradients()})
        return self._backend.end_window(step=step, settings=settings)


def _replay(job: dict[str, Any], world: World) -> int:
    torch.compiler.reset()
    windows: list[dict[str, Tensor]] = []
    watch = ShapeWatch() if "shapes" in job else None
    opened: Callable[..., Any] = lambda *args: WatchedBackend(open_backend(*args), windows, watch)  # noqa: E731
    with ExitStack() as stack:
        if "sabotage" in job:
            stack.enter_context(rows_unproved())
            stack.enter_context(SABOTAGES[job["sabotage"]](world))
        if "fused" in job["arguments"] and world.device.type == "cpu":
            stack.enter_context(liger_on_a_cpu())
        stack.enter_context(graphs_alone())
        stack.enter_context(patch("replay.runner.replayer.open_backend", opened))
        spec = read_spec(job["arguments"])
        code = run_in(world, spec, show_traceback=True).exit_code
    if world.rank == 0:
        torch.save(windows, job["gradients"])
        if watch:
            Path(job["shapes"]).write_text(json.dumps(sorted(watch.shapes)))
    return code


def main() -> int:
    torch.set_num_threads(1)
    tp, ring = (int(text) for text in [*sys.argv[2:], "1", "1"][:2])
    with World.from_env(ParallelSpec(tp=tp, ring=ring)) as world, proved_once():
        return max([_replay(job, world) for job in json.loads(Path(sys.argv[1]).read_text())])


if __name__ == "__main__":
    leave(main())
