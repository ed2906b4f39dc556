"""What a job did not note is refused before torch is imported, in the words of those who read the captures."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from actor_init.spec import UsageError
from capture.file_format.capture_file import read_call
from capture.file_format.listing import list_single_pass_files
from replay.objective.inputs import ObjectiveData
from replay.objective.objective import Objective
from replay.options.declarations import OBJECTIVES
from replay.options.needed_tensors import check_objective_needs, find_lack
from replay.options.spec import InputOrder, InputsSpec, MeasureSpec, Passes, ReplaySpec
from tests.helpers.commands import ROOT
from tests.helpers.planned_jobs import Planned, record_job
from tests.helpers.policy_job import train

NEEDING = [name for name, declaration in OBJECTIVES.items() if declaration.needs]
REFUSED = """
import sys
from replay.command_line.cli import main
assert main(sys.argv[1:]) == 2
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that noted nothing."""
    return record_job(tmp_path_factory.mktemp("bare"), [[Planned()] * 2])


@pytest.mark.parametrize("loss", NEEDING)
def test_an_objective_is_refused_in_the_words_of_its_formula(loss: str, bare: Path) -> None:
    spec = ReplaySpec(inputs=InputsSpec(inputs=bare), measure=MeasureSpec(loss=loss))
    with pytest.raises(UsageError) as early:
        check_objective_needs(spec.measure.loss, spec.inputs)
    call = read_call(list_single_pass_files(bare)[0])
    recorded = replace(ObjectiveData.collect(call, call.micro_batch()), has_action_mask=True)
    objective = Objective.open(spec)
    assert objective is not None
    with pytest.raises(Exception) as late:  # noqa: PT011
        objective.check(recorded)
    assert str(late.value) in str(early.value)


def test_one_of_the_names_is_enough_and_other_inputs_are_not_judged(tmp_path: Path, bare: Path) -> None:
    noted = InputsSpec(inputs=train(tmp_path, notes=("action_mask", "advantages")) / "captures")
    assert find_lack(noted, ("old_log_probs", "advantages")) is None
    assert find_lack(noted, ("old_log_probs",)) is not None
    lacking = InputsSpec(inputs=bare)
    assert find_lack(replace(lacking, max_inputs=1), ("advantages",)) is not None
    for other in (
        replace(lacking, skip_inputs=1),
        replace(lacking, passes=Passes.ALL),
        replace(lacking, order=InputOrder.WORST),
        replace(lacking, recording=1),
        InputsSpec(input_file=list_single_pass_files(bare)[0]),
    ):
        assert find_lack(other, ("advantages",)) is None


@pytest.mark.parametrize(("typed", "note"), [(["mismatch"], "rollout_log_probs"), (["--loss", "policy"], "advantages")])
def test_it_is_refused_without_torch(typed: list[str], note: str, bare: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, *typed, "--inputs", str(bare)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert f"no {note} in this capture" in done.stderr
