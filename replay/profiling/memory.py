"""Run one pass with the history of its allocations on, and say what held its peak.

    held = held_at_peak(run, backend.model, spec, device, file, resident=meter.held_bytes)

Each block in use at the peak is one of: weights, what the optimizer keeps, gradients, communication, the head,
activations of a module, or other. Weights and gradients are told by address, the rest by when or where they were
allocated. On CUDA the history is the allocator's; on a CPU `host_memory` makes one.
"""

import pickle
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from actor_init.model import find_blocks
from actor_init.spec import ActorSpec
from actor_init.tracing import watch_modules
from replay.profiling import host_memory
from replay.profiling.memory_advice import PassSize, savings
from replay.profiling.memory_peak import Block, Frame, Peak, Snapshot, peak_of
from replay.profiling.shares import Holder, HolderKind, MemoryProfile
from replay.runlog.records import is_out_of_memory

MAX_EVENTS = 1_000_000  # of the history; a pass of 32 layers has about 30,000
COMMUNICATING = ("_fsdp_collectives.py", "distributed_c10d.py", "deepspeed/runtime", "deepspeed/comm")
HEAD = ("actor_init/head/", "actor_init/actor.py", "actor_init/parallel/vocab_parallel.py")
HEAD_NAME = "lm_head"  # where the model does not say
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # of a block in a module's name


@dataclass(kw_only=True)
class History:
    """What is known of the allocations of a pass besides the allocator's own history."""

    device: torch.device
    first: int = 0  # the allocator's count of allocations when the history began
    begins: list[tuple[int, str | None]] = field(default_factory=list)  # from which allocation on, which module ran
    forward_end: int | None = None  # allocations from here on are backward's
    phases_end: int | None = None  # those from here on are no part of what a pass is measured by
    gradients_before: dict[int, int] = field(default_factory=dict)  # bytes by address, when the pass began
    gradients: Mapping[int, int] = field(default_factory=dict)  # before the window ended
    peak: int = 0
    num_tokens: int = 0  # fed to the model on this rank
    trains: bool = True  # was autograd on?
    failed: Snapshot | None = None  # the allocator's snapshot when it ran out of memory

    def forward_ended(self) -> None:
        self.forward_end = self.number()

    def backward_ended(self, model: PreTrainedModel) -> None:
        """Note where the gradients are, before the window's end clears them."""
        self.gradients = _gradients_of(model)

    def phases_ended(self) -> None:
        self.phases_end = self.number()

    def number(self) -> int:
        """Return the number of the next allocation, from 0; on a CPU the profiler counts them."""
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self.device)["allocation.all.allocated"]) - self.first

    def module_at(self, number: int) -> str | None:
        place = bisect_right(self.begins, number, key=lambda one: one[0]) - 1
        return self.begins[place][1] if place >= 0 else None


def held_at_peak(
    run: Callable[[History], Exception | None],
    model: PreTrainedModel,
    config: PretrainedConfig,
    spec: ActorSpec,
    device: torch.device,
    file: Path,
    *,
    rank: int,
    resident: Callable[[], int | None],
    before: int | None = None,
    only_if_it_ran_out: bool = False,
) -> MemoryProfile | None:
    """Call `run`, one pass, with the history on, and return what held its peak; the snapshot goes into `file`.

    `run` tells the history it is given when forward and backward ended, and the pass's peak. If the pass runs out of
    memory, the peak is that moment.

    resident            returns the bytes that the process has now; for a CPU
    before              the peak of the pass when it ran first; for a CPU
    only_if_it_ran_out  write nothing, and return None, of a pass that did not
    """
    history = History(device=device, gradients_before=_gradients_of(model))
    weights = sorted(_storages([*model.parameters(), *model.buffers()]))
    if device.type == "cuda":
        with _allocator_history(history):
            with _modules_noted(model, spec, history):
                error = run(history)
            ran_out = error is not None and (history.failed is not None or is_out_of_memory(error))
            if only_if_it_ran_out and not ran_out:
                return None
            torch.cuda.synchronize(device)
            snapshot = history.failed if ran_out and history.failed else torch.cuda.memory._snapshot(device)
        _write(snapshot, file)
        peak = peak_of(snapshot, _index(device), until=None if ran_out else history.phases_end)
    else:
        recorded = host_memory.recorded(run, model, spec, history, resident, gives_back_at_once=not only_if_it_ran_out)
        error = recorded.error
        ran_out = is_out_of_memory(error)
        if only_if_it_ran_out and not ran_out:
            return None
        peak = host_memory.peak_of(recorded, history, file)
    holders = _holders(peak, history, weights, {name for name, _ in find_blocks(model)}, head=_head_name(model))
    size = PassSize.of(
        model,
        config,
        spec,
        history.num_tokens,
        trains=history.trains,
        keeps_gradients=bool(history.gradients) or ran_out,
    )
    return MemoryProfile(
        rank=rank,
        device=device.type,
        peak_bytes=peak.allocated_bytes,
        counted_bytes=history.peak,
        reserved_bytes=peak.reserved_bytes if device.type == "cuda" else before,
        ran_out=str(error) if ran_out else None,
        failed=f"{type(error).__name__}: {error}" if error is not None and not ran_out else None,
        holders=holders,
        snapshot=file.name,
        savings=savings(holders, spec, size),
    )


