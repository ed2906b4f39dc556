"""A limit that no gradient reaches is no clipping: what matters under --step is what was done to the gradient.

All pairs of limits are in test_optimizer_comparison.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from capture import recording
from tests.replay.verdict.test_judge import FP32, replay_captures
from tests.trainers.common import make_batches, make_model

AS_THE_JOB = [*FP32, "--step", "--optimizer", "sgd", "--learning-rate", "0.1", "--verdict", "strict"]


def train(folder: Path, limits: list[float]) -> Path:
    """Three steps, each clipped to these limits, one after the other. Norms are between 5 and 40."""
    model: Any = make_model(folder).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, folder / "captures", reproduce=True):
        for batch in make_batches():
            model(**batch).loss.backward()
            norms = [nn.utils.clip_grad_norm_(model.parameters(), limit) for limit in limits]
            assert all(5 < norm < 40 for norm in norms)
            optimizer.step()
            optimizer.zero_grad()
    return folder


@pytest.mark.parametrize(
    ("limits", "typed", "said"),
    [
        ([1000.0], ["--max-norm", "500"], None),
        ([float("inf"), 1.0], [], None),
        ([float("inf"), 1.0], ["--max-norm", "inf"], "clipped to 1 in the job, to nothing here"),
    ],
)
def test_a_limit_above_the_norm_is_no_clipping(
    limits: list[float], typed: list[str], said: str | None, tmp_path: Path, one_world: None
) -> None:
    code, verdict, _ = replay_captures(train(tmp_path, limits), tmp_path / "logs", *AS_THE_JOB, *typed)
    if said is None:
        assert (code, verdict["counts"], verdict["window_counts"]) == (0, {"REPRODUCED": 3}, {"REPRODUCED": 3})
    else:
        assert (code, verdict["outcome"]) == (1, "UNSETTLED")
        assert said in str(verdict["first"])
