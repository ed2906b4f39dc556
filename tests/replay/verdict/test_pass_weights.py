"""From which pass on the weights are known to the precision of the optimizer's steps alone."""

from types import SimpleNamespace
from typing import Any

from actor_init.spec import ActorSpec
from capture.file_format.optimizer_step import OptimizerStep
from replay.tolerances.job_bounds import TOKENS, NoiseFloor
from replay.verdict.findings import VerdictSettings, list_dtypes
from replay.verdict.pass_weights import note_coarse_steps

FLOOR = {TOKENS: NoiseFloor(value=1e-6, num_values=8)}


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
        steps=ActorSpec(),
        step_floors={0: FLOOR, 1: FLOOR},
    )
    return note_coarse_steps(list(enumerate(passes)), settings), passes


def test_behind_a_step_of_muon_bounds_are_those_of_bf16_and_no_floor_holds() -> None:
    settings, (first, second) = note("Muon")
    assert "bfloat16" not in list_dtypes(first, settings)
    assert "bfloat16" in list_dtypes(second, settings)
    assert settings.step_floors == {0: FLOOR}


def test_behind_a_step_of_adamw_they_stay() -> None:
    settings, (_, second) = note("AdamW")
    assert "bfloat16" not in list_dtypes(second, settings)
    assert settings.step_floors == {0: FLOOR, 1: FLOOR}
