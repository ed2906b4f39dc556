"""From which pass on the weights are known to the precision of the optimizer's steps alone."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actor_init.spec import ActorSpec
from capture.file_format.optimizer_step import OptimizerStep
from replay.tolerances.job_bounds import TOKEN_LOG_PROBS, NoiseFloor
from replay.verdict.findings import VerdictSettings, list_dtypes
from replay.verdict.model_facts import ModelDifference, ModelDifferenceKind
from replay.verdict.pass_weights import (
    explain_unfollowed_steps,
    infer_weights_after_steps,
    merge_weight_samples,
    widen_bounds_after_rounded_step,
)
from replay.verdict.recorded_pass import WeightComparison
from tests.replay.verdict.causes.made_evidence import draw_gradients, make_window

FLOOR = {TOKEN_LOG_PROBS: NoiseFloor(value=1e-6, num_values=8)}


def make_pass(num_steps_before: int, class_name: str) -> Any:
    step = OptimizerStep(
        number=num_steps_before,
        passes=(0,),
        shares=(1.0,),
        optimizer=class_name,
        library="torch",
        settings=({"num_parameters": 1, "lr": 0.1},),
    )
    return SimpleNamespace(num_steps_before=num_steps_before, step_after=step, dtypes=["float32"])


def note(class_name: str) -> tuple[VerdictSettings, list[Any]]:
    passes = [make_pass(number, class_name) for number in (4, 5)]
    settings = VerdictSettings(
        dtype="float32",
        num_layers=2,
        num_data_ranks=1,
        grad_accumulation=1,
        stepping_actor=ActorSpec(),
        step_floors={0: FLOOR, 1: FLOOR},
    )
    return widen_bounds_after_rounded_step(list(enumerate(passes)), settings), passes


def test_behind_a_step_of_muon_bounds_are_those_of_bf16_and_no_floor_holds() -> None:
    settings, (first, second) = note("Muon")
    assert "bfloat16" not in list_dtypes(first, settings)
    assert "bfloat16" in list_dtypes(second, settings)
    assert settings.step_floors == {0: FLOOR}


def test_behind_a_step_of_adamw_they_stay() -> None:
    settings, (_, second) = note("AdamW")
    assert "bfloat16" not in list_dtypes(second, settings)
    assert settings.step_floors == {0: FLOOR, 1: FLOOR}


def compare(*pairs: tuple[int, bool], is_sharded: bool = False) -> list[tuple[str, ...]]:
    """Return which parameters are another for each pass, of a rank whose weight `w` is the replay's or is not.

    All passes have the same number of steps before them.
    """
    job = draw_gradients()
    passes = []
    for number, (rank, is_same) in enumerate(pairs):
        weights = WeightComparison(compared=("w",), differing=() if is_same else ("w",), is_sharded=is_sharded)
        [compared] = make_window([job], job, index=number)
        recorded = replace(compared.recorded, rank=rank, num_steps_before=0, weight_comparison=weights)
        passes.append(replace(compared, recorded=recorded))
    return [tuple(compared.weight_comparison.differing) for compared in merge_weight_samples(passes)]


def test_weights_that_move_between_passes_of_one_step_count_are_each_passs_own() -> None:
    """As in a loop that steps fp32 copies of the parameters: the recorder sees no step of theirs."""
    assert compare((0, True), (0, False)) == [(), ("w",)]


def test_what_two_ranks_sampled_of_their_shards_is_no_movement() -> None:
    assert compare((0, True), (1, False), is_sharded=True) == [("w",), ("w",)]


@pytest.mark.parametrize("is_first_same", [True, False])
def test_weights_behind_a_step_of_the_job_are_told_from_other_weights_of_the_start(is_first_same: bool) -> None:
    job = draw_gradients()
    passes = []
    for number, is_same in enumerate((is_first_same, False)):
        weights = WeightComparison(compared=("w",), num_parameters=1, differing=() if is_same else ("w",))
        [compared] = make_window([job], job, index=number)
        passes.append(replace(compared, weight_comparison=weights))
    doubts = [compared.weight_comparison.doubt for compared in explain_unfollowed_steps(passes)]
    told = "the job had taken 1 step before this pass, the replay none"
    assert doubts == [None, told if is_first_same else None]


@pytest.mark.parametrize("is_in_step", [True, False])
def test_a_pass_that_no_step_of_the_job_took_is_said_to_be_replayed_last(is_in_step: bool) -> None:
    job = draw_gradients()
    passes = []
    for index, number in enumerate((0, 1)):
        [compared] = make_window([job], job, index=index)
        step = compared.recorded.step_after
        assert step is not None
        recorded = replace(
            compared.recorded,
            forward_number=number,
            num_steps_before=0,
            step_after=replace(step, passes=(0, 1) if is_in_step else (0,)) if not index else None,
        )
        result = replace(compared.record.result, num_steps=index, has_stepped=not index)
        record = replace(compared.record, result=result)
        weights = WeightComparison(compared=("w",), num_parameters=1)
        passes.append(replace(compared, record=record, recorded=recorded, weight_comparison=weights))
    settings = replace(note("AdamW")[0], steps_unasked=True)
    doubt = infer_weights_after_steps(passes, settings)[1].weight_comparison.doubt
    assert doubt == (
        "the job had taken 0 steps before this pass, the replay 1"
        if is_in_step
        else "no step of the job took this pass, so it was replayed last, after 1 step; in the job after 0 steps"
    )


def test_from_the_very_pass_on_in_which_the_job_trains_other_parameters_its_weights_are_in_doubt() -> None:
    job = draw_gradients()
    passes = []
    for index, number in enumerate((3, 4, 5)):
        [compared] = make_window([job], job, index=index)
        recorded = replace(compared.recorded, forward_number=number)
        passes.append(replace(compared, recorded=recorded, weight_comparison=WeightComparison(compared=("w",))))
    difference = ModelDifference(
        kind=ModelDifferenceKind.FROZEN, where="embed", job="trained from pass 5 on", replay="frozen", forward=4
    )
    settings = replace(note("AdamW")[0], model_differences=[difference])
    doubts = [compared.weight_comparison.doubt or "" for compared in infer_weights_after_steps(passes, settings)]
    told = "embed is trained from pass 5 on in the job, and the replay does not follow that"
    assert [doubt.startswith(told) for doubt in doubts] == [False, True, True]
    assert doubts[0] == ""
