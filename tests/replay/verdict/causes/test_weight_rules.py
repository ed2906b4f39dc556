"""Weights that go back to those of an earlier step, and weights that only a step explains: made samples."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from capture.file_format.optimizer_step import Sample
from replay.tolerances.job_bounds import LOSS
from replay.verdict.causes.cause import Cause, CauseName
from replay.verdict.causes.weight_rules import find_weights_of_earlier_step
from tests.replay.verdict.causes.made_evidence import draw_gradients, make_forward_evidence, make_window

pytestmark = pytest.mark.quick


def find_cause(versions: Sequence[int]) -> Cause | None:
    """The cause where the passes before each step had these versions of the weights."""
    gradients = draw_gradients()
    passes = []
    for index, version in enumerate(versions):
        [compared] = make_window([gradients], gradients, index=index)
        samples = [
            Sample(name=name, dtype="float32", shape=(4,), start=0, values=(float(version), 0.5)) for name in "abcdef"
        ]
        passes.append(replace(compared, recorded=replace(compared.recorded, samples=samples)))
    return find_weights_of_earlier_step(replace(make_forward_evidence(LOSS), passes=passes))


def test_weights_that_come_back_are_named_with_their_steps() -> None:
    cause = find_cause([0, 1, 2, 1])
    assert cause is not None
    assert cause.name is CauseName.WEIGHTS_CHANGED
    assert cause.sentence.startswith("the job's weights before step 4 are again those before step 2")


@pytest.mark.parametrize("versions", [[0, 1, 2, 3], [0, 0, 0, 0], [0], [0, 1], [0, 0, 1, 1]])
def test_weights_that_move_on_or_never_move_are_no_sign(versions: Sequence[int]) -> None:
    assert find_cause(versions) is None
