"""What the checks say of tokens over several passes: made traits, whose numbers add up to what a reader adds up."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from replay.verdict.token_traits import RowTraits, TokenTraits
from tests.replay.lint.recorded import make_pass, say


def make_traits(**values: Any) -> TokenTraits:
    known: dict[str, Any] = {"rows": (), "has_mask": True, "largest_id": 10}
    return TokenTraits(**(known | values))


def say_of(traits: Sequence[TokenTraits | None], **subject: Any) -> list[str]:
    """What is said of training passes of these tokens; None: they were not read."""
    passes = [replace(make_pass(number=number), tokens=tokens) for number, tokens in enumerate(traits)]
    # A pass that trains nothing is none of them.
    rollout = replace(passes[0], trains=False, step_after=None, forward_number=len(passes))
    return say([*passes, rollout], **subject)


SOUND = make_traits()


@pytest.mark.parametrize(
    ("traits", "said"),
    [
        ([SOUND, None, SOUND], None),
        # Most passes lose every eighth target, and one every sixteenth.
        (
            [
                make_traits(num_left_out=number, left_out_spacing=spacing)
                for number, spacing in ((4, 16), (3, 8), (2, 8))
            ],
            "loss: 9 positions between others that the job's loss gives a gradient have none, one every 8 tokens, in "
            "all 3 training passes: does each chunk of the loss lose a target?",
        ),
        (
            [
                SOUND,
                make_traits(num_left_out=3, left_out_spacing=8),
                None,
                make_traits(num_left_out=4, left_out_spacing=8),
            ],
            "loss: 7 positions between others that the job's loss gives a gradient have none, one every 8 tokens, in 2 "
            "of 3 training passes: does each chunk of the loss lose a target?",
        ),
        (
            [
                make_traits(num_not_finite=3, num_not_finite_on_padding=1),
                SOUND,
                make_traits(num_not_finite=2, num_not_finite_on_padding=2),
            ],
            "gradient: the job's loss gave its logits a gradient that is not finite at 5 positions, 3 of them before "
            "padding, in 2 of 3 training passes: fill what is masked with a finite number before exp, log or a "
            "division, not behind it",
        ),
        (
            [make_traits(num_not_finite=2, num_not_finite_on_padding=2)] * 2,
            "gradient: the job's loss gave its logits a gradient that is not finite at 4 positions, all of them before "
            "padding, in 2 of 2 training passes: fill what is masked with a finite number before exp, log or a "
            "division, not behind it",
        ),
        # Where none of them is before padding, no mask is the reason.
        (
            [make_traits(num_not_finite=1), SOUND],
            "gradient: the job's loss gave its logits a gradient that is not finite at 1 position, 0 of them before "
            "padding, in 1 of 2 training passes",
        ),
        (
            [make_traits(num_outside_mask=2, num_with_gradient=8), make_traits(num_with_gradient=7)],
            "loss: 2 of 15 positions that the job's loss gives a gradient are outside of the mask that the job gave "
            "for it: is the mask of other places, or not applied?",
        ),
        (
            [make_traits(num_actions=10), make_traits(num_actions=12, num_idle_actions=5)],
            "action mask: 5 of 22 action tokens are padding, outside the attention mask or behind the token that ends "
            "a row's text: does the loss count them?",
        ),
        # What stands on padding where no mask says so is not known to.
        (
            [
                make_traits(num_labels=20, num_on_padding=3, num_past_end=3),
                make_traits(num_labels=10, num_on_padding=4, has_mask=False),
            ],
            "labels: 3 of 30 labels are of padding, outside the attention mask, as where a loss mask is not shifted "
            "with the labels",
        ),
        (
            [
                make_traits(num_labels=20, num_on_padding=3, num_past_end=3),
                make_traits(num_labels=10, num_on_padding=4, num_past_end=1),
            ],
            "labels: 7 of 30 labels are of padding, outside the attention mask",
        ),
        ([make_traits(num_labels=10, num_on_padding=4, has_mask=False)] * 2, None),
        (
            [
                make_traits(num_labels=10, num_of_others=4, num_rows_of_others=1),
                make_traits(num_labels=10, num_of_others=2, num_rows_of_others=1),
                make_traits(num_labels=5),
            ],
            "labels: 6 of 25 labels are not the token at their place, and those of 2 rows are the tokens of another "
            "row: are they labels of other rows?",
        ),
        # Where all labels of a pass stand elsewhere, they are of no other rows.
        (
            [make_traits(num_labels=10, num_of_others=10, label_offset=1), make_traits(num_labels=10, label_offset=0)],
            "labels: in 1 of 2 training passes the labels are the next tokens already: a model that shifts them itself "
            "makes each token predict the one after the next",
        ),
        # The last tokens of four rows are no chance, and one that is another token tells that they are no roll.
        (
            [make_traits(num_last_labels=2, num_wrapped=2)] * 2,
            "labels: in 4 rows the last token is to predict the row's first one, as after a roll",
        ),
        ([make_traits(num_last_labels=2, num_wrapped=2), make_traits(num_last_labels=2, num_wrapped=1)], None),
        ([make_traits(num_last_labels=2, num_wrapped=2), make_traits(num_last_labels=1, num_wrapped=1)], None),
        ([make_traits(num_last_labels=3), SOUND], None),
        # Rows of a ring's rank begin elsewhere.
        ([make_traits(num_unlabelled=1, num_labels=4, first_positions={0: 1, 16: 1})], None),
        # Position ids of all passes together.
        (
            [make_traits(num_borders=2, num_continued=1), make_traits(num_borders=3), make_traits(num_borders=1)],
            "positions: position ids go on at 1 of 6 borders between packed documents",
        ),
        (
            [make_traits(num_other_restarts=2), SOUND, make_traits(num_other_restarts=1)],
            "positions: position ids restart at 3 tokens inside documents",
        ),
        (
            [make_traits(first_positions={1: 2}), make_traits(first_positions={1: 1})],
            "positions: the position ids of all 3 rows begin with 1 and not with 0",
        ),
        ([make_traits(first_positions={1: 2}), make_traits(first_positions={2: 1})], None),
        ([make_traits(first_positions={1: 2}), make_traits(first_positions={0: 1})], None),
        # One row alone tells no rule.
        ([make_traits(first_positions={1: 1}), SOUND], None),
        (
            [make_traits(num_late_rows=1), make_traits(num_late_rows=2, first_positions={3: 2, 0: 1})],
            "positions: position ids count the padding of 3 rows padded on the left",
        ),
        (
            [make_traits(label_range=(3, 90)), make_traits(label_range=(-7, 40)), make_traits(label_range=(-2, 1))],
            "labels: a label is -7, which is no token, and not -100, which stands for none",
        ),
        # Between a row's tokens.
        (
            [make_traits(num_between=1), SOUND],
            "mask: 1 token outside the attention mask is between the tokens of a row, which do not see them. Is the "
            "pad id a token of the texts, such as their end?",
        ),
        # What pads is the id of at least half of the masked tokens of its own pass.
        (
            [
                make_traits(num_padding=6, padding_ids={3: 3, 8: 2, 9: 1}),
                make_traits(num_padding=4, padding_ids={5: 4}),
                make_traits(num_padding=5, padding_ids={6: 2, 7: 2, 8: 1}),
            ],
            "mask: 3 of 10 tokens outside the attention mask are no padding, such as id 8",
        ),
    ],
)
def test_what_several_passes_show_is_counted_over_those_that_show_it(
    traits: Sequence[TokenTraits | None], said: str | None
) -> None:
    assert say_of(traits) == ([] if said is None else [said])


def test_the_largest_ids_of_all_passes_are_held_against_the_vocabulary() -> None:
    traits = [
        make_traits(largest_id=99, label_range=(0, 101)),
        make_traits(largest_id=100, label_range=(0, 7)),
        make_traits(largest_id=3),
    ]
    ids = "vocabulary: token ids go up to 100, and the model's config has a vocabulary of"
    labels = "vocabulary: labels go up to 101, and the model's config has a vocabulary of"
    assert say_of(traits, vocabulary=100) == [f"{ids} 100", f"{labels} 100"]
    assert say_of(traits, vocabulary=101) == [f"{labels} 101"]
    assert say_of(traits, vocabulary=102) == []
    assert say_of(traits) == []


def test_rows_without_a_label_are_told_from_passes_without_one() -> None:
    row = RowTraits(digest=None, first_tokens=(1, 2), num_labelled=0, leading=(1, 1), trailing=(2, 1))
    some = make_traits(rows=[row] * 3, num_labels=9, num_unlabelled=1)
    none = make_traits(rows=[row] * 2, num_unlabelled=2)
    whole = make_traits(rows=[row] * 4, num_labels=9)
    of_rows = "labels: 1 of 7 rows have no label, in passes that have some: are these answers that were truncated away?"
    of_passes = (
        "no token has a label in {}: are these answers that were truncated away, or passes that only fill a step up?"
    )
    assert say_of([some, whole]) == [of_rows]
    assert say_of([some, whole, none]) == [of_rows, f"labels: {of_passes.format('1 of 3 training passes')}"]
    assert say_of([none, none]) == [f"labels: {of_passes.format('all 2 training passes')}"]
    # Passes of a job that gave no labels tell nothing of them.
    assert say_of([make_traits(rows=[row] * 2), whole]) == []
    of_ring = replace(none, first_positions={0: 1, 32: 1})
    assert say_of([of_ring, whole]) == []


def make_row(number: int, num_tokens: int, **values: Any) -> RowTraits:
    known: dict[str, Any] = {"num_labelled": 0, "leading": (1, 1), "trailing": (number, 1), "has_end": True}
    return RowTraits(digest=number, first_tokens=(1, number), num_tokens=num_tokens, **(known | values))


@pytest.mark.parametrize(
    ("num_cut", "num_ended", "num_open", "has_prompt", "says"),
    [
        # Four rows of the greatest length lack the end that shorter ones have, and nine of ten of these have it.
        (4, 4, 0, False, True),
        (4, 9, 1, False, True),
        (4, 8, 1, False, False),
        (3, 9, 0, False, False),
        (4, 3, 0, False, False),
        # A tenth of all is many.
        (4, 36, 0, False, True),
        (4, 37, 0, False, False),
        # Rows of one length without an end are chunks of a text, unless each has a prompt.
        (6, 0, 0, False, False),
        (6, 0, 0, True, True),
    ],
)
def test_rows_that_were_cut_off_are_told_from_chunks_over_all_passes(
    num_cut: int, num_ended: int, num_open: int, has_prompt: bool, says: bool
) -> None:
    rows = [make_row(number, 64, has_end=False, has_prompt=has_prompt) for number in range(num_cut)]
    rows += [make_row(100 + number, 20 + number % 9) for number in range(num_ended)]
    rows += [make_row(900 + number, 30, has_end=False) for number in range(num_open)]
    passes = [make_traits(rows=rows[place::2], num_labels=9) for place in (0, 1)]
    said = (
        f"rows: {num_cut} of {len(rows)} rows end after 64 tokens without token 2, which ends a text: were they cut off"
    )
    texts = say_of(passes, eos_token_ids=frozenset({2}))
    assert [text.startswith(said) for text in texts] == [True] * says
    # Rows that a policy generated end where their generation did, and passes without labels train none of them.
    for idle in ({"has_actions": True}, {"num_labels": 0}):
        assert say_of([replace(each, **idle) for each in passes], eos_token_ids=frozenset({2})) == []
