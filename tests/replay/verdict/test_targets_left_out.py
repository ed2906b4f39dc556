"""A gradient of targets that padding predicts is not judged against one without them."""

from dataclasses import replace

import pytest

from replay.verdict.findings import FindingStatus
from replay.verdict.gradient_findings import add_window_findings
from tests.replay.verdict.causes.made_evidence import (
    SETTINGS,
    draw_gradients,
    make_window,
    measure_norm,
    transpose_gradient,
)


@pytest.mark.parametrize(("num_left_out", "status"), [(0, FindingStatus.DIFFERS), (3, FindingStatus.UNSETTLED)])
def test_a_gradient_of_targets_that_are_left_out_here_is_unsettled(num_left_out: int, status: FindingStatus) -> None:
    replay = draw_gradients()
    job = {name: transpose_gradient(values) for name, values in replay.items()}
    [compared] = make_window([job], replay)
    assert compared.recorded.step_after is not None
    step = replace(compared.recorded.step_after, grad_norm=2 * measure_norm(job))
    recorded = replace(compared.recorded, step_after=step, has_job_weights_of_tokens=True, num_left_out=num_left_out)
    [judged] = add_window_findings([replace(compared, recorded=recorded)], SETTINGS)
    differing = [finding for finding in judged.window_findings if not finding.agrees]
    assert differing
    assert {finding.status for finding in differing} == {status}
    doubt = "3 targets of the job's loss came after padding, which predicts none here"
    assert {finding.doubt for finding in differing} == {doubt if num_left_out else None}
