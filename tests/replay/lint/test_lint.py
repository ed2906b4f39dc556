"""The order of the remarks, and which of them stand under a verdict."""

from dataclasses import replace

import pytest

from replay.lint.lint import format_notes, has_router_loss, keep_one_of_each, lint, read_vocab_size
from replay.lint.remark import LintRemark, LintSubject, Weight
from replay.verdict.causes.cause import CauseName
from replay.verdict.special_tokens import SpecialTokens
from tests.replay.lint.recorded import make_pass

REMARKS = [
    LintRemark(topic="labels", text="are wrong", weight=Weight.WRONG_TARGETS, cause=CauseName.OTHER_TOKENS),
    LintRemark(topic="config", text="is another", weight=Weight.OTHER_CONFIG),
    LintRemark(topic="padding", text="is real", weight=Weight.WRONG_TOKENS),
    LintRemark(topic="rows", text="repeat", weight=Weight.SAME_ROWS),
    LintRemark(topic="precision", text="is low", weight=Weight.PRECISION),
    LintRemark(topic="frozen", text="are some", weight=Weight.FACT),
]


def test_three_notes_stand_under_a_verdict_and_the_others_are_counted() -> None:
    notes = format_notes(REMARKS, told=[], causes=[], command="replay inspect F")
    assert notes == [
        ("note", "labels: are wrong"),
        ("note", "config: is another"),
        ("note", "padding: is real"),
        ("note", "and 2 more: replay inspect F"),
    ]
    assert format_notes(REMARKS[3:], told=[], causes=[], command="") == [
        ("note", "rows: repeat"),
        ("note", "precision: is low"),
    ]


def test_what_the_verdict_says_already_is_no_note() -> None:
    notes = format_notes(REMARKS[:3], told=["config"], causes=[CauseName.OTHER_TOKENS], command="")
    assert notes == [("note", "padding: is real")]


def test_remarks_come_with_the_most_telling_first_and_a_pass_counts_once() -> None:
    recorded = make_pass(training={"model": False, "parts": []}, weights=None)
    assert recorded.tokens is not None
    shifted = replace(recorded, tokens=replace(recorded.tokens, label_offset=1))
    passes = keep_one_of_each([shifted, shifted])
    assert passes == [shifted]
    subject = LintSubject(passes=passes, dropout=["attn_pdrop"], vocabulary=5)
    assert [remark.topic for remark in lint(subject)][:4] == ["labels", "dropout", "vocabulary", "vocabulary"]


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, (None, None, frozenset(), None)),
        ({"pad_token_id": None, "eos_token_id": 2, "vocab_size": 9}, (None, None, {2}, 9)),
        ({"pad_token_id": -1, "eos_token_id": [2, 3], "text_config": {"vocab_size": 7}}, (None, None, {2, 3}, 7)),
        ({"pad_token_id": 0, "bos_token_id": 1}, (0, 1, frozenset(), None)),
    ],
)
def test_ids_are_read_of_a_config(config: dict[str, object], ids: tuple[object, ...]) -> None:
    found = SpecialTokens.from_config(config)
    assert (found.pad_token_id, found.bos_token_id, found.eos_token_ids, read_vocab_size(config)) == ids


@pytest.mark.parametrize(
    ("config", "has_loss"),
    [
        ({}, False),
        ({"router_aux_loss_coef": 0.1}, False),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.0}, False),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.1}, True),
        ({"text_config": {"output_router_logits": True, "router_aux_loss_coef": 0.1}}, True),
    ],
)
def test_a_loss_of_the_routers_is_told_by_the_config(config: dict[str, object], has_loss: bool) -> None:
    assert has_router_loss(config) is has_loss
