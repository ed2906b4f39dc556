"""Find a few elements of a parameter in what a rank holds of it.

That is the whole, a DTensor, partitions of ZeRO 3, or a flat shard of FSDP1, which holds several parameters.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ElementRun = tuple[int, int]  # first element in the whole parameter, flattened; number of elements
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class UnknownLayoutError(ValueError):
    """The elements cannot be found. The message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLocation:
    """Where neighbouring elements lie in what this rank holds of a parameter; `count` is 0 if other ranks hold them."""

    shape: tuple[int, ...]  # of the whole parameter
    start: int  # in the whole parameter, flattened
    count: int
    offset: int  # in what the rank holds, in elements of its storage
    stride: int
    is_of_shard: bool
    dtype: str
    held_as: str | None  # attribute of the parameter that holds the rank's part; None: the parameter itself

    def held(self, parameter: Any) -> Tensor:
        held: Tensor = parameter if self.held_as is None else getattr(parameter, self.held_as)
        return held


def locate_run(parameter: Any, run_of: Callable[[tuple[int, ...]], ElementRun]) -> SampleLocation:
    """Find the run that `run_of` gives for the full shape of `parameter`. Raises UnknownLayoutError."""
    if hasattr(parameter, "ds_tensor"):
        return _in_partition(parameter, run_of)
    if hasattr(parameter, "placements") and hasattr(parameter, "device_mesh"):
        return _in_dtensor(parameter, run_of)
    if type(parameter) not in (Tensor, nn.Parameter):
        raise UnknownLayoutError
    shape = tuple(parameter.shape)
    _check(parameter, shape)
    start, count = run_of(shape)
    offset, stride = _in_strides(_unflattened(start, shape), parameter)
    return SampleLocation(
        shape=shape,
        start=start,
        count=count,
        offset=offset,
        stride=stride,
        is_of_shard=False,
        dtype=_name(parameter.dtype),
        held_as=None,
    )


def locate_run_in_flat(
    flat: Any, held: Tensor, number: int, run_of: Callable[[tuple[int, ...]], ElementRun]
) -> SampleLocation:
    """Find the run in a rank's shard of FSDP1's flat parameter. Raises UnknownLayoutError.

    held    the shard, or its gradient
    number  of the parameter in the flat one
    """
    shape, info = tuple(flat._shapes[number]), flat._shard_param_infos[number]
    _check(held, shape)
    if held.ndim != 1 or (info.in_shard and info.offset_in_shard + info.numel_in_shard > held.numel()):
        raise UnknownLayoutError("in flat shards (FSDP1) of a kind that is not known here")
    start, count = run_of(shape)
    begin, end = (info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else (0, 0)
    first, last = max(start, begin), min(start + count, end)
    return SampleLocation(
        shape=shape,
        start=first if last > first else start,
        count=max(last - first, 0),
        offset=(info.offset_in_shard or 0) + max(first - begin, 0),
        stride=1,
        is_of_shard=not info.in_shard
        or info.numel_in_shard < math.prod(shape)
        or held.numel() < flat._unpadded_unsharded_size.numel(),
        dtype=_name(held.dtype),
        held_as=None,
    )


def list_local_indices(size: int, shards: Sequence[tuple[int, int, int]]) -> Tensor:
    """List which of `size` indices along a dimension this rank has after sharding by each of `shards`.

    A shard is (number of ranks, this rank's number, split factor), in the order of the mesh's dimensions. The factor is
    1, except for torch's `_StridedShard`, which shards each of that many chunks.
    """
    indices = torch.arange(size, device="cpu")
    for num_ranks, place, factor in shards:
        indices = torch.cat([_chunks(chunk, num_ranks)[place] for chunk in _chunks(indices, factor)])
    return indices


def _chunks(indices: Tensor, num_chunks: int) -> Sequence[Tensor]:
    """Cut as torch.chunk does, but with empty chunks at the end where that would leave them out."""
    size = -(-len(indices) // num_chunks)
    return indices.tensor_split([min(len(indices), number * size) for number in range(1, num_chunks)])


def _in_dtensor(parameter: Any, run_of: Callable[[tuple[int, ...]], ElementRun]) -> SampleLocation:
    shape, mesh = tuple(parameter.shape), parameter.device_mesh
    local = parameter._local_tensor
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in parameter.placements):
        raise UnknownLayoutError("of ranks beside the mesh, or partial")
    shards: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            factor = int(getattr(placement, "split_factor", 1))
            shards[placement.dim].append((mesh.size(axis), coordinate[axis], factor))
    own = [list_local_indices(size, cuts) for size, cuts in zip(shape, shards, strict=True)]
    if tuple(map(len, own)) != tuple(local.shape):
        raise UnknownLayoutError("sharded in a way that is not known here")
    _check(local, shape)
    start, count = run_of(shape)
    place: dict[str, Any] = {"shape": shape, "is_of_shard": any(shards), "dtype": _name(local.dtype)}
    place |= {"held_as": "_local_tensor"}
    *rows, column = _unflattened(start, shape) if shape else [0]
    positions = [torch.nonzero(indices == row).flatten().tolist() for indices, row in zip(own, rows, strict=False)]
    columns = own[-1].tolist() if shape else [0]
    held = [(number, columns.index(column + number)) for number in range(count) if column + number in columns]
    held = [pair for pair in held if pair[1] - held[0][1] == pair[0] - held[0][0]]  # those that are neighbours here too
    if not held or not all(positions):
        return SampleLocation(start=start, count=0, offset=0, stride=1, **place)
    offset, stride = _in_strides([*(indices[0] for indices in positions), held[0][1]][: len(shape)], local)
    return SampleLocation(start=start + held[0][0], count=len(held), offset=offset, stride=stride, **place)


def _in_partition(parameter: Any, run_of: Callable[[tuple[int, ...]], ElementRun]) -> SampleLocation:
    """Find the run under ZeRO 3, which flattens a parameter and gives each rank an equal piece, padded at the end."""
    part, shape = parameter.ds_tensor, tuple(parameter.ds_shape)
    group = parameter.ds_process_group
    num_ranks, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    if part is None or part.ndim != 1 or part.numel() != -(-math.prod(shape) // num_ranks):
        raise UnknownLayoutError("partitioned by ZeRO 3 in a way that is not known here")
    _check(part, shape)
    start, count = run_of(shape)
    begin = rank * part.numel()
    first, end = max(start, begin), min(start + count, begin + part.numel())
    return SampleLocation(
        shape=shape,
        start=first if end > first else start,
        count=max(end - first, 0),
        offset=max(first - begin, 0),
        stride=1,
        is_of_shard=num_ranks > 1,
        dtype=_name(part.dtype),
        held_as="ds_tensor",
    )


def _check(held: Tensor, shape: tuple[int, ...]) -> None:
    if held.dtype not in _FLOATS or held.layout != torch.strided or held.device.type == "meta":
        raise UnknownLayoutError(f"of {held.dtype} on {held.device.type}")
    if not math.prod(shape):
        raise UnknownLayoutError("without elements")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unflattened(index: int, shape: Sequence[int]) -> list[int]:
    indices_found = []
    for size in reversed(shape):
        indices_found.append(index % size)
        index //= size
    return indices_found[::-1]


def _in_strides(indices: Sequence[int], held: Tensor) -> ElementRun:
    """Return the offset in the storage, and the stride along the last dimension."""
    strides = held.stride()
    return sum(index * stride for index, stride in zip(indices, strides, strict=True)), strides[-1] if strides else 1
