"""What is said of a rank's last collective in each process group, from torch's flight recorder of collectives."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from capture.black_box.collectives import describe_trace, find_last_collective_in_dump

WORLD, PAIR = ["0", "default_pg"], ["7", "tp"]


def make_entry(group: list[str], number: int, name: str, **more: Any) -> dict[str, Any]:
    return {
        "process_group": group,
        "collective_seq_id": number,
        "profiling_name": name,
        "is_p2p": False,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        "state": "started",
        **more,
    }


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], ""),
        ([make_entry(WORLD, 12, "nccl:all_reduce")], "all_reduce 12 of default_pg, [4, 2] Float, started"),
        # The last of each group, in the order in which the groups were first used.
        (
            [
                make_entry(WORLD, 1, "nccl:broadcast"),
                make_entry(PAIR, 5, "nccl:all_gather", state="completed"),
                make_entry(WORLD, 2, "nccl:all_reduce"),
            ],
            "all_reduce 2 of default_pg, [4, 2] Float, started; all_gather 5 of tp, [4, 2] Float, completed",
        ),
        # A message between two ranks is no collective.
        (
            [make_entry(WORLD, 3, "nccl:all_reduce"), make_entry(WORLD, 3, "nccl:send 0->1", is_p2p=True)],
            "all_reduce 3 of default_pg, [4, 2] Float, started",
        ),
        # Two groups of one name are two.
        (
            [make_entry(["1", "dp"], 3, "nccl:all_reduce"), make_entry(["2", "dp"], 4, "nccl:all_reduce")],
            "all_reduce 3 of dp, [4, 2] Float, started; all_reduce 4 of dp, [4, 2] Float, started",
        ),
        (
            [
                make_entry(
                    WORLD, 9, "barrier", input_sizes=[[1], [2, 3]], input_dtypes=["Float", "Float", "Int"], state=""
                )
            ],
            "barrier 9 of default_pg, [1] [2, 3] Float Int",
        ),
        ([make_entry([], 9, "nccl:barrier", input_sizes=[], input_dtypes=[])], "barrier 9 of a group, started"),
    ],
)
def test_the_last_collective_of_each_group_is_described(entries: list[dict[str, Any]], said: str) -> None:
    assert describe_trace({"entries": entries}) == said


def test_a_dump_counts_if_it_is_this_ranks_and_newer_than_the_recording(tmp_path: Path) -> None:
    prefix = str(tmp_path / "trace_")
    for rank in (1, 11):
        dump = {"entries": [make_entry(WORLD, rank, "nccl:all_reduce")]}
        path = Path(f"{prefix}{rank}")
        path.write_bytes(pickle.dumps(dump))
        os.utime(path, (1000.0, 1000.0))
    said = "all_reduce 1 of default_pg, [4, 2] Float, started"
    assert find_last_collective_in_dump(1, prefix, after=999.0) == said
    assert find_last_collective_in_dump(1, prefix, after=1001.0) == ""
    assert find_last_collective_in_dump(2, prefix, after=0.0) == ""
    Path(f"{prefix}1").write_bytes(b"no dump")
    assert find_last_collective_in_dump(1, prefix, after=0.0) == ""
