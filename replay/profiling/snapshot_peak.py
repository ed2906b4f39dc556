"""Find what held the peak of a CUDA allocator's history, as `torch.cuda.memory._snapshot` has it.

A history that began in the middle of a program is replayed here: what is freed in it, or lives at its end, and was not
allocated in it, was there before. So the peak, and which blocks lived then, are exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict


class PythonFrame(TypedDict):
    """A frame of Python's stack, as torch names it."""

    filename: str
    line: int
    name: str


class AllocatorEvent(TypedDict):
    """Something that CUDA's allocator did; what else torch says of it is not read."""

    action: str
    addr: int
    size: int
    frames: NotRequired[Sequence[PythonFrame]]


class SegmentBlock(TypedDict):
    """A part of a segment, in use or not."""

    address: int
    size: int
    state: str


class AllocatorSegment(TypedDict):
    """Memory that the allocator holds from the driver."""

    device: int
    total_size: int
    blocks: Sequence[SegmentBlock]


class Snapshot(TypedDict):
    """The part of torch's snapshot that is read: what is held now, and by device what happened since it is recorded."""

    device_traces: Sequence[Sequence[AllocatorEvent]]
    segments: Sequence[AllocatorSegment]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Memory that was in use at the peak."""

    address: int
    num_bytes: int
    # The number of its allocation in the history, from 0. None: it was allocated before.
    number: int | None
    # Python's stack at the allocation, innermost first.
    frames: Sequence[PythonFrame]


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The moment of the history at which most memory was in use."""

    allocated_bytes: int
    # What the allocator held from the driver at that moment.
    reserved_bytes: int
    blocks: Sequence[Block]
    # The number of the allocation that made the peak, from 0. -1: most was in use when the history began.
    number: int
    num_allocations: int


def find_snapshot_peak(snapshot: Snapshot, device: int, *, until: int | None = None) -> Peak:
    """Find the peak in the history of one device; if `until` is given, before the allocation of that number.

    A first pass over the events finds the moment of the peak, a second one which blocks lived then: to copy them at
    each new maximum would take too long.
    """
    events = snapshot["device_traces"][device]
    live = {block.address: block for block in _list_blocks_before(snapshot, device)}
    allocated = sum(block.num_bytes for block in live.values())
    reserved = _compute_reserved_before(snapshot, device)
    most, most_reserved, peak_index, number = allocated, reserved, -1, -1
    for index, event in enumerate(events):
        match event["action"]:
            case "alloc":
                number += 1
                allocated += event["size"]
                live[event["addr"]] = _make_block(event, number)
                if allocated > most and (until is None or number < until):
                    most, most_reserved, peak_index = allocated, reserved, index
            case "free_completed":
                block = live.pop(event["addr"], None)
                allocated -= block.num_bytes if block is not None else 0
            case "segment_alloc" | "segment_map":
                reserved += event["size"]
            case "segment_free" | "segment_unmap":
                reserved -= event["size"]
    live, peak_number = {block.address: block for block in _list_blocks_before(snapshot, device)}, -1
    for event in events[: peak_index + 1]:
        if event["action"] == "alloc":
            peak_number += 1
            live[event["addr"]] = _make_block(event, peak_number)
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    return Peak(
        allocated_bytes=most,
        reserved_bytes=most_reserved,
        blocks=list(live.values()),
        number=peak_number,
        num_allocations=number + 1,
    )


def _make_block(event: AllocatorEvent, number: int) -> Block:
    return Block(address=event["addr"], num_bytes=event["size"], number=number, frames=event.get("frames", []))


def _list_blocks_before(snapshot: Snapshot, device: int) -> list[Block]:
    """Return the blocks that were in use when the history began."""
    sizes: dict[int, int] = {}
    addresses_in_history: set[int] = set()
    for event in snapshot["device_traces"][device]:
        if event["action"] == "free_completed" and event["addr"] not in addresses_in_history:
            sizes[event["addr"]] = event["size"]
        if event["action"] in ("alloc", "free_completed"):
            addresses_in_history.add(event["addr"])
    for segment in snapshot["segments"]:
        if segment["device"] == device:
            for block in segment["blocks"]:
                if block["state"].startswith("active") and block["address"] not in addresses_in_history:
                    sizes[block["address"]] = block["size"]
    return [Block(address=address, num_bytes=size, number=None, frames=()) for address, size in sizes.items()]


def _compute_reserved_before(snapshot: Snapshot, device: int) -> int:
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    changed = sum(signs.get(event["action"], 0) * event["size"] for event in snapshot["device_traces"][device])
    held = sum(segment["total_size"] for segment in snapshot["segments"] if segment["device"] == device)
    return held - changed
