"""Which part of a parameter lies in a rank's shard of FSDP1's flat parameter, without processes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from capture.record.sharding import UnknownLayoutError, locate_part_in_flat

SHAPES = [(5,), (2, 3), (3,)]
NUM_RANKS, SHARD = 3, 5


def make_flat(rank: int) -> Any:
    """Make what FSDP1 notes of its flat parameter on a rank: the last index of a part is one that is in it."""
    infos = []
    begin = 0
    for shape in SHAPES:
        size = torch.Size(shape).numel()
        first, last = max(begin, rank * SHARD), min(begin + size, (rank + 1) * SHARD) - 1
        is_in = first <= last
        infos.append(
            SimpleNamespace(
                in_shard=is_in,
                offset_in_shard=first - rank * SHARD if is_in else None,
                numel_in_shard=last - first + 1 if is_in else None,
                intra_param_start_idx=first - begin if is_in else None,
                intra_param_end_idx=last - begin if is_in else None,
            )
        )
        begin += size
    return SimpleNamespace(_shapes=SHAPES, _shard_param_infos=infos, _unpadded_unsharded_size=torch.Size((begin,)))


def test_the_parts_of_all_ranks_are_the_parameter() -> None:
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    whole = torch.arange(float(NUM_RANKS * SHARD))  # one element more than the parameters have
    parameters = whole[: sum(sizes)].split(sizes)
    for number, parameter in enumerate(parameters):
        found = []
        for rank in range(NUM_RANKS):
            local = whole[rank * SHARD : (rank + 1) * SHARD]
            part = locate_part_in_flat(make_flat(rank), local, number)
            assert (part.shape, part.is_whole_tensor, part.is_part) == (SHAPES[number], False, True)
            assert part.first is not None
            held = local[part.offset : part.offset + part.count]
            assert torch.equal(held, parameter[part.first : part.first + part.count])
            found.append(held)
        assert torch.equal(torch.cat(found), parameter)


def test_a_shard_that_is_shorter_than_its_parts_is_not_known() -> None:
    with pytest.raises(UnknownLayoutError):
        locate_part_in_flat(make_flat(0), torch.zeros(SHARD - 1), 0)
