"""Other losses are compared with the job's only where the log-probs are the job's."""

import pytest

from replay.runner.loss_variants import has_other_log_probs


@pytest.mark.parametrize(
    ("replay_log_prob", "dtypes", "is_other"),
    [
        # fp32 rounds a log-prob of this size by 1e-6 at most, bf16 by 0.01.
        (-2.0005, ["float32"], False),
        (-2.01, ["float32"], True),
        (-2.01, ["bfloat16"], False),
        (-2.01, ["float32", "bfloat16"], False),
        (-2.1, ["bfloat16"], True),
        # A dtype that is not known may be bf16.
        (-2.01, [], False),
        (-2.1, [], True),
        # The replay has no log-prob at this position, so nothing is compared there.
        (None, ["float32"], False),
    ],
)
def test_log_probs_are_others_if_one_is_farther_off_than_the_dtype_rounds(
    replay_log_prob: float | None, dtypes: list[str], is_other: bool
) -> None:
    assert has_other_log_probs([-1.0, -2.0], [-1.0, replay_log_prob], dtypes) is is_other


def test_a_job_without_log_probs_has_no_others() -> None:
    assert not has_other_log_probs([], [-1.0, -2.0], ["float32"])
