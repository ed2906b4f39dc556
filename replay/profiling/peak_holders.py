"""Run one pass with the history of its allocations on, and find what held its peak.

    held = find_peak_holders(run, backend.model, spec, device, file, resident=meter.held_bytes)

Each block in use at the peak is one of: weights, what the optimizer keeps, gradients, communication, the head,
activations of a module, or other. Weights and gradients are told by address, the others by when or where they were
allocated. On CUDA the history is the allocator's; on a CPU `host_memory` makes one.
"""

import pickle
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from actor_init.model import find_blocks
from actor_init.spec import ActorSpec
from actor_init.tracing import watch_modules
from replay.profiling import host_memory
from replay.profiling.memory_advice import PassSize, predict_savings
from replay.profiling.profile_records import Holder, HolderKind, MemoryProfile
from replay.profiling.snapshot_peak import Block, Peak, PythonFrame, Snapshot, find_snapshot_peak
from replay.runlog.records import is_out_of_memory

# The longest history that is kept. A pass of 32 layers has about 30,000 events.
MAX_EVENTS = 1_000_000
# Parts of file names: a block that was allocated from such a file is communication, or belongs to the head.
COMMUNICATION_FILES = ("_fsdp_collectives.py", "distributed_c10d.py", "deepspeed/runtime", "deepspeed/comm")
HEAD_FILES = ("actor_init/head/", "actor_init/action_log_probs.py", "actor_init/parallel/vocab_parallel.py")
# The name of the head's module where the model does not tell it.
HEAD_NAME = "lm_head"
BLOCK_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class CudaAllocator:
    """torch's allocator on CUDA: it counts, records a history of each block, and tells when memory runs out."""

    def __init__(self) -> None:
        # The histories of passes that run now: the observer of memory that runs out knows no other way to them.
        self._open_histories: list[AllocationHistory] = []
        self._has_observer = False

    @contextmanager
    def record(self, history: "AllocationHistory") -> Iterator[None]:
        """Record the allocator's history while the block runs; note its snapshot when memory runs out."""
        self.synchronize(history.device)
        self.switch_history("all")
        if not self._has_observer:
            # For good: torch takes no observer away, and each one more takes a snapshot.
            self.attach_observer(self._note_out_of_memory)
            self._has_observer = True
        self._open_histories.append(history)
        try:
            history.first_number = history.count_allocations()
            yield
        finally:
            self._open_histories.remove(history)
            self.switch_history(None)

    def _note_out_of_memory(self, *_: Any) -> None:
        for history in self._open_histories:
            history.snapshot_out_of_memory = history.snapshot_out_of_memory or self.take_snapshot(history.device)

    # The methods below are torch's.

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def switch_history(self, events: Literal["all"] | None) -> None:
        if events is None:
            torch.cuda.memory._record_memory_history(None)
        else:
            torch.cuda.memory._record_memory_history(events, context="alloc", stacks="python", max_entries=MAX_EVENTS)

    def count_allocations(self, device: torch.device) -> int:
        return int(torch.cuda.memory_stats(device)["allocation.all.allocated"])

    def take_snapshot(self, device: torch.device) -> Snapshot:
        snapshot: Snapshot = torch.cuda.memory._snapshot(device)
        return snapshot

    def find_device_index(self, device: torch.device) -> int:
        return torch.cuda.current_device() if device.index is None else device.index

    def attach_observer(self, observer: Callable[..., None]) -> None:
        torch._C._cuda_attach_out_of_memory_observer(observer)  # type: ignore[attr-defined]


# The one of this process.
CUDA_ALLOCATOR = CudaAllocator()


@dataclass(kw_only=True)
class AllocationHistory:
    """What is known of the allocations of a pass besides the allocator's own history."""

    device: torch.device
    allocator: CudaAllocator = CUDA_ALLOCATOR
    # The allocator's count of allocations when the history began.
    first_number: int = 0
    # From each allocation on, the module with this name ran.
    module_borders: list[tuple[int, str | None]] = field(default_factory=list)
    # Allocations from this number on are backward's.
    forward_end: int | None = None
    # A pass is not measured by allocations from this number on.
    phases_end: int | None = None
    # The bytes of gradients by address: when the pass began, and before the end of the window cleared them.
    gradients_before: dict[int, int] = field(default_factory=dict)
    gradients: Mapping[int, int] = field(default_factory=dict)
    peak: int = 0
    # How many tokens were fed to the model on this rank, and whether autograd was on.
    num_tokens: int = 0
    trains: bool = True
    # The allocator's snapshot at the moment when memory ran out.
    snapshot_out_of_memory: Snapshot | None = None

    def note_forward_end(self) -> None:
        self.forward_end = self.count_allocations()

    def note_gradients(self, model: PreTrainedModel) -> None:
        """Note where the gradients are, before the window's end clears them."""
        self.gradients = _map_gradients(model)

    def note_phases_end(self) -> None:
        self.phases_end = self.count_allocations()

    def count_allocations(self) -> int:
        """Return the number of the next allocation, from 0; on a CPU the profiler counts them."""
        if self.device.type != "cuda":
            return 0
        return self.allocator.count_allocations(self.device) - self.first_number

    def find_module(self, number: int) -> str | None:
        """Return the module whose forward made the allocation of that number."""
        place = bisect_right(self.module_borders, number, key=lambda border: border[0]) - 1
        return self.module_borders[place][1] if place >= 0 else None


