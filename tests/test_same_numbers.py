"""benchmarks/same_numbers: two logs are compared value by value, as they are written. Its runs are not for here."""

from typing import Any

import pytest

from benchmarks.same_numbers.__main__ import CONFIGURATIONS
from benchmarks.same_numbers.comparison import Difference, Mask, compare

LOG: dict[str, Any] = {
    "run.json": {"exit_code": 0, "seconds": 1.5, "verdict": {"passes": [{"outcome": "REPRODUCED", "findings": []}]}},
    "rank0.jsonl": [{"loss": 1.5, "seconds": 0.25}, {"loss": -0.0, "first_uses": ["library"], "wait_seconds": None}],
}
SECONDS = [Mask("run.json/seconds", "time"), Mask("rank*.jsonl/*/seconds", "time")]


def changed(**values: Any) -> dict[str, Any]:
    """LOG with another second line of rank 0."""
    return {**LOG, "rank0.jsonl": [LOG["rank0.jsonl"][0], {**LOG["rank0.jsonl"][1], **values}]}


def test_a_log_is_the_same_as_itself() -> None:
    found = compare(LOG, LOG, [], [])
    assert (found.num_compared, found.is_same) == (9, True)


@pytest.mark.parametrize(
    ("values", "path", "base", "here"),
    [
        ({"loss": 0.0}, "loss", "-0.0", "0.0"),
        ({"loss": 0}, "loss", "-0.0", "0"),
        ({"first_uses": []}, "first_uses", None, "[]"),
        ({"wait_seconds": 0.1}, "wait_seconds", "null", "0.1"),
        ({"grad_norm": "nan"}, "grad_norm", None, '"nan"'),
    ],
)
def test_each_value_that_is_written_otherwise_is_named(values: Any, path: str, base: str | None, here: str) -> None:
    found = compare(LOG, changed(**values), [], [])
    assert Difference(f"rank0.jsonl/1/{path}", base, here) in found.differences
    assert not found.is_same


def test_a_value_or_a_file_that_is_missing_differs() -> None:
    found = compare(LOG, {**LOG, "rank0.jsonl": LOG["rank0.jsonl"][:1]}, [], [])
    assert [difference.here for difference in found.differences] == [None, None, None]
    assert not compare({**LOG, "trace/pass000000-rank0.safetensors": "abc"}, LOG, [], []).is_same


def test_a_masked_value_may_be_another_one_and_is_not_counted_but_has_to_be_there() -> None:
    other = {**LOG, "run.json": {**LOG["run.json"], "seconds": 99.5}}
    found = compare(LOG, other, SECONDS, [])
    assert (found.num_compared, found.is_same) == (7, True)
    for lacking in ({"exit_code": 0}, {**LOG["run.json"], "seconds": None}):
        assert not compare(LOG, {**LOG, "run.json": lacking}, SECONDS, []).is_same
    assert not compare(LOG, changed(seconds=0.5), [Mask("rank1.jsonl/*/seconds", "another rank")], []).is_same


def test_what_is_below_a_mask_may_be_more_or_less() -> None:
    masks = [Mask("rank0.jsonl/1", "all of it", hides="all")]
    assert compare(LOG, changed(loss=2.0, grad_norm=1.0), masks, []).num_compared == 6
    assert compare(LOG, changed(loss=2.0, grad_norm=1.0), masks, []).is_same


def test_a_key_may_have_another_name_here_but_not_another_value() -> None:
    renames = [("rank*.jsonl/*/loss", "rank*.jsonl/*/mean_loss"), ("run.json/verdict", "run.json/judgement")]
    lines = [{"mean_loss": 1.5, "seconds": 0.25}, {**LOG["rank0.jsonl"][1], "mean_loss": -0.0}]
    del lines[1]["loss"]
    run = {"exit_code": 0, "seconds": 1.5, "judgement": LOG["run.json"]["verdict"]}
    assert compare(LOG, {"run.json": run, "rank0.jsonl": lines}, [], renames).is_same
    lines[0]["mean_loss"] = 1.25
    found = compare(LOG, {"run.json": run, "rank0.jsonl": lines}, [], renames)
    assert found.differences == [Difference("rank0.jsonl/0/mean_loss", "1.5", "1.25")]


def test_nothing_compared_is_not_the_same() -> None:
    assert not compare({}, {}, [], []).is_same
    assert not compare({"run.json": {"seconds": 1}}, {"run.json": {"seconds": 2}}, SECONDS, []).is_same


def test_there_are_forty_configurations_each_with_a_command_of_its_own() -> None:
    assert len({configuration.command for configuration in CONFIGURATIONS.values()}) == len(CONFIGURATIONS) == 40
