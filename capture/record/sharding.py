"""Find a few neighbouring elements of a parameter in what a rank holds of it.

A rank may hold the whole parameter, a DTensor's shard, a partition of ZeRO 3, or a flat shard of FSDP1, in which parts
of several parameters lie one after the other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# The number of the first element in the whole parameter, flattened, and how many elements follow each other.
ElementRun = tuple[int, int]
FindRun = Callable[[tuple[int, ...]], ElementRun]
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class UnknownLayoutError(ValueError):
    """The parameter is held in a way that is not known here. The message says which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLocation:
    """Where neighbouring elements lie in what this rank holds of a parameter.

    shape            that of the whole parameter
    start            number of the first element in the whole parameter, flattened
    count            number of elements; 0 if other ranks hold them
    offset, stride   of these elements in what the rank holds, in elements
    local_attribute  attribute of the parameter that holds the rank's part; None: the parameter itself
    """

    shape: tuple[int, ...]
    start: int
    count: int
    offset: int
    stride: int
    is_sharded: bool
    dtype: str
    local_attribute: str | None

    def view_in(self, tensor: Any) -> Tensor:
        """Return a view of the elements in `tensor`: the parameter, its gradient, or a state of its shape."""
        local: Tensor = tensor if self.local_attribute is None else getattr(tensor, self.local_attribute)
        return local.as_strided((self.count,), (self.stride,), local.storage_offset() + self.offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPart:
    """Which elements of a parameter, or of its gradient, a rank holds.

    shape            that of the whole parameter
    first            number of the first one in the whole parameter, flattened; None: they are not neighbours there, or
                     not in the tensor
    count            number of elements
    offset           of the first one in the tensor that holds them, in elements
    is_whole_tensor  the tensor holds nothing else
    is_part          other ranks hold other elements
    num_copies       number of ranks that hold these ones
    """

    shape: tuple[int, ...]
    first: int | None
    count: int
    offset: int = 0
    is_whole_tensor: bool = True
    is_part: bool = False
    num_copies: int = 1

    @property
    def end(self) -> int:
        return (self.first or 0) + self.count

    def locate(self, run: ElementRun, *, dtype: torch.dtype, local_attribute: str | None = None) -> SampleLocation:
        """Find the elements of `run` that are among these, which are neighbours in the tensor.

        dtype            of the tensor that holds them
        local_attribute  as of `SampleLocation`
        """
        assert self.first is not None
        run_start, run_length = run
        start, end = max(run_start, self.first), min(run_start + run_length, self.end)
        return SampleLocation(
            shape=self.shape,
            start=start if end > start else run_start,
            count=max(end - start, 0),
            offset=self.offset + max(start - self.first, 0),
            stride=1,
            is_sharded=self.is_part,
            dtype=_name_dtype(dtype),
            local_attribute=local_attribute,
        )


def locate_part(tensor: Any) -> HeldPart:
    """Tell which part of a parameter or gradient a plain tensor or a DTensor is. Raises UnknownLayoutError."""
    if not (hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")):
        if type(tensor) not in (Tensor, nn.Parameter):
            raise UnknownLayoutError
        shape = tuple(tensor.shape)
        _check_layout(tensor, shape)
        return HeldPart(shape=shape, first=0 if tensor.is_contiguous() else None, count=tensor.numel())
    shape, mesh, local = tuple(tensor.shape), tensor.device_mesh, tensor._local_tensor
    local_indices = _list_indices_of_shard(tensor)
    _check_layout(local, shape)
    num_shards = math.prod(
        mesh.size(axis) for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()
    )
    first: int | None = None
    if not shape:
        first = 0
    elif local.numel() and local.is_contiguous() and tuple(local.shape[1:]) == shape[1:]:
        rows = local_indices[0].tolist()
        if rows == list(range(rows[0], rows[0] + len(rows))):
            first = rows[0] * math.prod(shape[1:])
    return HeldPart(
        shape=shape, first=first, count=local.numel(), is_part=num_shards > 1, num_copies=mesh.size() // num_shards
    )


def locate_part_in_flat(flat: Any, local: Tensor, number: int) -> HeldPart:
    """Tell which part of a parameter is in a rank's shard of FSDP1's flat one. Raises UnknownLayoutError.

    local, number  as in `locate_run_in_flat`
    """
    shape, info = tuple(flat._shapes[number]), flat._shard_param_infos[number]
    _check_layout(local, shape)
    if local.ndim != 1 or (info.in_shard and info.offset_in_shard + info.numel_in_shard > local.numel()):
        raise UnknownLayoutError("in flat shards (FSDP1) of a kind that is not known here")
    is_split = not info.in_shard or info.numel_in_shard < math.prod(shape)
    begin, end = (info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else (0, 0)
    return HeldPart(
        shape=shape,
        first=begin,
        count=end - begin,
        offset=info.offset_in_shard or 0,
        is_whole_tensor=False,
        is_part=is_split or local.numel() < flat._unpadded_unsharded_size.numel(),
    )


def locate_part_in_partition(parameter: Any) -> HeldPart:
    """Tell which part of a parameter of ZeRO 3 is in this rank's partition of it. Raises UnknownLayoutError.

    ZeRO 3 flattens a parameter and gives each rank an equal partition, padded at the end.
    """
    partition, shape = parameter.ds_tensor, tuple(parameter.ds_shape)
    group = parameter.ds_process_group
    num_ranks, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    size = math.prod(shape)
    if partition is None or partition.ndim != 1 or partition.numel() != -(-size // num_ranks):
        raise UnknownLayoutError("partitioned by ZeRO 3 in a way that is not known here")
    _check_layout(partition, shape)
    first = min(rank * partition.numel(), size)
    return HeldPart(
        shape=shape,
        first=first,
        count=min(partition.numel(), size - first),
        is_whole_tensor=False,
        is_part=num_ranks > 1,
    )


def locate_run(parameter: Any, find_run: FindRun) -> SampleLocation:
    """Find the run that `find_run` gives for the full shape of `parameter`. Raises UnknownLayoutError."""
    if hasattr(parameter, "ds_tensor"):
        part = locate_part_in_partition(parameter)
        return part.locate(find_run(part.shape), dtype=parameter.ds_tensor.dtype, local_attribute="ds_tensor")
    if hasattr(parameter, "placements") and hasattr(parameter, "device_mesh"):
        return _locate_in_dtensor(parameter, find_run)
    if type(parameter) not in (Tensor, nn.Parameter):
        raise UnknownLayoutError
    shape = tuple(parameter.shape)
    _check_layout(parameter, shape)
    start, count = find_run(shape)
    offset, stride = _find_offset_and_stride(_unflatten(start, shape), parameter)
    return SampleLocation(
        shape=shape,
        start=start,
        count=count,
        offset=offset,
        stride=stride,
        is_sharded=False,
        dtype=_name_dtype(parameter.dtype),
        local_attribute=None,
    )


def locate_run_in_flat(flat: Any, local: Tensor, number: int, find_run: FindRun) -> SampleLocation:
    """Find the run in a rank's shard of FSDP1's flat parameter. Raises UnknownLayoutError.

    local   the shard, or its gradient
    number  position of the parameter among those in the flat one
    """
    part = locate_part_in_flat(flat, local, number)
    return part.locate(find_run(part.shape), dtype=local.dtype)


def list_local_indices(size: int, shards: Sequence[tuple[int, int, int]]) -> Tensor:
    """List which of `size` indices along a dimension this rank has after sharding by each of `shards`.

    A shard is (number of ranks, this rank's number, split factor), in the order of the mesh's dimensions. The factor is
    1, except for torch's `_StridedShard`, which shards each of that many chunks.
    """
    indices = torch.arange(size, device="cpu")
    for num_ranks, rank, factor in shards:
        indices = torch.cat([_chunk(chunk, num_ranks)[rank] for chunk in _chunk(indices, factor)])
    return indices


def _chunk(indices: Tensor, num_chunks: int) -> Sequence[Tensor]:
    """Cut as torch.chunk does, but into exactly `num_chunks`: the last ones may be empty."""
    size = -(-len(indices) // num_chunks)
    return indices.tensor_split([min(len(indices), number * size) for number in range(1, num_chunks)])


def _locate_in_dtensor(parameter: Any, find_run: FindRun) -> SampleLocation:
    """Find the run in a DTensor's shard.

    It lists, for each dimension, which indices of the whole this rank has, and looks the run's indices up there. A run
    lies along the last dimension; of its elements those are taken that are neighbours in the shard too.
    """
    shape, local = tuple(parameter.shape), parameter._local_tensor
    local_indices = _list_indices_of_shard(parameter)
    _check_layout(local, shape)
    start, count = find_run(shape)
    facts: dict[str, Any] = {
        "shape": shape,
        "is_sharded": any(not placement.is_replicate() for placement in parameter.placements),
        "dtype": _name_dtype(local.dtype),
        "local_attribute": "_local_tensor",
    }
    *rows, column = _unflatten(start, shape) if shape else [0]
    local_rows = [
        torch.nonzero(indices == row).flatten().tolist() for indices, row in zip(local_indices, rows, strict=False)
    ]
    columns = local_indices[-1].tolist() if shape else [0]
    # The run's elements that this rank has: the number in the run, and the column in the shard.
    elements = [(number, columns.index(column + number)) for number in range(count) if column + number in columns]
    elements = [pair for pair in elements if pair[1] - elements[0][1] == pair[0] - elements[0][0]]
    if not elements or not all(local_rows):
        return SampleLocation(start=start, count=0, offset=0, stride=1, **facts)
    first_number, first_column = elements[0]
    first_element = [*(matches[0] for matches in local_rows), first_column][: len(shape)]
    offset, stride = _find_offset_and_stride(first_element, local)
    return SampleLocation(start=start + first_number, count=len(elements), offset=offset, stride=stride, **facts)


def _list_indices_of_shard(parameter: Any) -> list[Tensor]:
    """List, for each dimension of a DTensor, which indices of the whole this rank has. Raises UnknownLayoutError."""
    shape, mesh = tuple(parameter.shape), parameter.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in parameter.placements):
        raise UnknownLayoutError("of ranks beside the mesh, or partial")
    shards: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            factor = int(getattr(placement, "split_factor", 1))
            shards[placement.dim].append((mesh.size(axis), coordinate[axis], factor))
    local_indices = [list_local_indices(size, cuts) for size, cuts in zip(shape, shards, strict=True)]
    if tuple(map(len, local_indices)) != tuple(parameter._local_tensor.shape):
        raise UnknownLayoutError("sharded in a way that is not known here")
    return local_indices


def _check_layout(local: Tensor, shape: tuple[int, ...]) -> None:
    if local.dtype not in _FLOATS or local.layout != torch.strided or local.device.type == "meta":
        raise UnknownLayoutError(f"of {local.dtype} on {local.device.type}")
    if not math.prod(shape):
        raise UnknownLayoutError("without elements")


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unflatten(index: int, shape: Sequence[int]) -> list[int]:
    indices = []
    for size in reversed(shape):
        indices.append(index % size)
        index //= size
    return indices[::-1]


def _find_offset_and_stride(indices: Sequence[int], local: Tensor) -> tuple[int, int]:
    """Return the offset of an element, and the stride along the last dimension."""
    strides = local.stride()
    return sum(index * stride for index, stride in zip(indices, strides, strict=True)), strides[-1] if strides else 1


def count_local_elements(parameter: Any) -> int:
    """Count the elements of a parameter that a rank holds, without padding: the same number on all ranks."""
    if hasattr(parameter, "ds_numel"):
        return int(parameter.ds_numel // torch.distributed.get_world_size(parameter.ds_process_group))
    placements = getattr(parameter, "placements", ())
    sizes = [parameter.device_mesh.size(axis) for axis, placement in enumerate(placements) if placement.is_shard()]
    return int(parameter.numel() // math.prod(sizes))


def copy_local_norm(norm: Any) -> tuple[Tensor | None, bool]:
    """Copy what this rank has of a norm, and tell whether that is a part: then the squares of all ranks add up.

    A norm over shards may be unreduced (DTensor). Computing the whole norm would take a collective.
    """
    if not isinstance(norm, Tensor) or norm.numel() != 1:
        return None, False
    local: Any = norm.detach()
    placements: Sequence[Any] = getattr(norm, "placements", ())
    partial_axes = [axis for axis, placement in enumerate(placements) if placement.is_partial()]
    if hasattr(local, "_local_tensor"):
        local = local._local_tensor
    local_norm: Tensor = local.reshape(1).clone()
    if partial_axes:
        num_parts = math.prod(norm.device_mesh.size(axis) for axis in partial_axes)  # type: ignore[attr-defined]
        # Ranks that have the same part would be added up more than once.
        local_norm *= math.sqrt(num_parts / torch.distributed.get_world_size())
    return local_norm, bool(partial_axes)
