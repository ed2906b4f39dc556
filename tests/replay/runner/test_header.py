"""What the lines above the passes say of the optimizer with which a job began, and of what it did not train."""

from dataclasses import replace
from pathlib import Path

from transformers import LlamaConfig

from actor_init.model import ModelSource
from actor_init.weights import RandomWeights
from capture.file_format.optimizer_step import OptimizerStep
from replay.runner.header import TRAINER_STATE, explain_lost_state, list_frozen


def make_step(number: int = 0, has_state: bool | None = False) -> OptimizerStep:
    return OptimizerStep(number=number, passes=(0,), shares=(1.0,), has_state=has_state)


def test_an_optimizer_that_begins_anew_at_a_trainers_checkpoint_is_said(tmp_path: Path) -> None:
    table = tmp_path / TRAINER_STATE
    assert explain_lost_state(make_step(), str(tmp_path)) == ""
    table.write_text('{"global_step": 4}')
    text = explain_lost_state(make_step(), str(tmp_path))
    assert text.startswith(f"; it began without a state, and {tmp_path} is of step 4 of a job")
    for other in (make_step(has_state=True), make_step(has_state=None), make_step(number=1)):
        assert explain_lost_state(other, str(tmp_path)) == ""
    for content in ('{"global_step": 0}', "{}", "[]", "{"):
        table.write_text(content)
        assert explain_lost_state(make_step(), str(tmp_path)) == ""


def test_what_is_frozen_in_a_part_of_the_passes_is_named_with_its_pass() -> None:
    source = ModelSource(config=LlamaConfig(), weights=RandomWeights(seed=0, std=0.02), name="a")
    assert list_frozen(source) == ""
    later = {0: frozenset({"b", "c"}), 4: frozenset[str]()}
    source = replace(source, frozen=frozenset({"a"}), frozen_later=later)
    assert list_frozen(source) == "a; b and 1 more from pass 1 on; no other from pass 5 on"
