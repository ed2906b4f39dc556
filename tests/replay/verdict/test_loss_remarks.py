"""What the weights of a loop's own loss tell, by rows that are made by hand."""

from collections.abc import Sequence

import pytest

from replay.objective.objective import LogProbWeights, RowWeights
from replay.verdict.judge import PassEvidence
from replay.verdict.loss_remarks import describe_loss_weights
from replay.verdict.recorded_pass import RecordedPass, ReplayedPass, WeightComparison
from tests.helpers.made_records import record


def describe(*rows: Sequence[float]) -> list[str]:
    """The notes on a pass whose targets have these weights."""
    weights = [weight for row in rows for weight in row]
    log_prob_weights = LogProbWeights(
        total=sum(weights),
        size=sum(map(abs, weights)),
        least=min(weights),
        most=max(weights),
        rows=[RowWeights(total=sum(row), num_targets=len(row), least=min(row), most=max(row)) for row in rows],
    )
    recorded = RecordedPass(
        rank=0,
        forward_number=0,
        world_size=1,
        trains=True,
        claims=[],
        weight_comparison=WeightComparison(),
        num_frozen=0,
        dtypes=["float32"],
        num_tokens=len(weights),
        has_job_weights_of_tokens=True,
    )
    evidence = PassEvidence(record(0, grad_norm=1.0), recorded, ReplayedPass(log_prob_weights=log_prob_weights))
    return [text for label, text in describe_loss_weights([evidence]) if label == "note"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (([1 / 8] * 6, [1 / 8] * 2), ""),
        (([1 / 12] * 6, [1 / 4] * 2), "the mean of its rows' means"),
        # Rows of one length weigh alike in any mean.
        (([1 / 12] * 6, [1 / 12] * 6), ""),
        (([0.1, 0.5], [0.2, 0.2]), "targets of one row weigh from 0.1 to 0.5, in 1 of 2 rows"),
        (([0.5], [0.5]), "one token a row"),
        (([1 / 2] * 6, [1 / 2] * 2), "the sum of its targets divided by the 2 rows"),
        (([1.0] * 6, [1.0] * 2), "the sum over its targets"),
        (([0.1803] * 6, [0.1803] * 2), "in bits"),
        # A policy's weights have both signs, and are no mean's.
        (([0.1, 0.5], [-0.2, 0.2]), ""),
    ],
)
def test_the_weights_of_rows_and_tokens_tell_how_a_loss_is_averaged(
    rows: tuple[Sequence[float], ...], words: str
) -> None:
    notes = describe(*rows)
    assert len(notes) == bool(words)
    assert words in "".join(notes)
