"""Records the micro-batches that really go through a model, inside somebody's training job.

    with recording(model, "inputs/my-run"):
        train(model)

The job pays for copying a forward's arguments to the host, and for nothing else; it gets no exception from here.
"""

import atexit
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from capture.call_arguments import forward_signature, take_apart
from capture.capture_file import write_call
from capture.job import prepare_folder, rank_and_world_size, versions
from capture.keep import Keep, Passes, WhichEnd, keep_of
from capture.micro_batch import Origin
from capture.writer import BackgroundWriter, warn

MAX_FLUSH_SECONDS = 60.0


def recording(
    model: nn.Module,
    folder: str | Path,
    *,
    every: int = 1,
    steps: str | range | tuple[int, int] | None = None,
    ranks: str | int | Iterable[int] | None = None,
    passes: Passes = "all",
    max_files: int | None = None,
    max_bytes: int | None = None,
    keep: WhichEnd = "first",
    ring: int | None = None,
    slow_step: float | None = None,
    reproduce: bool | None = None,
    max_queued: int = 64,
) -> "Recorder":
    """Writes the forwards of `model`, one file a pass, until the recorder is closed, or the process ends.

    model       what the job calls: the bare model or its wrapper (DDP, DeepSpeed's engine, torch.compile's)
    folder      made if it is not there, with mode 0700; several ranks share it
    every       every Nth pass, of those that `steps`, `ranks` and `passes` allow
    steps       numbers of forwards, as `100:200` (without 200), a range or a pair; `100:` has no end
    ranks       ranks that record, as `0,3` or numbers
    passes      `train` (autograd on), `rollout` (autograd off) or `all`
    max_files, max_bytes   for each rank by itself, and for all its files in the folder, also of earlier recordings;
                1 KiB a file is set aside for the manifest
    keep        what a full folder does: `first` takes no more, `last` gives up its oldest files
    ring        the last N passes stay in memory and are written on trouble only: an exception, a loss or gradient norm
                that is not finite, out of memory, SIGTERM, SIGINT, SIGQUIT, SIGUSR1 (which the job survives), a slow step
    slow_step   a step, from one forward to the next, of more than this many times the median is trouble
    reproduce   keep what it takes to do a pass again: random states (10 kB), outputs, environment. By default: with a
                ring. A pass then is complete, and without a ring written, when the next one begins
    max_queued  passes that may wait for the disk; further ones are dropped and counted

    Raises TypeError or ValueError for arguments of the wrong kind. Trouble with the folder is a warning, like all
    trouble later: the recorder's `failure` says what it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"recording needs a torch.nn.Module to tap, not {type(model).__name__}")
    if max_queued < 1:
        raise ValueError(f"max_queued must be 1 or more, not {max_queued}")
    kept = keep_of(
        every=every,
        steps=steps,
        ranks=ranks,
        passes=passes,
        max_files=max_files,
        max_bytes=max_bytes,
        keep=keep,
        ring=ring,
        slow_step=slow_step,
        reproduce=reproduce,
    )
    return Recorder(model, Path(folder).absolute(), keep=kept, max_queued=max_queued)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """A forward's arguments on the host, complete once every event in `copied` has happened."""

    tensors: Mapping[str, Tensor]
    copied: list[torch.cuda.Event]
    call_facts: Mapping[str, Any]
    left_out: Mapping[str, str]
    trains: bool
    origin: Origin


