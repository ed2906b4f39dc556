import math

import pytest
import torch

from replay.runlog.token_log_probs import compare


@pytest.mark.parametrize(
    ("reference", "other", "difference"),
    [
        ([-1.0, -2.0], [-1.0, -2.25], 0.25),
        # What is not finite on both sides in the same way is no difference.
        ([-1.0, math.nan], [-1.0, math.nan], 0.0),
        ([-1.0, -math.inf], [-1.0, -math.inf], 0.0),
        ([-1.0, math.nan], [-1.0, -2.0], math.inf),
        ([-1.0, -2.0], [-1.0, math.nan], math.inf),
        ([-1.0, -math.inf], [-1.0, -2.0], math.inf),
        ([-1.0], [-1.0, -2.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_the_largest_difference_of_a_token(reference: list[float], other: list[float], difference: float) -> None:
    assert compare([torch.tensor(reference)], [torch.tensor(other)])[2] == difference


def test_of_several_ranks_the_pair_that_is_farthest_apart_counts() -> None:
    ranks = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])]
    assert compare(ranks[:1], ranks) == (1.5, 1.75, 0.5, 2)
