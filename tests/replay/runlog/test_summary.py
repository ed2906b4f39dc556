"""Statistics against values computed by hand."""

from typing import Any

import pytest

from replay.runlog.records import PassRecord
from replay.runlog.summary import FAILED, NEW_GRAPH, TRACED, WARMUP, percentile_95, summarize
from tests.helpers.made_records import GIB, cost, record


def test_median_and_p95_of_each_phase() -> None:
    records = [record(i, forward=seconds, backward=2 * seconds) for i, seconds in enumerate([0.1, 0.2, 0.3, 0.4, 0.5])]
    statistics = summarize(records)
    forward, backward = statistics.phases["forward"], statistics.phases["backward"]
    assert forward.median_seconds == pytest.approx(0.3)
    # inclusive: position 0.95 * (5 - 1) = 3.8, four fifths of the way from 0.4 to 0.5
    assert forward.p95_seconds == pytest.approx(0.48)
    assert forward.iqr_seconds == pytest.approx(0.2)  # positions 1 and 3 of 0.1 to 0.5
    assert backward.median_seconds == pytest.approx(0.6)
    assert statistics.median_seconds == pytest.approx(0.9)
    assert statistics.p95_seconds == pytest.approx(1.44)


@pytest.mark.parametrize(("values", "p95"), [([3.0], 3.0), ([1.0, 2.0], 1.95), ([float(n) for n in range(101)], 95.0)])
def test_p95_never_lies_beyond_what_was_measured(values: list[float], p95: float) -> None:
    assert percentile_95(values) == pytest.approx(p95)


def test_speed_is_real_tokens_over_the_seconds_of_the_phases() -> None:
    records = [record(0, real_tokens=80), record(1, real_tokens=60, forward=0.3, seconds=9.0)]
    # (80 + 60) / (0.1 + 0.2 + 0.3 + 0.2)
    assert summarize(records).real_tokens_per_second == pytest.approx(140 / 0.8)


def test_ranks_that_share_an_input_count_its_tokens_once() -> None:
    together = [record(0, rank=rank, data_rank=0, real_tokens=80) for rank in (0, 1)]
    apart = [record(0, rank=rank, data_rank=rank, real_tokens=80) for rank in (0, 1)]
    assert summarize(together).real_tokens_per_second == pytest.approx(80 / 0.3)
    assert summarize(apart).real_tokens_per_second == pytest.approx(160 / 0.3)


def test_padding_is_the_share_of_tokens_that_are_not_real() -> None:
    records = [record(0), record(1, padded_tokens=300, real_tokens=120)]
    assert summarize(records).padding_share == pytest.approx(1 - 200 / 400)


def test_the_slowest_input_and_the_one_with_the_highest_peak_are_named() -> None:
    high = {"forward": cost(0.1, 7.5), "backward": cost(0.1, 3.0)}
    statistics = summarize([record(0), record(1, forward=0.9), record(2, phases=high)])
    assert statistics.slowest is not None
    assert statistics.slowest.source == "input_1.pkl"
    assert statistics.slowest.value == pytest.approx(1.1)
    assert statistics.highest_peak is not None
    assert (statistics.highest_peak.source, statistics.highest_peak.value) == ("input_2.pkl", 7.5 * GIB)
    assert statistics.phases["forward"].peak_allocated_bytes == 7.5 * GIB
    assert statistics.phases["backward"].peak_allocated_bytes == 3.0 * GIB


@pytest.mark.parametrize(
    ("outlier", "reason"),
    [
        (record(1, forward=99.0, warmup=True), WARMUP),
        (record(1, forward=99.0, new_graphs=1), NEW_GRAPH),
        (record(1, forward=99.0, error="broken", error_type="RuntimeError"), FAILED),
        (record(1, forward=99.0, warmup=True, new_graphs=3), WARMUP),
        (record(1, forward=99.0, warmup=True, traced=True), TRACED),
    ],
)
def test_a_pass_that_does_not_count_is_left_out_with_its_reason(outlier: PassRecord, reason: str) -> None:
    statistics = summarize([record(0), outlier, record(2)])
    assert (statistics.num_passes, statistics.num_counted) == (3, 2)
    assert statistics.left_out == {reason: 1}
    assert statistics.phases["forward"].p95_seconds == pytest.approx(0.1)
    assert statistics.real_tokens_per_second == pytest.approx(160 / 0.6)


def test_a_pass_without_backward_has_a_forward_only() -> None:
    statistics = summarize([record(0, phases={"forward": cost(0.1)})])
    assert list(statistics.phases) == ["forward"]
    assert statistics.median_seconds == pytest.approx(0.1)


@pytest.mark.parametrize("records", [[], [record(0, warmup=True)]])
def test_without_a_counted_pass_nothing_is_invented(records: list[PassRecord]) -> None:
    statistics = summarize(records)
    assert statistics.num_counted == 0
    assert statistics.phases == {}
    for name in ("median_seconds", "p95_seconds", "real_tokens_per_second", "slowest", "highest_peak"):
        assert getattr(statistics, name) is None
    assert statistics.padding_share is None
    assert statistics.wait_share is None


def test_ranks_run_at_the_same_time() -> None:
    fast_forward = record(0, forward=0.1, wait_seconds=0.3, backward=0.5, seconds=0.9)
    slow_forward = record(0, forward=0.4, wait_seconds=0.0, backward=0.3, seconds=0.7, rank=1)
    statistics = summarize([fast_forward, slow_forward])
    # the pass is over when rank 0 is, after 0.1 + 0.3 + 0.5 s, and 2 x 80 real tokens go through in that time
    assert statistics.real_tokens_per_second == pytest.approx(160 / 0.9)
    assert statistics.wait_share == pytest.approx(0.3 / 1.6)
    assert statistics.num_passes == 1
    assert statistics.slowest is not None
    assert statistics.slowest.rank == 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"new_graphs": 1}, NEW_GRAPH),
        ({"warmup": True}, WARMUP),
        ({"traced": True}, TRACED),
        ({"error": "broken", "error_type": "RuntimeError"}, FAILED),
        ({"first_uses": ["library"]}, "loaded a library"),
    ],
)
def test_a_pass_that_does_not_count_on_one_rank_counts_on_none(changes: dict[str, Any], reason: str, rank: int) -> None:
    records = [record(0, rank=number, **(changes if number == rank else {})) for number in range(2)]
    statistics = summarize([*records, record(1), record(1, rank=1)])
    assert (statistics.num_passes, statistics.num_counted) == (2, 1)
    assert statistics.left_out == {reason: 1}


def test_the_ranks_records_may_come_in_any_order() -> None:
    records = [record(index, forward=0.1 * (index + 1), rank=rank) for index in range(3) for rank in range(2)]
    assert summarize(records[::-1]) == summarize(records)


def test_padding_that_was_fed_takes_its_part_of_each_pass_s_time() -> None:
    packed = record(0, forward=0.4, backward=0.6)
    padded = record(1, forward=1.0, backward=2.0, fed_tokens=160)  # 80 of them real
    assert summarize([packed, padded]).padding_time_share == pytest.approx((0.0 + 3.0 / 2) / 4.0)


def test_one_rank_does_not_wait() -> None:
    assert summarize([record(0)]).wait_share is None
