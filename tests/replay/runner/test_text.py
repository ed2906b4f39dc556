"""What a run prints of its passes and of its statistics."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replay.runlog.records import FirstUse
from replay.runlog.summary import FAILED, FIRST_USES, TRACED, WARMUP, Extreme, Statistics, summarize
from replay.runner.text import (
    build_pass_table,
    build_phase_table,
    format_progress,
    list_counts,
    list_failures,
    list_non_finite,
    list_totals,
    list_unreplayed,
    name_slowest,
)
from tests.helpers.made_logs import SELECTION
from tests.helpers.made_records import GIB, cost, record

BOOM: dict[str, Any] = {"error": "boom", "error_type": "ValueError"}


@pytest.mark.parametrize(
    ("num_counted", "left_out", "all_damaged", "says"),
    [
        (5, {}, False, "5 of 5"),
        (2, {WARMUP: 1, "compiled": 2}, False, "2 of 5; excluded: 1 warm-up, 2 compiled"),
        (0, {FAILED: 5}, False, "0 of 5; excluded: 5 failed. No pass was measured, so there are no statistics"),
        # Where some failed and the others were left out, more inputs may help.
        (0, {FAILED: 4, WARMUP: 1}, False, "so there are no statistics. Try: more inputs, or --warmup 0"),
        (0, {WARMUP: 5}, False, "Try: more inputs, or --warmup 0"),
        (0, {WARMUP: 1, TRACED: 4}, False, "Try: the run without --trace"),
        (
            0,
            {WARMUP: 1, FIRST_USES[FirstUse.PLAN]: 4},
            False,
            "Try: --epochs 2: the second time, cuDNN has its plan for each length",
        ),
        (0, {}, True, "Try: other inputs; `capture check FOLDER` says which files can be read"),
    ],
)
def test_passes_that_were_not_measured_are_counted_and_said_what_to_do(
    num_counted: int, left_out: dict[str, int], all_damaged: bool, says: str
) -> None:
    statistics = Statistics(num_passes=5, num_counted=num_counted, left_out=left_out)
    [(name, text)] = list_counts(statistics, all_damaged=all_damaged)
    assert name == "passes measured"
    assert text.endswith(says)


def test_a_row_is_a_pass_on_a_rank_with_what_was_measured_there() -> None:
    records = [
        record(1, source="b.pkl", rank=1, wait_seconds=0.25, grad_norm=2.0, first_uses=["compiled", "library"]),
        record(0, source="a.pkl", warmup=True, first_uses=["library"]),
        record(1, source="c.pkl", phases={}, loss=None, trains=False, **BOOM),
    ]
    table = build_pass_table(records, full_names=True)
    assert table == {
        "pass": ["1", "2", "2"],
        "rank": ["0", "0", "1"],
        "input": ["a.pkl", "c.pkl", "b.pkl"],
        "rows": ["2", "2", "2"],
        "padded": ["100", "100", "100"],
        "real": ["80", "80", "80"],
        "fwd ms": ["100.0", "-", "100.0"],
        "bwd ms": ["200.0", "-", "200.0"],
        "wait ms": ["-", "-", "250.0"],
        "peak GiB": ["2.000", "-", "2.000"],
        "loss": ["1.50000", "-", "1.50000"],
        "grad norm": ["-", "-", "2"],
        "note": ["warm-up", "rollout, failed: ValueError", "compiled, library"],
    }
    # What no pass has is no column.
    assert not {"rank", "wait ms", "grad norm", "note"} & build_pass_table([record(0)]).keys()


def test_a_line_of_progress_has_the_slowest_rank_of_each_phase_and_the_first_ranks_loss() -> None:
    ranks = [
        record(3, forward=0.1, backward=0.4, loss=1.5),
        record(3, forward=0.3, backward=0.2, loss=9.0, rank=1, **BOOM),
    ]
    assert format_progress(ranks) == (
        "forward 300.0 ms, backward 400.0 ms, loss 1.50000, failed on rank 1: ValueError, input_3.pkl"
    )


def test_the_summary_names_passes_by_their_number_rank_and_input() -> None:
    records = [
        record(0),
        record(1, rank=1, source="slow.pkl", phases={"forward": cost(0.5, 1.0), "backward": cost(0.2, 3.0)}),
        record(2, first_non_finite="output of a", **BOOM),
    ]
    statistics = summarize(records)
    assert name_slowest(statistics) == [("slowest", "700.0 ms, pass 2, rank 1, slow.pkl")]
    assert ("peak", "3.000 GiB, made, pass 2, rank 1, slow.pkl") in list_totals(statistics, "made")
    assert list_failures(records) == [("failed", "pass 3, rank 0, input_2.pkl: ValueError: boom")]
    assert list_non_finite(records) == [("not finite", "pass 3, rank 0, input_2.pkl: output of a")]
    assert name_slowest(Statistics(num_passes=0, num_counted=0)) == []


def test_a_spread_is_warned_of_where_it_is_more_than_a_tenth_of_the_median() -> None:
    def list_names(iqr_seconds: float) -> list[str]:
        statistics = Statistics(
            num_passes=4, num_counted=4, median_seconds=2.0, iqr_seconds=iqr_seconds, p95_seconds=1.0
        )
        return [name for name, _ in list_totals(statistics, "made")]

    assert list_names(0.21) == ["spread"]
    assert list_names(0.19) == []


def test_totals_are_shares_of_tokens_and_of_time() -> None:
    statistics = Statistics(
        num_passes=1,
        num_counted=1,
        real_tokens_per_second=12345.6,
        padding_share=0.25,
        padding_time_share=0.125,
        wait_share=0.5,
        highest_peak=Extreme(value=GIB, index=0, source="a.pkl", rank=0),
    )
    assert list_totals(statistics, "made") == [
        ("speed", "12,346 real tokens/s"),
        ("padding", "25.0% of the inputs' tokens; 12.5% of the ranks' time went to padding that was fed"),
        ("waiting", "50.0% of the ranks' time, for the slowest rank"),
        ("peak", "1.000 GiB, made, pass 1, rank 0, a.pkl"),
    ]


def test_a_row_of_the_phases_is_of_all_passes_and_the_last_of_all_phases() -> None:
    statistics = summarize([record(index, forward=0.1 * (index + 1)) for index in range(3)])
    table = build_phase_table(statistics)
    assert table[""] == ["forward", "backward", "pass"]
    assert table["median ms"] == ["200.0", "200.0", "400.0"]
    assert table["IQR ms"] == ["100.0", "0.00", "100.0"]
    assert table["peak GiB"] == ["1.000", "2.000", "2.000"]


def test_inputs_that_were_not_replayed_are_counted_by_the_reason() -> None:
    selection = replace(SELECTION, num_left_out_passes=1, num_left_over=2, damaged=[(Path("a.pkl"), "cut")] * 2)
    texts = list_unreplayed(selection)
    assert [(name, text.split(" ", 2)[0]) for name, text in texts] == [
        ("excluded", "1"),
        ("left over", "2"),
        ("damaged", "2"),
    ]
    assert texts[2][1] == "2 files, named above"
    assert list_unreplayed(SELECTION) == []