class Recorder:
    """Made by `recording`. After `close`, num_seen = num_written + num_dropped + num_skipped.

    num_seen     forwards of the model; one that it calls inside its own forward is part of that, and one inside a
                 backward is a checkpoint's re-run
    num_written  files
    num_dropped  passes lost: the disk was slow or failed, or the arguments were no micro-batch
    num_skipped  passes that cannot be replayed from their arguments: steps of generation with a key-value cache, and
                 forwards inside a CUDA graph capture
    failure      why capturing stopped before `close`, or None
    """

    def __init__(self, model: nn.Module, folder: Path, *, keep: Keep, max_queued: int) -> None:
        self.folder = folder
        self.keep = keep
        self.num_seen = 0
        self.num_skipped = 0
        self._depth = 0
        self._is_closed = False
        self._process = os.getpid()
        self._opened = datetime.now(UTC), time.monotonic_ns()
        self._model_name: str | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._writer: BackgroundWriter[_Pass] = BackgroundWriter(self._write, max_queued=max_queued)
        atexit.register(self.close)
        try:
            self._signature = forward_signature(model)
            self._model_name = prepare_folder(folder, model)
        except Exception as error:  # the job is worth more than its record
            self._writer.stop(error)
            return
        # in front of other hooks, such as FSDP's, that change the arguments
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]

    @property
    def num_written(self) -> int:
        return self._writer.num_written

    @property
    def num_dropped(self) -> int:
        return self._writer.num_dropped

    @property
    def failure(self) -> Exception | None:
        return self._writer.failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def note(self, *, loss: Any = None, grad_norm: Any = None, log_probs: Any = None) -> None:
        """What the job computed from the latest pass: numbers or tensors on any device, which are not waited for.

        loss, grad_norm  one number each; one that is not finite is trouble
        log_probs        of a row's actions; kept as sums by row and a checksum
        """

    def close(self) -> None:
        """Un-taps the model and waits for the files, up to a minute. A second call does nothing."""
        if (
            self._is_closed or os.getpid() != self._process
        ):  # a forked child has no writer thread, and no files to write
            return
        self._is_closed = True
        atexit.unregister(self.close)
        for hook in self._hooks:
            hook.remove()
        self._writer.close(max_seconds=MAX_FLUSH_SECONDS)
        if self.num_seen == 0 and self.failure is None:
            warn(
                "capture: the model was never called while it was recorded, so there are no files. Record what the job "
                "calls: its wrapper if there is one; calls of model.forward(...) and model.compile() bypass the tap"
            )

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or is_in_backward() or os.getpid() != self._process:
            return
        self._depth += 1
        if self._depth > 1:
            return
        self.num_seen += 1
        try:
            self._take(args, kwargs)
        except Exception as error:  # the job is worth more than its record
            self._writer.stop(error, num_lost=1)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._depth and not torch.compiler.is_compiling() and not is_in_backward():
            self._depth -= 1

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.failure is not None:
            self._writer.drop()
            return
        taken = take_apart(self._signature, args, kwargs)
        is_on_cuda = any(tensor.is_cuda for tensor in taken.tensors.values())
        if taken.continues_a_cache or (is_on_cuda and torch.cuda.is_current_stream_capturing()):
            self.num_skipped += 1
            return
        tensors, copied = copy_to_host(taken.tensors)
        self._writer.offer(
            _Pass(
                tensors=tensors,
                copied=copied,
                call_facts=taken.call_facts,
                left_out=taken.left_out,
                trains=torch.is_grad_enabled(),
                origin=self._origin(),
            ),
            sum(tensor.nbytes for tensor in tensors.values()),
        )

    def _origin(self) -> Origin:
        """The clock is monotonic from the opening on, so that names sort as recorded."""
        opened, opened_ns = self._opened
        now = opened + timedelta(microseconds=(time.monotonic_ns() - opened_ns) // 1000)
        rank, world_size = rank_and_world_size()
        return Origin(
            source="",
            rank=rank,
            world_size=world_size,
            step=self.num_seen - 1,
            time=now.isoformat(timespec="microseconds"),
            model_name=self._model_name,
            versions=versions(),
        )

    def _write(self, taken: _Pass) -> None:
        for event in taken.copied:
            event.synchronize()
        write_call(
            self.folder,
            taken.tensors,
            taken.call_facts,
            trains=taken.trains,
            origin=taken.origin,
            left_out=taken.left_out,
        )


def is_in_backward() -> bool:
    """Then a forward is a checkpoint's re-run of one that was seen. torch.utils.checkpoint asks the same way."""
    return bool(torch._C._current_graph_task_id() != -1)


def copy_to_host(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[torch.cuda.Event]]:
    """Copies that the job's later changes do not reach; those from CUDA are complete once the events have happened."""
    copies = {name: _copy_to_host(tensor.detach()) for name, tensor in tensors.items()}
    events = []
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return copies, events


def _copy_to_host(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)
    return tensor.to("cpu", copy=True)
