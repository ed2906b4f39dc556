"""Ranks that hold one model should have one gradient: what their signatures say where no sample shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from capture.file_format.optimizer_step import Sample
from replay.verdict.findings import judge_number
from replay.verdict.judge import PassEvidence
from replay.verdict.outcomes import Outcome
from replay.verdict.recorded_pass import WeightComparison
from replay.verdict.training_remarks import compare_forwards_of_ranks, compare_ranks, describe_weighting
from tests.replay.verdict.causes.made_evidence import NAMES, draw_gradients, make_verdict, make_window, scale_gradients

ROOT = Path(__file__).resolve().parents[3]
SOUND = draw_gradients()


def compare(*ranks: Mapping[str, Sequence[float]], compared: Sequence[str] = NAMES) -> list[str]:
    """What is said of ranks that signed these gradients, given the parameters that were compared with this model's."""
    weights = WeightComparison(compared=tuple(compared))
    passes = [
        PassEvidence(each.record, replace(each.recorded, weight_comparison=weights), each.replayed)
        for each in make_window(ranks, SOUND)
    ]
    return [text for _, text in compare_ranks(passes)]


def test_ranks_with_one_gradient_have_no_remark() -> None:
    assert compare(SOUND, scale_gradients(SOUND, 1.0001)) == []


def test_a_parameter_whose_gradient_is_each_ranks_own_is_named() -> None:
    own = scale_gradients(SOUND, 1.5, only="layers.1.mlp")
    [text] = compare(SOUND, own)
    expected = "the job's ranks had different gradients, which were not averaged, in step 1: that of model.layers.1.mlp"
    assert text.startswith(expected)
    # A rank of a tensor-parallel job holds other parts, whose shapes are not this model's.
    assert compare(SOUND, own, compared=NAMES[:1]) == []


def test_gradients_that_were_averaged_behind_their_recording_are_not_called_not_averaged() -> None:
    own = scale_gradients(SOUND, 1.5)
    passes = []
    for index, ranks in enumerate([(SOUND, own), (SOUND, SOUND)]):
        for member in make_window(ranks, SOUND, index=index):
            weights = WeightComparison(compared=tuple(NAMES))
            samples = [
                Sample(name=name, dtype="float32", shape=(1,), start=0, values=(float(index),)) for name in NAMES
            ]
            recorded = replace(member.recorded, weight_comparison=weights, samples=samples)
            passes.append(PassEvidence(member.record, recorded, member.replayed))
    [(_, text)] = compare_ranks(passes)
    assert text.startswith("the job's ranks had different gradients, and the same weights after it, in step 1")


def test_weights_that_differ_are_shown_with_digits_that_differ() -> None:
    passes = []
    for rank, member in enumerate(make_window([SOUND] * 2, SOUND, index=1)):
        value = 0.9989 + rank * 1e-8
        sample = Sample(name=NAMES[0], dtype="float32", shape=(4,), start=0, values=(1.0, value))
        recorded = replace(member.recorded, weight_comparison=WeightComparison(compared=tuple(NAMES)), samples=[sample])
        passes.append(PassEvidence(member.record, recorded, member.replayed))
    [(_, text)] = compare_ranks(passes)
    assert text.endswith("element 1, is 0.9989 on rank 0 and 0.99890001 on rank 1")


