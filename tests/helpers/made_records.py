"""Records with known numbers, for the tests of what is made of them."""

from typing import Any

from replay.runlog.records import PassRecord, PhaseCost, make_record

GIB = 2**30


def cost(seconds: float, peak_gib: float = 1.0) -> PhaseCost:
    return PhaseCost(
        seconds=seconds, allocated_bytes=GIB // 2, peak_allocated_bytes=int(peak_gib * GIB), peak_reserved_bytes=None
    )


def record(index: int, forward: float = 0.1, backward: float = 0.2, **changes: Any) -> PassRecord:
    """A pass of 2 rows, 100 tokens, 80 of them real."""
    values: dict[str, Any] = {
        "index": index,
        "source": f"input_{index}.pkl",
        "rank": 0,
        "data_rank": changes.get("rank", 0),
        "rows": 2,
        "padded_tokens": 100,
        "real_tokens": 80,
        "fed_tokens": 80,
        "row_tokens": [30, 50],
        "trains": True,
        "phases": {"forward": cost(forward), "backward": cost(backward, 2.0)},
        "seconds": forward + backward,
        "loss": 1.5,
    }
    return make_record(**(values | changes))