def find_peak_holders(
    run: Callable[[AllocationHistory], Exception | None],
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
    allocator: CudaAllocator = CUDA_ALLOCATOR,
) -> MemoryProfile | None:
    """Call `run`, one pass, with the history on, and return what held its peak; the snapshot goes into `file`.

    `run` tells the history it is given when forward and backward ended, and the pass's peak. If the pass runs out of
    memory, the peak is that moment.

    The addresses of weights and gradients are noted before the pass. Then it runs while its allocations are recorded,
    the peak is found in the record, and each block that was in use there is told by what it was held for.

    resident            returns the bytes that the process has now; for a CPU
    before              the peak of the pass when it ran first; for a CPU
    only_if_it_ran_out  write nothing, and return None, of a pass that did not
    allocator           has the history on CUDA
    """
    history = AllocationHistory(device=device, allocator=allocator, gradients_before=_map_gradients(model))
    weights = sorted(_map_storages([*model.parameters(), *model.buffers()]))
    if device.type == "cuda":
        with allocator.record(history):
            with _note_modules(model, spec, history):
                error = run(history)
            ran_out = error is not None and (history.snapshot_out_of_memory is not None or is_out_of_memory(error))
            if only_if_it_ran_out and not ran_out:
                return None
            allocator.synchronize(device)
            snapshot_then = history.snapshot_out_of_memory if ran_out else None
            snapshot = snapshot_then or allocator.take_snapshot(device)
        _write(snapshot, file)
        device_index = allocator.find_device_index(device)
        peak = find_snapshot_peak(snapshot, device_index, until=None if ran_out else history.phases_end)
    else:
        recording = host_memory.record_pass(
            run, model, spec, history, resident, gives_back_at_once=not only_if_it_ran_out
        )
        error = recording.error
        ran_out = is_out_of_memory(error)
        if only_if_it_ran_out and not ran_out:
            return None
        peak = host_memory.find_recorded_peak(recording, history, file)
    block_names = {name for name, _ in find_blocks(model)}
    holders = group_holders(peak, history, weights, block_names, head=find_head_name(model))
    size = PassSize.measure(
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
        savings=predict_savings(holders, spec, size),
    )


def _write(snapshot: Snapshot, file: Path) -> None:
    # As torch.cuda.memory._dump_snapshot does: pytorch.org/memory_viz reads it.
    with file.open("wb") as out:
        pickle.dump(snapshot, out)


def _note_modules(model: PreTrainedModel, spec: ActorSpec, history: AllocationHistory) -> AbstractContextManager[None]:
    """Note between which allocations each module's forward ran."""
    running: list[str | None] = [None]

    def begins(name: str) -> None:
        running.append(name)
        history.module_borders.append((history.count_allocations(), name))

    def ends(_name: str, _output: Any) -> None:
        running.pop()
        history.module_borders.append((history.count_allocations(), running[-1]))

    return watch_modules(model, spec.compile, begins, ends)


def _map_storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the tensors' storages by address; of a sharded tensor, those of this rank's shard."""
    local_tensors = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = (tensor.untyped_storage() for tensor in local_tensors if tensor.device.type != "meta")
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _map_gradients(model: PreTrainedModel) -> dict[int, int]:
    return _map_storages(parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def find_head_name(model: nn.Module) -> str:
    """Return the name of the module that makes the logits; the usual one of a user's own model, which does not tell."""
    if not isinstance(model, PreTrainedModel):
        return HEAD_NAME
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), HEAD_NAME)


def group_holders(
    peak: Peak, history: AllocationHistory, weights: Sequence[int], blocks: set[str], *, head: str = HEAD_NAME
) -> list[Holder]:
    """Charge each block of the peak to one part, and return the parts, the largest first.

    weights  the addresses of parameters and buffers, sorted
    blocks   the names of the model's transformer layers
    """
    sizes: dict[tuple[HolderKind, str], list[int]] = defaultdict(list)
    for block in peak.blocks:
        sizes[_classify_block(block, history, weights, blocks, head)].append(block.num_bytes)
    holders = [
        Holder(kind=kind, name=name, num_bytes=sum(block_sizes), count=len(block_sizes))
        for (kind, name), block_sizes in sizes.items()
    ]
    return sorted(holders, key=lambda holder: -holder.num_bytes)


def _classify_block(
    block: Block, history: AllocationHistory, weights: Sequence[int], blocks: set[str], head: str
) -> tuple[HolderKind, str]:
    if block.address == host_memory.PROCESS_ADDRESS:
        return HolderKind.PROCESS, ""
    place = bisect_right(weights, block.address + block.num_bytes - 1)
    if place and weights[place - 1] >= block.address:
        return HolderKind.WEIGHTS, ""
    if block.address in history.gradients or (block.number is None and block.address in history.gradients_before):
        return HolderKind.GRADIENTS, ""
    if block.number is None:
        return HolderKind.OPTIMIZER, ""
    files = [frame["filename"].replace("\\\\", "/") for frame in block.frames]
    if any(part in file for file in files[:12] for part in COMMUNICATION_FILES):
        return HolderKind.COMMUNICATION, ""
    module = history.find_module(block.number)
    if module == head or any(part in file for file in files[:8] for part in HEAD_FILES):
        return HolderKind.HEAD, ""
    if history.forward_end is not None and block.number >= history.forward_end and module is None:
        return HolderKind.BACKWARD, ""
    if module is None:
        return HolderKind.OTHER, _describe_place(block.frames)
    is_in_block = any(module == name or module.startswith(f"{name}.") for name in blocks)
    return HolderKind.ACTIVATIONS, BLOCK_NUMBER.sub("*", module) if is_in_block else module


def _describe_place(frames: Sequence[PythonFrame]) -> str:
    """Name the innermost Python frame that is not torch's."""
    frame = next((frame for frame in frames if "/torch/" not in frame["filename"]), None)
    return "" if frame is None else f"{Path(frame['filename']).name}:{frame['line']} in {frame['name']}"
