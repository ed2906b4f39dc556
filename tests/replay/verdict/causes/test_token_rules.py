"""Which cause is told from the tokens that a job fed."""

from dataclasses import replace

import pytest
import torch

from capture.file_format.micro_batch import LOSS_TARGETS
from replay.tolerances.job_bounds import LOSS
from replay.verdict.causes.cause import CauseName, Sureness
from replay.verdict.causes.table import find_causes
from replay.verdict.causes.token_rules import (
    find_labels_of_other_side,
    find_mask_of_padding,
    find_targets_of_next_rows,
)
from replay.verdict.recorded_pass import RecordedPass
from tests.replay.lint.recorded import make_pass, make_rows, say
from tests.replay.verdict.causes.made_evidence import draw_gradients, make_forward_evidence, make_window

SOUND = draw_gradients()


def make_rows_with_mask(*, is_inverted: bool) -> RecordedPass:
    rows = make_rows([9, 12, 10])
    return make_pass({**rows, "attention_mask": abs(int(is_inverted) - rows["attention_mask"])})


def test_a_mask_that_shows_padding_alone_is_inverted() -> None:
    evidence = make_forward_evidence(LOSS)
    [compared] = make_window([SOUND], SOUND)
    inverted, sound = (
        replace(evidence, passes=[replace(compared, recorded=make_rows_with_mask(is_inverted=flag))])
        for flag in (True, False)
    )
    cause = find_causes(inverted)[0]
    assert (cause.name, cause.sureness) == (CauseName.MASK, Sureness.IS)
    assert "inverted: the 5 tokens that it calls real are all id 0, and the 31 that it hides" in cause.sentence
    assert find_mask_of_padding(sound) is None


@pytest.mark.parametrize("left", [True, False])
def test_labels_that_are_padded_on_the_other_side_are_told_from_those_of_other_tokens(left: bool) -> None:
    rows, other = make_rows([11, 14, 12, 16], left=left), make_rows([11, 14, 12, 16], left=not left)
    foreign = make_rows([11, 14, 12, 16], left=left, seed=1)
    evidence = make_forward_evidence(LOSS)
    [compared] = make_window([SOUND], SOUND)
    for labels_BS, says in ((other["labels"], True), (rows["labels"], False), (foreign["labels"], False)):
        recorded = make_pass({**rows, "labels": labels_BS})
        cause = find_labels_of_other_side(replace(evidence, passes=[replace(compared, recorded=recorded)]))
        assert (cause is not None) is says
        # The longest row has no padding.
        assert any("in 3 rows the labels are the row's own tokens" in text for text in say([recorded])) is says


@pytest.mark.parametrize("crosses", [True, False])
def test_targets_of_the_next_rows_are_told_from_those_of_each_row(crosses: bool) -> None:
    ids_BS = make_rows([12, 12, 12])["input_ids"]
    targets_BS = ids_BS.roll(-1, 1)
    targets_BS[:, -1] = torch.tensor([*ids_BS[1:, 0], -100]) if crosses else -100
    evidence = make_forward_evidence(LOSS)
    [compared] = make_window([SOUND], SOUND)
    recorded = make_pass({"input_ids": ids_BS}, notes={LOSS_TARGETS: targets_BS})
    cause = find_targets_of_next_rows(replace(evidence, passes=[replace(compared, recorded=recorded)]))
    assert (cause is not None) is crosses
    assert cause is None or cause.sentence.startswith("in 2 rows the last place is to predict the first token of the")