@contextmanager
def _allocator_history(history: History) -> Iterator[None]:
    """Record the allocator's history while the block runs; note its snapshot when memory runs out."""
    torch.cuda.synchronize(history.device)
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_EVENTS)
    _attach_observer()
    _recorded.append(history)
    try:
        history.first = history.number()
        yield
    finally:
        _recorded.remove(history)
        torch.cuda.memory._record_memory_history(None)


_recorded: list[History] = []  # whose pass runs now


@cache
def _attach_observer() -> None:
    """Attach `_runs_out` for good: torch has no way to take an observer away, and each one more takes a snapshot."""
    torch._C._cuda_attach_out_of_memory_observer(_runs_out)  # type: ignore[attr-defined]


def _runs_out(*_: Any) -> None:
    for history in _recorded:
        history.failed = history.failed or torch.cuda.memory._snapshot(history.device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _write(snapshot: Snapshot, file: Path) -> None:
    with file.open("wb") as out:
        pickle.dump(snapshot, out)  # as torch.cuda.memory._dump_snapshot does, for pytorch.org/memory_viz


def _modules_noted(model: PreTrainedModel, spec: ActorSpec, history: History) -> AbstractContextManager[None]:
    """Note between which allocations each module's forward ran."""
    running: list[str | None] = [None]

    def begins(name: str) -> None:
        running.append(name)
        history.begins.append((history.number(), name))

    def ends(_name: str, _output: Any) -> None:
        running.pop()
        history.begins.append((history.number(), running[-1]))

    return watch_modules(model, spec.compile, begins, ends)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the tensors' storages by address; a shard's, of a tensor that is sharded."""
    local = (one.to_local() if isinstance(one, DTensor) else one for one in tensors)
    storages = (one.untyped_storage() for one in local if one.device.type != "meta")
    return {one.data_ptr(): one.nbytes() for one in storages if one.nbytes()}


def _gradients_of(model: PreTrainedModel) -> dict[int, int]:
    return _storages(one.grad for one in model.parameters() if one.grad is not None)


def _head_name(model: nn.Module) -> str:
    if not isinstance(model, PreTrainedModel):  # of a user's own
        return HEAD_NAME
    head = model.get_output_embeddings()
    return next((name for name, one in model.named_modules() if one is head), HEAD_NAME)


def _holders(
    peak: Peak, history: History, weights: Sequence[int], blocks: set[str], *, head: str = HEAD_NAME
) -> list[Holder]:
    sizes: dict[tuple[HolderKind, str], list[int]] = defaultdict(list)
    for block in peak.blocks:
        sizes[_holder_of(block, history, weights, blocks, head)].append(block.num_bytes)
    found = [Holder(kind=kind, name=name, num_bytes=sum(each), count=len(each)) for (kind, name), each in sizes.items()]
    return sorted(found, key=lambda one: -one.num_bytes)


def _holder_of(
    block: Block, history: History, weights: Sequence[int], blocks: set[str], head: str
) -> tuple[HolderKind, str]:
    if block.address == host_memory.PROCESS:
        return HolderKind.PROCESS, ""
    place = bisect_right(weights, block.address + block.num_bytes - 1)
    if place and weights[place - 1] >= block.address:
        return HolderKind.WEIGHTS, ""
    if block.address in history.gradients or (block.number is None and block.address in history.gradients_before):
        return HolderKind.GRADIENTS, ""
    if block.number is None:
        return HolderKind.OPTIMIZER, ""
    files = [frame["filename"].replace("\\\\", "/") for frame in block.frames]
    if any(part in file for file in files[:12] for part in COMMUNICATING):
        return HolderKind.COMMUNICATION, ""
    module = history.module_at(block.number)
    if module == head or any(part in file for file in files[:8] for part in HEAD):
        return HolderKind.HEAD, ""
    if history.forward_end is not None and block.number >= history.forward_end and module is None:
        return HolderKind.BACKWARD, ""
    if module is None:
        return HolderKind.OTHER, _place_of(block.frames)
    is_in_block = any(module == one or module.startswith(f"{one}.") for one in blocks)
    return HolderKind.ACTIVATIONS, NUMBER.sub("*", module) if is_in_block else module


def _place_of(frames: Sequence[Frame]) -> str:
    """Name the innermost Python frame that is not torch's."""
    own = next((frame for frame in frames if "/torch/" not in frame["filename"]), None)
    return "" if own is None else f"{Path(own['filename']).name}:{own['line']} in {own['name']}"
