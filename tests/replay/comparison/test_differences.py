"""What `replay compare` finds between two logs, against numbers worked out by hand."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from actor_init.spec import UsageError
from replay.comparison.comparable import compare_settings
from replay.comparison.differences import ComparedPoint, Differences, Quantity, compare
from replay.comparison.plot import _compute_curve
from replay.runlog.reader import PastRun
from replay.runlog.records import PassRecord
from tests.helpers.made_logs import passed, write_log
from tests.helpers.made_records import cost

Records = Sequence[PassRecord]


def compare_logs(tmp_path: Path, reference: Records, other: Records, **changes: Any) -> Differences:
    """`changes` are those of the other log."""
    folders = write_log(tmp_path / "a", reference), write_log(tmp_path / "b", other, **changes)
    return compare(*map(PastRun.read, folders))


def find_quantity(comparison: Differences, name: str) -> Quantity:
    [quantity] = [quantity for quantity in (*comparison.results, *comparison.costs) if quantity.name == name]
    return quantity


def test_passes_are_matched_by_input_in_whatever_order(tmp_path: Path) -> None:
    reference = [passed(0, "x", 2.0), passed(1, "y", 4.0), passed(2, "z", 1.0)]
    other = [passed(0, "new", 9.0), passed(1, "y", 4.5), passed(2, "x", 1.75)]
    comparison = compare_logs(tmp_path, reference, other)
    assert (comparison.num_matched, comparison.num_only_in_reference, comparison.num_only_in_other) == (2, 1, 1)
    loss = find_quantity(comparison, "loss")
    assert (loss.mean_reference, loss.mean_other) == (3.0, 3.125)
    assert (loss.max_difference, loss.mean_difference) == (0.5, 0.375)  # 0.25 and 0.5
    assert (loss.max_relative, loss.source) == (0.125, "x.pkl")  # y's is 1/8 as well, and comes later
    assert comparison.max_relative == 0.125


def test_the_input_is_named_where_the_relative_difference_is_largest(tmp_path: Path) -> None:
    reference = [passed(0, "x", 100.0), passed(1, "y", 1.0)]
    loss = find_quantity(compare_logs(tmp_path, reference, [passed(0, "x", 110.0), passed(1, "y", 1.5)]), "loss")
    assert (loss.max_difference, loss.max_relative, loss.source) == (10.0, 0.5, "y.pkl")


def test_errors_that_cancel_between_rows_show_in_their_log_probs(tmp_path: Path) -> None:
    comparison = compare_logs(tmp_path, [passed(0, "x")], [passed(0, "x", row_log_probs=[-11.0, -19.0])])
    log_probs = find_quantity(comparison, "log-probs")
    assert (log_probs.max_difference, log_probs.max_relative, log_probs.num_matched) == (1.0, 0.1, 1)
    assert find_quantity(comparison, "loss").max_relative == 0.0
    assert comparison.max_relative == 0.1


def test_an_input_that_every_data_rank_replays_is_matched_once_for_each_time(tmp_path: Path) -> None:
    two_ranks = [passed(0, "x", 2.0, None), passed(0, "x", 3.0, None, rank=1)]
    comparison = compare_logs(tmp_path, two_ranks, [passed(0, "x", 2.0, None)])
    assert (comparison.num_matched, comparison.num_only_in_reference) == (1, 1)
    assert find_quantity(comparison, "loss").max_relative == 0.0


def test_no_peer_hides_behind_another(tmp_path: Path) -> None:
    shared = {"data_rank": 0}
    other = [passed(0, "x", 2.0), passed(0, "x", 3.0, 5.0, rank=1, row_log_probs=[-10.0, -25.0], **shared)]
    comparison = compare_logs(tmp_path, [passed(0, "x")], other, typed="--backend fsdp2 --tp 2")
    assert comparison.num_matched == 1
    assert [quantity.max_relative for quantity in comparison.results] == [0.5, 0.25, 0.25]


def test_a_gradient_norm_belongs_to_all_inputs_it_was_averaged_over(tmp_path: Path) -> None:
    reference = [passed(0, "x"), passed(1, "y")]
    other = [passed(0, "y", 2.0, 100.0), passed(0, "x", 2.0, 100.0, rank=1)]
    comparison = compare_logs(tmp_path, reference, other)
    assert comparison.num_matched == 2
    assert [quantity.name for quantity in comparison.results] == ["loss", "log-probs"]
    assert comparison.notes == [
        "gradient norms are not compared: no gradient was averaged over the same inputs "
        "(1 input each, against 2 inputs each)"
    ]
    without = compare_logs(tmp_path / "without", reference, [passed(0, "x", norm=None)])
    assert without.notes[0].endswith("(1 input each, against none)")


def test_the_order_within_an_accumulation_window_does_not_matter(tmp_path: Path) -> None:
    names = [("x", None), ("y", 4.0), ("z", None), ("w", 8.0)]
    swapped = [("w", None), ("z", 10.0), ("y", None), ("x", 4.0)]
    logs = [
        write_log(
            tmp_path / str(number),
            [passed(index, name, 2.0, norm) for index, (name, norm) in enumerate(order)],
            typed="--grad-accumulation 2",
        )
        for number, order in enumerate((names, swapped))
    ]
    norm = find_quantity(compare(*map(PastRun.read, logs)), "gradient norm")
    assert (norm.num_matched, norm.max_difference, norm.max_relative) == (2, 2.0, 0.25)
    assert norm.source == "w.pkl and 1 more"


@pytest.mark.parametrize(
    ("reference", "other", "relative"),
    [
        (0.0, 0.0, 0.0),
        (0.0, 1e-9, math.inf),
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (1.0, math.nan, math.inf),
        (math.nan, 1.0, math.inf),
        (-2.0, -1.0, 0.5),
    ],
)
def test_zeros_and_what_is_not_finite(tmp_path: Path, reference: float, other: float, relative: float) -> None:
    loss = find_quantity(compare_logs(tmp_path, [passed(0, "x", reference)], [passed(0, "x", other)]), "loss")
    assert loss.max_relative == relative
    assert loss.num_not_finite == (not (math.isfinite(reference) and math.isfinite(other)))


def test_time_and_memory_are_those_of_counted_passes_on_the_worst_rank(tmp_path: Path) -> None:
    def took(seconds: float, gib: float) -> dict[str, Any]:
        return {"phases": {"forward": cost(seconds, gib)}}

    reference = [passed(0, "x", **took(9.0, 9.0), warmup=True), passed(1, "y", **took(1.0, 2.0))]
    reference += [passed(2, "z", **took(2.0, 1.0))]
    other = [
        passed(index, name, rank=rank, data_rank=0, new_graphs=int(name == "z"), **took(seconds, gib))
        for index, name, rank, seconds, gib in [
            (0, "x", 0, 1.0, 1.0),
            (0, "x", 1, 1.0, 1.0),
            (1, "y", 0, 1.0, 3.0),
            (1, "y", 1, 1.5, 1.0),
            (2, "z", 0, 7.0, 7.0),
            (2, "z", 1, 7.0, 7.0),
        ]
    ]
    comparison = compare_logs(tmp_path, reference, other, typed="--backend fsdp2 --tp 2")
    forward, peak = comparison.costs
    assert (forward.num_matched, forward.mean_reference, forward.mean_other) == (1, 1.0, 1.5)
    assert (peak.name, peak.mean_other, peak.max_relative) == ("peak", 3 * 2**30, 0.5)
    assert comparison.max_relative == 0.0  # neither decides


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    comparison = compare_logs(tmp_path, [passed(0, "x")], [passed(0, "x")], memory_kind="resident set")
    assert comparison.notes == ["memory is not compared: cuda allocator against resident set"]
    assert [quantity.name for quantity in comparison.costs] == ["forward", "backward"]
    warm = compare_logs(tmp_path / "warm", [passed(0, "x")], [passed(0, "x", warmup=True)])
    assert warm.costs == []
    assert warm.notes == [
        "time and memory are not compared: no pass counts in both runs (warm-up, a new graph, or traced)"
    ]


def test_a_model_with_dropout_differs_by_chance(tmp_path: Path) -> None:
    config = {"config": {"attention_dropout": 0.1, "resid_pdrop": 0.0}}
    logs = [write_log(tmp_path / name, [passed(0, "x")], work=config) for name in ("a", "b")]
    assert compare(*map(PastRun.read, logs)).notes == [
        "the model trains with attention_dropout, so its numbers differ by chance"
    ]


def test_the_settings_that_differ_are_listed_and_no_others(tmp_path: Path) -> None:
    a = write_log(tmp_path / "a", [passed(0, "x")], typed="--name one --zero-stage 1 --dtype bf16 --packing yes")
    other = [passed(0, "x"), passed(0, "y", rank=1)]
    b = write_log(tmp_path / "b", other, typed="--name two --dtype fp32 --packing yes", facts={"zero_stage": 3})
    assert compare_settings([PastRun.read(a), PastRun.read(b)]) == {
        "dtype": ["bf16", "fp32"],
        "zero stage": ["1", "3"],
        "data ranks": ["1", "2"],
        "devices": ["1 x H200", "2 x H200"],
    }


def test_a_curve_has_the_farthest_point_of_each_pass_and_a_gap_where_that_is_infinite() -> None:
    def point(place: int, other: float) -> ComparedPoint:
        return ComparedPoint(source=f"{place}.pkl", place=place, reference=2.0, other=other)

    points = [point(0, 3.0), point(0, 2.5), point(2, 2.0), point(2, math.nan), point(3, 2.0), point(3, 4.0)]
    numbers, values, num_infinite = _compute_curve(Quantity.summarize("log-probs", points))
    assert (numbers, num_infinite) == ([1, 3, 4], 1)
    assert (values[0], values[2]) == (0.5, 1.0)
    assert math.isnan(values[1])


@pytest.mark.parametrize(("num_changed", "more"), [(1, ""), (2, ", and 1 more do"), (3, ", and 2 more do")])
def test_inputs_that_hold_other_tensors_are_counted_behind_the_first(
    num_changed: int, more: str, tmp_path: Path
) -> None:
    other = [
        passed(index, name, input_digest="another" if index < num_changed else name) for index, name in enumerate("xyz")
    ]
    with pytest.raises(UsageError, match=rf"x\.pkl holds other tensors{more}\. Try: "):
        compare_logs(tmp_path, [passed(index, name) for index, name in enumerate("xyz")], other)