def test_a_window_of_two_ranks_is_weighed_whole() -> None:
    """Each rank's last pass has the norm: the window ends behind both, and tokens of all four passes are compared."""
    passes = []
    for index, (grad_norm, counts) in enumerate([(None, (10, 10)), (1.0, (10, 40))]):
        for member, num_tokens in zip(make_window([SOUND] * 2, SOUND, index=index), counts, strict=True):
            record = replace(member.record, result=replace(member.record.result, grad_norm=grad_norm))
            recorded = replace(member.recorded, num_tokens=num_tokens)
            passes.append(PassEvidence(record, recorded, member.replayed))
    [(label, text)] = describe_weighting(passes)
    assert f"`{label}`" in (ROOT / "docs" / "verdict.md").read_text()
    assert label == "note"
    assert text.startswith("window: each pass weighs the same")
    assert (
        "a token of pass 1 of rank 0 weighs 4 times as much as one of pass 2 of rank 1. Short micro-batches weigh more"
        in text
    )
    nearly = [
        PassEvidence(
            member.record, replace(member.recorded, num_tokens=member.recorded.num_tokens // 40 + 29), member.replayed
        )
        for member in passes
        if member.recorded is not None
    ]
    assert describe_weighting(nearly) == []
    # A loss by the weights that the job gave its tokens has weighed them already.
    weighted = [
        PassEvidence(
            each.record,
            None if each.recorded is None else replace(each.recorded, has_job_weights_of_tokens=True),
            each.replayed,
        )
        for each in passes
    ]
    assert describe_weighting(weighted) == []


@pytest.mark.parametrize(
    ("outcomes", "wrong"),
    [
        ({(0, 0): True, (0, 1): False, (1, 0): True, (1, 1): False}, "rank 1"),
        ({(0, 0): True, (0, 1): True}, None),
        ({(0, 0): False, (0, 1): False}, None),
        # A rank with a right pass runs on the weights of the others.
        ({(0, 0): True, (0, 1): False, (1, 1): True, (0, 2): False}, None),
    ],
)
def test_ranks_of_which_each_forward_is_wrong_are_named(
    outcomes: Mapping[tuple[int, int], bool], wrong: str | None
) -> None:
    """By the index of a pass and its rank: whether its forward is the job's. All stand before one step."""
    passes, verdicts = [], []
    for (index, rank), is_right in outcomes.items():
        compared = make_window([SOUND] * 3, SOUND, index=index)[rank]
        recorded = replace(compared.recorded, num_steps_before=0)
        passes.append(PassEvidence(compared.record, recorded, compared.replayed))
        finding = judge_number("loss", 1.0, 1.0 if is_right else 2.0, difference=0.0 if is_right else 1.0, bound=1e-4)
        outcome = Outcome.REPRODUCED if is_right else Outcome.DIFFERS
        verdicts.append(replace(make_verdict(index, [finding]), rank=rank, outcome=outcome))
    remarks = compare_forwards_of_ranks(passes, verdicts)
    assert [text.partition(" differ ")[0] for _, text in remarks] == (
        [f"before step 1 the forwards of {wrong}"] if wrong else []
    )
    # Ranks that shard one model begin with the same weights, whatever they compute; so do passes that are not judged.
    sharded = [
        PassEvidence(
            each.record, replace(each.recorded, weight_comparison=WeightComparison(is_sharded=True)), each.replayed
        )
        for each in passes
        if each.recorded is not None
    ]
    assert compare_forwards_of_ranks(sharded, verdicts) == []
    unsettled = [
        replace(verdict, outcome=Outcome.UNSETTLED) if verdict.outcome is Outcome.DIFFERS else verdict
        for verdict in verdicts
    ]
    assert compare_forwards_of_ranks(passes, unsettled) == []


def test_the_first_step_at_which_ranks_part_is_told() -> None:
    """Before the second step all three forwards are right; before the third rank 2's alone; before the fourth none."""
    passes, verdicts = [], []
    for index, wrong_ranks in ((0, ()), (1, (0, 1)), (2, (0, 1, 2))):
        for compared in make_window([SOUND] * 3, SOUND, index=index):
            rank = compared.record.rank
            recorded = replace(compared.recorded, num_steps_before=index + 1)
            passes.append(PassEvidence(compared.record, recorded, compared.replayed))
            off = float(rank in wrong_ranks)
            finding = judge_number("loss", 1.0, 1.0 + off, difference=off, bound=1e-4)
            outcome = Outcome.DIFFERS if off else Outcome.REPRODUCED
            verdicts.append(replace(make_verdict(index, [finding]), rank=rank, outcome=outcome))
    [(_, text)] = compare_forwards_of_ranks(passes, verdicts)
    assert text.startswith("before step 3 the forwards of rank 0, rank 1 differ and those of the other ranks do not: ")
