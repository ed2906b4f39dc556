"""What the checks say of tokens, each of a seeded fault, and nothing of the sound rows beside it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.file_format.micro_batch import LOSS_GRADIENTS, LOSS_TARGETS
from replay.verdict.special_tokens import SpecialTokens
from tests.replay.lint.recorded import IGNORED, PAD, make_pass, make_rows, say

Batch = dict[str, Tensor]


def change(batch: Batch, **tensors: Tensor) -> Batch:
    return {**batch, **tensors}


@pytest.mark.parametrize("left", [False, True])
def test_nothing_is_said_of_sound_rows(left: bool) -> None:
    passes = [
        make_pass(make_rows([9, 12, 10], seed=10 * rank + number, left=left), rank=rank, number=number)
        for rank in (0, 1)
        for number in range(4)
    ]
    for settings in (
        {},
        {"pad_token_id": PAD},
        {"pad_token_id": PAD, "eos_token_ids": frozenset({PAD}), "vocabulary": 500},
    ):
        assert say(passes, **settings) == []


def shift(labels_BS: Tensor, places: int) -> Tensor:
    """The labels of the tokens so many places later."""
    return torch.nn.functional.pad(labels_BS[:, places:], (0, places), value=IGNORED)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda rows: change(rows, labels=shift(rows["labels"], 1)), "labels: in all 2 training passes the labels are "
         "the next tokens already: a model that shifts them itself makes each token predict the one after the next"),
        (lambda rows: change(rows, labels=shift(rows["labels"], 2)), "the tokens two places later, so a model that "
         "shifts them predicts three ahead"),
        (lambda rows: change(rows, shift_labels=rows["labels"]), "shift_labels are the tokens themselves, so each "),
        (lambda rows: change(rows, shift_labels=shift(rows["labels"], 2)), "shift_labels are the tokens two places"),
        (lambda rows: change(rows, labels=rows["input_ids"]), "labels: 10 of 72 labels are of padding, outside the"),
        (lambda rows: change(rows, labels=rows["labels"].masked_fill(rows["labels"] == IGNORED, -1)),
         "labels: a label is -1, which is no token, and not -100"),
        (lambda rows: change(rows, attention_mask=torch.ones_like(rows["attention_mask"])),
         "padding: 4 of 6 rows begin or end in padding (id 0) that the attention mask calls real: 10 tokens"),
        (lambda rows: change(rows, attention_mask=rows["attention_mask"].roll(-2, 1)),
         "mask: 8 of 10 tokens outside the attention mask are no padding, such as id "),
        (lambda rows: change(rows, input_ids=rows["input_ids"] + 100 * (rows["input_ids"] > 0)),
         "and the model's config has a vocabulary of 500"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_said(fault: Callable[[Batch], Batch], said: str) -> None:
    passes = [make_pass(fault(make_rows([9, 12, 10], seed=number)), number=number) for number in range(2)]
    texts = say(passes, pad_token_id=PAD, vocabulary=500)
    assert [text for text in texts if said in text], texts


@pytest.mark.parametrize("offset", [0, 1])
def test_sound_labels_of_either_kind_are_not_said(offset: int) -> None:
    rows = make_rows([20, 20])
    labels = {"labels": rows.pop("labels")} if not offset else {"shift_labels": shift(rows.pop("labels"), 1)}
    assert say([make_pass(rows | labels)]) == []


def test_labels_of_one_repeated_token_tell_no_place() -> None:
    rows = make_rows([20, 20])
    ids_BS = torch.full_like(rows["input_ids"], 7)
    assert say([make_pass({"input_ids": ids_BS, "labels": ids_BS})]) == []


def end_rows_in(id_: int, numbers: list[int]) -> Batch:
    """Rows of 20 tokens that end in so many of one id, all under the mask."""
    rows = make_rows([20] * len(numbers))
    for row, number in enumerate(numbers):
        rows["input_ids"][row, 20 - number :] = id_
    return {"input_ids": rows["input_ids"], "attention_mask": rows["attention_mask"]}


@pytest.mark.parametrize(
    ("numbers", "settings", "is_said"),
    [
        ([6, 0, 0], {"pad_token_id": 999}, True),
        ([2, 2, 0], {"pad_token_id": 999}, True),
        ([1, 1, 1], {"pad_token_id": 999}, True),  # a mask that is one token too long in every row
        ([1, 0, 0], {"pad_token_id": 999}, False),  # that may be a token of the text
        ([1, 2, 1], {"pad_token_id": 999, "eos_token_ids": frozenset({999})}, False),  # texts end in it
        ([9, 9, 1], {"pad_token_id": 999, "eos_token_ids": frozenset({999})}, True),
        ([9, 6, 0], {}, True),  # no config names it
        ([9, 0, 0], {}, False),
        ([9, 6, 0], {"pad_token_id": 3}, False),
    ],
)
def test_padding_under_the_mask_is_told_from_ends_of_texts(
    numbers: list[int], settings: dict[str, Any], is_said: bool
) -> None:
    texts = say([make_pass(end_rows_in(999, numbers))], **settings)
    assert [text.partition(":")[0] for text in texts] == ["padding"] * is_said
    assert all(", if that is padding" in text for text in texts if not settings)


def test_padding_on_the_right_of_a_job_that_has_no_mask_is_not_said_and_on_the_left_it_is() -> None:
    for left, topics in ((False, []), (True, ["padding"])):
        rows = make_rows([20, 12, 14], left=left)
        rows.pop("attention_mask")
        assert [text.partition(":")[0] for text in say([make_pass(rows)], pad_token_id=PAD)] == topics


def test_a_mask_that_leaves_out_real_tokens_is_told_by_the_padding_that_most_masked_tokens_are() -> None:
    rows = make_rows([8, 20])
    rows.pop("labels")
    cut = change(rows, attention_mask=rows["attention_mask"].roll(-2, 1) * rows["attention_mask"])
    [text] = say([make_pass(cut)])
    assert text.startswith("mask: 2 of 14 tokens outside the attention mask are no padding, such as id ")
    assert say([make_pass(change(cut, input_ids=torch.arange(1, 41).view(2, 20)))]) == []  # nothing says what pads


def test_an_inverted_mask_is_said_in_place_of_what_it_makes_of_labels_and_padding() -> None:
    rows = make_rows([9, 12, 10])
    inverted = change(rows, attention_mask=1 - rows["attention_mask"])
    expected = "mask: the attention mask is inverted: the 5 tokens that it calls real are all id 0, and the 31 that it "
    assert say([make_pass(inverted)]) == [f"{expected}hides are the texts, with 25 labels"]
    # A row of one token again and again may be a text where what is hidden is padding of one id.
    repeated = change(rows, input_ids=rows["attention_mask"] * 7)
    assert not any(text.startswith("mask") for text in say([make_pass(repeated)]))


def test_padding_between_the_tokens_of_a_row_is_said_and_its_labels_are_not_of_padding() -> None:
    rows = make_rows([20, 12])
    rows["labels"] = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, IGNORED)
    rows["attention_mask"][0, 5:8] = 0
    texts = say([make_pass(rows)])
    assert [text for text in texts if text.startswith("labels")] == []
    assert any(
        text.startswith("mask: 3 tokens outside the attention mask are between the tokens of a row") for text in texts
    )


def test_shifted_labels_of_padding_are_said_and_the_one_beside_the_last_token_is_not_of_padding() -> None:
    rows = make_rows([9, 12])
    ids_BS = rows["input_ids"]
    shifted = shift(ids_BS, 1)
    batch = {"input_ids": ids_BS, "attention_mask": rows["attention_mask"], "shift_labels": shifted}
    assert say([make_pass(batch)]) == ["labels: 3 of 22 labels are of padding, outside the attention mask"]
    unshifted_mask = change(batch, shift_labels=shifted.masked_fill(rows["attention_mask"] != 1, IGNORED))
    assert say([make_pass(unshifted_mask)]) == [
        "labels: 1 of 20 labels are of padding, outside the attention mask, as where a loss mask is not shifted with "
        "the labels"
    ]
    sound = change(batch, shift_labels=shifted.masked_fill(shift(rows["attention_mask"], 1) != 1, IGNORED))
    assert say([make_pass(sound)]) == []


def pack(position_ids: list[int]) -> Batch:
    borders = torch.tensor([0, 5, 9, 14], dtype=torch.int32)
    ids_BS = torch.arange(100, 114)[None]
    return {"input_ids": ids_BS, "position_ids": torch.tensor([position_ids]), "cu_seq_lens_q": borders}


@pytest.mark.parametrize(
    ("position_ids", "said"),
    [
        ([*range(5), *range(4), *range(5)], []),
        (list(range(14)), ["positions: position ids go on at 2 of 2 borders between packed documents"]),
        ([0, 1, 2, 0, 1, *range(4), *range(5)], ["positions: position ids restart at 1 token inside documents"]),
    ],
)
def test_positions_are_held_against_the_borders_that_the_job_named(position_ids: list[int], said: list[str]) -> None:
    assert say([make_pass(pack(position_ids))]) == said


def test_position_ids_that_count_the_padding_on_the_left_are_said() -> None:
    rows = make_rows([20, 12], left=True)
    sound = change(rows, position_ids=(rows["attention_mask"].cumsum(1) - 1).clamp(min=0))
    assert say([make_pass(sound)]) == []
    texts = say([make_pass(change(rows, position_ids=torch.arange(20).expand(2, 20)))])
    assert texts == ["positions: position ids count the padding of 1 row padded on the left"]


def test_padding_on_the_left_that_a_model_counts_itself_is_said() -> None:
    rows = make_rows([20, 12, 15], left=True)
    [text] = say([make_pass(rows)], counts_padding=True)
    assert text.startswith("positions: the model was given no position ids, and counts the padding of 2 rows padded on")
    # Another model counts real tokens or distances; a trainer's own actor, which is given an action mask, counts them.
    actors = change(rows, action_mask=rows["attention_mask"][:, 1:])
    given = change(rows, position_ids=(rows["attention_mask"].cumsum(1) - 1).clamp(min=0))
    for tensors, counts_padding in [(rows, False), (actors, True), (given, True), (make_rows([20, 12]), True)]:
        assert [text for text in say([make_pass(tensors)], counts_padding=counts_padding) if "positions" in text] == []


def test_position_ids_that_begin_with_1_in_all_rows_are_said_and_are_not_taken_to_count_padding() -> None:
    rows = make_rows([20, 19, 12], left=True)
    from_one = change(rows, position_ids=rows["attention_mask"].cumsum(1))
    said = "positions: the position ids of all 3 rows begin with 1 and not with 0"
    assert say([make_pass(from_one)]) == [said]
    # One that begins with 0 tells that the others' offsets are their own.
    from_one["position_ids"][0] -= 1
    assert said not in say([make_pass(from_one)])


def test_rows_that_come_again_are_said() -> None:
    own = [make_pass(rank=rank, number=number) for rank in (0, 1) for number in (0, 1)]
    assert say(own) == []
    same = [make_pass(make_rows([9, 12, 10], seed=number), rank=rank, number=number) for rank, number in
            ((0, 0), (1, 0), (0, 1), (1, 1))]  # fmt: skip
    [text] = say(same)
    assert text.startswith("rows: 6 of 6 rows came to several ranks (0, 1) in 2 steps: right for ranks of tensor")
    twice = [make_pass(make_rows([9, 12, 10]), number=number, optimizer_step=0, step=None) for number in (0, 1)]
    assert say(twice) == ["rows: 3 rows came again to the same rank before the step was over"]
    each = [make_pass(make_rows([9, 12, 10]), number=number) for number in range(3)]
    assert say(each) == ["rows: each of the 3 steps was fed the same rows"]


@pytest.mark.parametrize(("order", "says"), [([0, 1, 2, 3], True), ([3, 1, 2, 0], False)])
def test_epochs_of_one_order_are_said(order: list[int], says: bool) -> None:
    passes = [
        make_pass(make_rows([9, 12, 10], seed=seed), number=number) for number, seed in enumerate([0, 1, 2, 3, *order])
    ]
    said = "rows: the rows of 4 steps came again in the same order, for 4 steps: are they shuffled anew in each epoch "
    assert [text.startswith(said) for text in say(passes)] == [True] * says
    # Half an epoch of the same order tells nothing.
    assert say(passes[:6]) == []


@pytest.mark.parametrize("is_action", [True, False])
def test_an_end_of_answers_that_is_never_an_action_is_said(is_action: bool) -> None:
    """As of an action mask that is one token short."""
    rows = make_rows([20, 18, 15, 19])
    rows.pop("labels")
    last = rows["attention_mask"].sum(1, keepdim=True) - 1
    rows["input_ids"].scatter_(1, last, 900)
    is_action_BS = (torch.arange(20) >= 8) & (torch.arange(20) < last + is_action)
    tokens = SpecialTokens(pad_token_id=PAD, eos_token_ids=frozenset({900}))
    recorded = make_pass(rows, notes={"action_mask": is_action_BS[:, 4:]}, special_tokens=tokens)
    said = (
        "labels: token 900 ends 4 of 4 rows and is never an action, though the tokens before it are: is the end of a "
        "text taken for padding?"
    )
    assert say([recorded], eos_token_ids=frozenset({900})) == ([] if is_action else [said])


def test_rows_of_several_epochs_and_rows_of_one_token_are_not_said() -> None:
    epochs = [make_pass(make_rows([9, 12, 10], seed=number % 2), number=number) for number in range(4)]
    assert say(epochs) == []
    ones = [make_pass({"input_ids": torch.ones(2, 16, dtype=torch.int64)}, number=number) for number in range(4)]
    assert say(ones) == []


def test_a_template_that_all_rows_begin_with_is_said_where_it_has_labels() -> None:
    def begin_alike(labelled: bool) -> list[str]:
        rows = make_rows([20] * 5)
        rows["input_ids"][:, :6] = torch.arange(900, 906)
        rows["labels"] = rows["input_ids"].clone()
        rows["labels"][:, : 0 if labelled else 8] = IGNORED
        return say([make_pass(rows)])

    assert begin_alike(False) == []
    said = "labels: all 5 rows begin with the same 6 tokens, which have labels: is a prompt left in the loss?"
    assert begin_alike(True) == [said]


def test_a_last_token_that_is_to_predict_the_row_s_first_one_is_said() -> None:
    """Not of fewer rows with such a label, and not where one row has another label there."""
    ids_BS = make_rows([12, 12, 12, 12, 12])["input_ids"]
    batch = {"input_ids": ids_BS, "attention_mask": torch.ones_like(ids_BS), "shift_labels": ids_BS.roll(-1, 1)}
    batch["shift_labels"][0, -1] = IGNORED
    [said] = say([make_pass(batch)])
    assert said == "labels: in 4 rows the last token is to predict the row's first one, as after a roll"
    assert say([make_pass({name: tensor[:4] for name, tensor in batch.items()})]) == []
    batch["shift_labels"][1, -1] += 1
    assert say([make_pass(batch)]) == []


def shift_joined(ids_BS: Tensor, *, last: int = IGNORED) -> Tensor:
    """Labels of rows that were joined before they were shifted; `last` is that of the last place."""
    return torch.cat([ids_BS.flatten()[1:], torch.tensor([last])]).view_as(ids_BS)


@pytest.mark.parametrize("begins_alike", [True, False])
@pytest.mark.parametrize("is_gradient", [True, False])
def test_a_last_place_that_is_to_predict_the_next_row_is_said(is_gradient: bool, begins_alike: bool) -> None:
    """Both of labels that the job gave and of those that its gradient tells; a padded row has the next one's, too."""
    rows = make_rows([12, 9, 12])
    if begins_alike:
        rows["input_ids"][:, 0] = 700
    ids_BS = rows["input_ids"]
    labels_BS = shift_joined(ids_BS.masked_fill(rows["attention_mask"] == 0, IGNORED))

    def say_of(targets_BS: Tensor) -> list[str]:
        given = {} if is_gradient else {"shift_labels": targets_BS}
        notes = {LOSS_TARGETS: targets_BS} if is_gradient else {}
        tensors = {**given, **{name: rows[name] for name in ("input_ids", "attention_mask")}}
        return [text for text in say([make_pass(tensors, notes=notes)]) if "first token of the next row" in text]

    said = (
        "labels: in 2 rows the last place is to predict the first token of the next row: labels are shifted after the "
        "rows are joined (`view(-1)`), not before"
    )
    assert say_of(labels_BS) == [said]
    # Rolled, the last row's last place has the first row's first token.
    rolled = [said.replace("2 rows", "3 rows")]
    assert say_of(shift_joined(ids_BS, last=int(ids_BS[0, 0]))) == ([] if begins_alike else rolled)
    # Rows of one long text go on in the next row, and the last one in a token that is in no row.
    assert say_of(shift_joined(ids_BS, last=777)) == []
    assert say_of(labels_BS.masked_fill(torch.arange(12) == 11, IGNORED)) == []
    labels_BS[0, -1] += 1
    assert say_of(labels_BS) == []


def begin_rows_with(*tokens: int) -> Batch:
    rows = make_rows([14] * 5)
    rows["input_ids"][:, : len(tokens)] = torch.tensor(tokens)
    return rows


@pytest.mark.parametrize(
    ("tokens", "settings", "is_said"),
    [
        ((700, 700), {}, True),
        ((700, 701), {}, False),
        ((700, 700, 700), {}, False),  # not what a tokenizer adds
        ((PAD, PAD), {"pad_token_id": PAD}, False),  # padding under the mask, which is said elsewhere
    ],
)
def test_rows_that_begin_with_one_token_twice_are_said(
    tokens: tuple[int, ...], settings: dict[str, Any], is_said: bool
) -> None:
    texts = [text for text in say([make_pass(begin_rows_with(*tokens))], **settings) if text.startswith("rows:")]
    said = f"rows: all 5 rows begin with token {tokens[0]} twice: does a tokenizer add one to a text that has it?"
    assert texts == [said] * is_said
    other = begin_rows_with(*tokens)
    other["input_ids"][0, 1] = 705
    assert not any(text.startswith("rows:") for text in say([make_pass(other)], **settings))


def end_texts_in(id_: int, *, is_labelled: bool, has_mask: bool = True, is_shifted: bool = False) -> Batch:
    """Rows padded with 0 whose texts end in `id_`, which has a label or has none."""
    rows = make_rows([20, 12, 15, 18])
    mask_BS = rows["attention_mask"]
    last = mask_BS.sum(1, keepdim=True) - 1
    rows["input_ids"].scatter_(1, last, id_)
    rows["labels"].scatter_(1, last, id_ if is_labelled else IGNORED)
    if is_shifted:
        rows["shift_labels"] = shift(rows.pop("labels"), 1)
    if not has_mask:
        rows.pop("attention_mask")
    return rows


@pytest.mark.parametrize("is_shifted", [False, True])
def test_an_end_of_texts_that_never_has_a_label_is_said(is_shifted: bool) -> None:
    said = (
        "labels: token 900 ends 4 of 4 rows and never has a label, though the tokens before it have: is the end of a "
        "text taken for padding?"
    )
    fault = [make_pass(end_texts_in(900, is_labelled=False, is_shifted=is_shifted))]
    assert say(fault) == say(fault, eos_token_ids=frozenset({900})) == [said]
    # The config names another end: this may be a line's end behind it.
    assert say(fault, eos_token_ids=frozenset({901})) == []
    sound = make_pass(end_texts_in(900, is_labelled=True, is_shifted=is_shifted))
    assert say([sound]) == say([sound], eos_token_ids=frozenset({900})) == []
    # Where it has a label in one pass, others have left it out on purpose.
    later = make_pass(end_texts_in(900, is_labelled=True, is_shifted=is_shifted), number=1)
    assert say([*fault, later], eos_token_ids=frozenset({900})) == []


def test_without_a_mask_padding_behind_a_labelled_end_is_not_taken_for_the_end() -> None:
    rows = end_texts_in(900, is_labelled=True, has_mask=False)
    wider = {name: torch.nn.functional.pad(rows[name], (0, 2), value=PAD) for name in ("input_ids", "labels")}
    wider["labels"][:, -2:] = IGNORED
    passes = [make_pass(wider)]
    assert say(passes, pad_token_id=PAD) == say(passes, eos_token_ids=frozenset({900})) == say(passes) == []
    # Padded with the token that ends a text: the first of them is the text's own.
    same = end_texts_in(900, is_labelled=False, has_mask=False)
    same["input_ids"][same["input_ids"] == PAD] = 900
    [text] = say([make_pass(same)], pad_token_id=900, eos_token_ids=frozenset({900}))
    assert text.startswith("labels: token 900 ends 4 of 4 rows and never has a label")


def test_padding_on_the_right_without_a_mask_is_said_where_a_loss_of_routers_counts_it() -> None:
    rows = make_rows([20, 12, 14])
    rows.pop("attention_mask")
    assert say([make_pass(rows)], pad_token_id=PAD) == []
    assert say([make_pass(rows)], pad_token_id=PAD, has_router_loss=True) == [
        "padding: 2 of 3 rows begin or end in padding (id 0) that the attention mask would hide, and there is no mask: "
        "14 tokens, which the routers' loss counts"
    ]
    assert say([make_pass(make_rows([20, 12, 14]))], pad_token_id=PAD, has_router_loss=True) == []


@pytest.mark.parametrize("are_parted", [False, True])
def test_rows_that_hold_several_texts_and_one_attention_are_said(are_parted: bool) -> None:
    """As of a packing that wraps texts to rows of one length, and names no borders."""
    begin = 501
    passes = []
    for number in range(3):
        rows = make_rows([12, 12], seed=number)
        rows["input_ids"][:, 0] = rows["input_ids"][:, 5] = rows["labels"][:, 5] = begin
        if are_parted:
            rows["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
        passes.append(rows)
    said = (
        f"rows: token {begin}, which begins a text, stands 6 times inside 6 of 6 rows, where no position id begins "
        "again: each text sees those before it. Right for turns of one talk; are texts packed here?"
    )

    def say_of(bos_token_id: int | None) -> list[str]:
        recorded = [
            make_pass(rows, number=number, special_tokens=SpecialTokens(bos_token_id=bos_token_id))
            for number, rows in enumerate(passes)
        ]
        return [text for text in say(recorded) if text.startswith("rows")]

    assert say_of(begin) == ([] if are_parted else [said])
    assert say_of(7) == say_of(None) == []


@pytest.mark.parametrize(("width", "pad_token_id", "says"), [(5, None, False), (1, PAD, False), (1, None, True)])
def test_what_begins_a_text_behind_padding_on_the_left_is_no_second_text(
    width: int, pad_token_id: int | None, says: bool
) -> None:
    """Without a mask. One token of an id that does not pad may be the end of another text."""
    begin, passes = 501, []
    for number in range(3):
        rows = make_rows([12, 12], seed=number)
        rows.pop("attention_mask")
        rows["input_ids"][:, :width], rows["input_ids"][:, width] = PAD, begin
        special_tokens = SpecialTokens(bos_token_id=begin, pad_token_id=pad_token_id)
        passes.append(make_pass(rows, number=number, special_tokens=special_tokens))
    texts = [text for text in say(passes, pad_token_id=pad_token_id) if "which begins a text" in text]
    assert [text.startswith(f"rows: token {begin}") for text in texts] == [True] * says


@pytest.mark.parametrize(
    ("place", "is_parted", "says"),
    # The last column is the end of a row, and one before it begins the padding at the end.
    [(5, False, True), (5, True, False), (11, False, False), (slice(9, 12), False, False), (0, False, False)],
)
def test_rows_with_an_end_of_a_text_inside_are_said(place: int | slice, is_parted: bool, says: bool) -> None:
    end, passes = 501, []
    for number in range(3):
        rows = make_rows([12, 12], seed=number)
        rows["input_ids"][:, place] = end
        if is_parted:
            rows["position_ids"] = torch.cat([torch.arange(6), torch.arange(6)]).expand(2, -1)
        passes.append(make_pass(rows, number=number, special_tokens=SpecialTokens(eos_token_ids=frozenset({end}))))
    texts = [text for text in say(passes, eos_token_ids=frozenset({end})) if "several documents" in text]
    said = "rows: most hold several documents or turns (token 501, which ends a text, inside 6 of 6 rows), and neither "
    assert [text.startswith(said) for text in texts] == ([True] if says else [])


@pytest.mark.parametrize(("places", "where"), [((9, 10), "1 of them before padding"), ((9,), "all of them before")])
def test_a_gradient_of_the_loss_that_is_not_finite_is_said_with_its_places(places: tuple[int, ...], where: str) -> None:
    """The rows have 9, 12 and 10 tokens, so position 9 of the first row and of the last one predict padding."""
    rows = make_rows([9, 12, 10])
    gradients_BS = torch.zeros(rows["input_ids"].shape)
    passes = [make_pass(rows, notes={LOSS_GRADIENTS: gradients_BS}, step=None)]
    assert not [text for text in say(passes) if text.startswith("gradient")]
    gradients_BS[2, list(places)] = torch.nan
    gradients_BS[1, [place for place in places if place > 9]] = torch.inf
    gradients_BS[2, [place for place in places if place > 9]] = 0.0
    broken = make_pass(rows, notes={LOSS_GRADIENTS: gradients_BS}, step=None, optimizer_step=0)
    texts = say([*passes, broken])
    [said] = [text for text in texts if text.startswith("gradient")]
    number = "1 position" if len(places) == 1 else "2 positions"
    assert f"is not finite at {number}, {where}" in said
    assert "in 1 of 2 training passes" in said


def test_rows_without_a_label_are_said_where_others_have_some() -> None:
    rows = make_rows([9, 12, 10])
    assert say([make_pass(rows)]) == []
    rows["labels"][1] = IGNORED
    said = "labels: 1 of 3 rows have no label, in passes that have some: are these answers that were truncated away?"
    assert say([make_pass(rows)]) == [said]
    # A part of a row, as a rank of a ring has it, may be of a prompt.
    assert say([make_pass(change(rows, position_ids=torch.arange(12, 24).expand(3, 12)))]) != [said]
    # A row of padding alone fills a batch up, and a gradient is no label: a row without an advantage has none.
    padding = change(rows, attention_mask=rows["attention_mask"].clone(), input_ids=rows["input_ids"].clone())
    padding["attention_mask"][1] = padding["input_ids"][1] = PAD
    targets_BS = shift(rows.pop("labels"), 1)
    passes = [make_pass(padding), make_pass(rows, notes={LOSS_TARGETS: targets_BS})]
    assert [text for recorded in passes for text in say([recorded])] == []


@pytest.mark.parametrize("number", [0, 1, 3])
def test_passes_without_any_label_are_said(number: int) -> None:
    """A part of a row, as a rank of a ring has it, may be of a prompt."""
    passes = []
    for place in range(3):
        rows = make_rows([9, 12, 10], seed=place)
        if place < number:
            rows["labels"] = torch.full((3, 12), IGNORED)
        passes.append(rows)
    count = "all 3 training passes" if number == 3 else f"{number} of 3 training passes"
    said = f"labels: no token has a label in {count}: are these answers that were truncated away, or passes that only "
    texts = say([make_pass(rows, number=place) for place, rows in enumerate(passes)])
    assert [text.startswith(said) for text in texts] == [True] * bool(number)
    of_ring = [change(rows, position_ids=torch.arange(12, 24).expand(3, 12)) for rows in passes]
    texts = say([make_pass(rows, number=place) for place, rows in enumerate(of_ring)])
    assert not any("no token has a label" in text for text in texts)


END, BEGIN = 900, 901
ENDS = frozenset({END})
ALL_IDS = SpecialTokens(pad_token_id=PAD, bos_token_id=BEGIN, eos_token_ids=ENDS)


def make_texts(lengths: list[int], *, most: int = 99, keeps_end: bool = False, seed: int = 0) -> list[Batch]:
    """A pass for each two rows, of texts with begin and end, of which no more than `most` tokens are kept."""
    passes = []
    for place in range(0, len(lengths), 2):
        pair = lengths[place : place + 2]
        rows = make_rows(pair, seed=seed + place)
        kept = [min(length, most) for length in pair]
        batch = {name: torch.full((len(pair), max(kept)), IGNORED if name == "labels" else 0) for name in rows}
        for row, (length, number) in enumerate(zip(pair, kept, strict=True)):
            rows["input_ids"][row, 0], rows["input_ids"][row, length - 1] = BEGIN, END
            rows["labels"][row, length - 1] = END
            part = slice(length - number, length) if keeps_end else slice(0, number)
            for name, tensor in rows.items():
                batch[name][row, :number] = tensor[row, part]
        passes.append(batch)
    return passes


def say_of_texts(passes: list[Batch], **values: Any) -> list[str]:
    recorded = [make_pass(rows, number=number, special_tokens=ALL_IDS, **values) for number, rows in enumerate(passes)]
    return say(recorded, pad_token_id=PAD, eos_token_ids=ENDS)


LENGTHS = [20, 12, 25, 14, 22, 11, 24, 13]


def test_rows_that_are_cut_off_at_their_ends_are_said() -> None:
    assert say_of_texts(make_texts(LENGTHS)) == []
    said = (
        "rows: 4 of 8 rows end after 16 tokens without token 900, which ends a text: were they cut off at a maximal "
        "length? Nothing in them teaches where an answer ends"
    )
    assert say_of_texts(make_texts(LENGTHS, most=16)) == [said]
    # One row that is too long is no matter, nor is a text that ends with the last token that is kept.
    assert say_of_texts(make_texts([20, 12, 16, 14, 16, 11, 16, 13], most=16)) == []
    # Answers that a policy generates end where they may.
    actions = {"advantages": torch.ones(2)}
    assert say_of_texts(make_texts(LENGTHS, most=16), notes=actions) == []


@pytest.mark.parametrize("has_prompts", [True, False])
def test_rows_of_one_length_without_an_end_are_said_where_each_has_a_prompt(has_prompts: bool) -> None:
    """Without one they may be chunks of long texts."""
    passes = make_texts([20, 25, 22, 24], most=16)
    if not has_prompts:
        passes = [change(rows, labels=rows["input_ids"]) for rows in passes]
    texts = say_of_texts(passes)
    assert [text.startswith("rows: 4 of 4 rows end after 16 tokens without token 900") for text in texts] == (
        [True] if has_prompts else []
    )


def test_rows_that_are_cut_off_at_their_begins_are_said() -> None:
    said = (
        "rows: 4 of 8 rows, each of 16 tokens, do not begin with token 901, as all shorter ones do: were their prompts "
        "cut off at a maximal length?"
    )
    assert say_of_texts(make_texts(LENGTHS, most=16, keeps_end=True)) == [said]
    # Texts that begin in many ways, and generated answers.
    unlike = make_texts(LENGTHS, most=16, keeps_end=True)
    unlike[0]["input_ids"][1, 0] = 5
    assert say_of_texts(unlike) == []
    passes = make_texts(LENGTHS, most=16, keeps_end=True)
    assert say_of_texts(passes, notes={"advantages": torch.ones(2)}) == []


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize(("num_ends", "says"), [(3, True), (2, False)])
def test_padding_with_labels_that_no_mask_tells_is_said(num_ends: int, says: bool, has_mask: bool) -> None:
    """The end of a text may be written by a template, and by a tokenizer."""
    rows = make_rows([20, 20, 20])
    rows["input_ids"][:2, 20 - num_ends :] = rows["labels"][:2, 20 - num_ends :] = END
    if not has_mask:
        rows.pop("attention_mask")
    texts = say([make_pass(rows)], eos_token_ids=ENDS, pad_token_id=END)
    said = f"labels: 2 of 3 rows end in token 900 again and again, with {2 * num_ends} labels: is padding trained?"
    assert (said in texts) is says
    rows["labels"][:, 18:] = IGNORED
    assert not any("again and again" in text for text in say([make_pass(rows)], eos_token_ids=ENDS))


@pytest.mark.parametrize(
    ("begin", "length"), [([7, 8, 9, 7, 8, 9], 3), ([7, 8, 9, 7, 8, 8], 0), ([7, 7, 7, 7, 7, 7], 0)]
)
def test_a_template_that_is_applied_twice_is_said(begin: list[int], length: int) -> None:
    rows = make_rows([20] * 5)
    rows["input_ids"][:, :6] = torch.tensor(begin)
    rows["labels"][:, :6] = IGNORED
    texts = [text for text in say([make_pass(rows)]) if "twice" in text]
    said = f"rows: all 5 rows begin with the same {length} tokens twice: is the chat template applied to texts that "
    assert [text.startswith(said) for text in texts] == [True] * bool(length)
    rows["input_ids"][0, 5] = 70
    assert not any("twice" in text for text in say([make_pass(rows)]))


@pytest.mark.parametrize(
    ("unlabelled", "says"),
    # Ends of turns are at 8 and 14, that of a row at 19; the tokens at 15 and 16 are another turn's, without labels.
    [((8, 14), True), ((), False), ((8,), False), ((8, 14, 19), False), ((7, 8, 13, 14), False)],
)
def test_ends_of_turns_without_a_label_are_said_where_those_of_rows_have_one(
    unlabelled: tuple[int, ...], says: bool
) -> None:
    rows = make_rows([20] * 4)
    rows["input_ids"][:, [8, 14, 19]] = rows["labels"][:, [8, 14, 19]] = END
    rows["labels"][:, [15, 16, *unlabelled]] = IGNORED
    texts = say([make_pass(rows, special_tokens=ALL_IDS)], eos_token_ids=ENDS)
    found = [text for text in texts if "has no label at any of" in text]
    said = "labels: token 900, which ends a text, has no label at any of 8 places inside the rows, though the tokens "
    assert [text.startswith(said) for text in found] == [True] * says
    # A second end behind a turn's own is none of its own.
    rows["input_ids"][:, [9, 15]] = END
    rows["labels"][:, [8, 14]] = END
    rows["labels"][:, [9, 15]] = IGNORED
    texts = say([make_pass(rows, special_tokens=ALL_IDS)], eos_token_ids=ENDS)
    assert not any("has no label at any of" in text for text in texts)


def count_outside(name: str, mask: Tensor, has_gradient_BS: Tensor) -> list[str]:
    rows = {name: tensor for name, tensor in make_rows([12, 9]).items() if name != "labels"}
    targets_BS = rows["input_ids"].roll(-1, dims=1).masked_fill(~has_gradient_BS, -100)
    texts = say([make_pass(rows, notes={LOSS_TARGETS: targets_BS, name: mask})])
    return [text for text in texts if text.startswith("loss: ")]


@pytest.mark.parametrize(
    ("name", "mask_of", "is_sound"),
    [
        # What the loss counts are the tokens 5 to 8 of each row, which those before them predict.
        ("loss_mask", lambda tokens: tokens, True),
        ("loss_mask", lambda tokens: tokens[:, 1:], True),
        ("completion_mask", lambda tokens: tokens.roll(-1, dims=1).float(), True),
        ("action_mask", lambda tokens: tokens[:, 4:], True),
        ("action_mask", lambda tokens: tokens.roll(-1, dims=1)[:, 4:], False),
        ("loss_mask", lambda tokens: tokens.roll(1, dims=1), False),
        ("loss_mask", lambda tokens: tokens & (torch.arange(12) > 6), False),
        # Not a mask of the loss, nor of these tokens.
        ("loss_mask", lambda tokens: 0.5 * tokens, True),
        ("loss_mask", lambda tokens: tokens[:, 5:], True),
        ("token_type_mask", lambda tokens: ~tokens, True),
    ],
)
def test_a_gradient_outside_of_the_mask_of_the_loss_is_said(name: str, mask_of: Any, is_sound: bool) -> None:
    tokens_BS = ((torch.arange(12) >= 5) & (torch.arange(12) <= 8)).expand(2, 12)
    texts = count_outside(name, mask_of(tokens_BS), tokens_BS.roll(-1, dims=1))
    assert bool(texts) is not is_sound
    # A token of the mask may have no gradient, as one whose ratio was clipped.
    assert count_outside(name, mask_of(tokens_BS), torch.zeros(2, 12, dtype=torch.bool)) == []


def test_positions_with_a_gradient_outside_of_the_mask_are_counted() -> None:
    tokens_BS = ((torch.arange(12) >= 5) & (torch.arange(12) <= 8)).expand(2, 12)
    [text] = count_outside("loss_mask", tokens_BS & (torch.arange(12) != 6), tokens_BS.roll(-1, dims=1))
    assert text.startswith("loss: 2 of 8 positions that the job's loss gives a gradient are outside of the mask")


@pytest.mark.parametrize("is_shifted", [False, True])
def test_labels_of_other_rows_are_said(is_shifted: bool) -> None:
    """As of a collator that sorts its rows and leaves their labels."""
    rows = make_rows([9, 12, 12])
    labels_BS = rows.pop("labels")

    def say_of(labels_BS: Tensor) -> list[str]:
        labels = {"shift_labels": shift(labels_BS, 1)} if is_shifted else {"labels": labels_BS}
        return say([make_pass(rows | labels)])

    assert say_of(labels_BS) == []
    assert say_of(labels_BS.roll(1, 0)) == [
        "labels: 3 of 27 labels are of padding, outside the attention mask",
        "labels: 24 of 27 labels are not the token at their place, and those of 2 rows are the tokens of another row: "
        "are they labels of other rows?",
    ]
    labels_BS[1, 5:8] += 1
    assert say_of(labels_BS) == [
        "labels: 3 of 27 labels are not the token at their place: are they labels of other rows?"
    ]


def lose_targets(lost_BS: Tensor) -> list[str]:
    rows = {name: tensor for name, tensor in make_rows([40, 30]).items() if name != "labels"}
    has_target_BS = (torch.arange(40) >= 5) & (torch.arange(40) < torch.tensor([[39], [29]]))
    targets_BS = rows["input_ids"].roll(-1, dims=1).masked_fill(~has_target_BS | lost_BS, IGNORED)
    return [text for text in say([make_pass(rows, notes={LOSS_TARGETS: targets_BS})]) if text.startswith("loss: ")]


@pytest.mark.parametrize(
    ("chunk", "length", "number"),
    # Chunks of each row's tokens, of all rows' joined, and of all rows' without their last places, joined.
    [(8, None, 7), (9, 40, 6), (8, 39, 7)],
)
def test_a_target_that_each_chunk_of_a_loss_loses_is_said(chunk: int, length: int | None, number: int) -> None:
    columns = torch.arange(40)
    places_BS = columns.expand(2, 40) if length is None else columns + length * torch.arange(2)[:, None]
    is_lost_BS = places_BS % chunk == chunk - 1
    [said] = lose_targets(is_lost_BS)
    assert said == (
        f"loss: {number} positions between others that the job's loss gives a gradient have none, one every {chunk} "
        "tokens, in all 1 training pass: does each chunk of the loss lose a target?"
    )
    # A token of a chunk's border that is counted, or one elsewhere that is not, as where a ratio was clipped.
    one_less_BS, one_more_BS = is_lost_BS.clone(), is_lost_BS.clone()
    one_less_BS[tuple(is_lost_BS[:, 8:].nonzero()[0] + torch.tensor([0, 8]))] = False
    one_more_BS[0, 20] = True
    assert lose_targets(one_less_BS) == lose_targets(one_more_BS) == []


def test_a_loss_that_leaves_out_what_another_document_begins_with_is_sound() -> None:
    assert lose_targets(torch.zeros(2, 40, dtype=torch.bool)) == []
    rows = {"input_ids": make_rows([40])["input_ids"], "position_ids": torch.arange(40)[None] % 8}
    targets_BS = rows["input_ids"].roll(-1, dims=1).masked_fill(rows["position_ids"] == 7, IGNORED)
    ends = {"input_ids": rows["input_ids"].masked_fill(rows["position_ids"] == 7, 900)}
    tokens = SpecialTokens(eos_token_ids=frozenset({900}))
    for tensors, said in ((rows, 0), (ends, 0), ({"input_ids": rows["input_ids"]}, 1)):
        texts = say([make_pass(tensors, notes={LOSS_TARGETS: targets_BS}, special_tokens=tokens)])
        assert len([text for text in texts if text.startswith("loss: ")]) == said


def mask_actions(ids_A: list[int], actions_A: list[int], real_A: list[int] | None = None) -> list[str]:
    """What is said of a row of five prompt tokens and these actions, whose texts end in 900 and are padded with 0."""
    rows = {
        "input_ids": torch.tensor([[11, 12, 13, 14, 15, *ids_A]]),
        "attention_mask": torch.tensor([[1] * 5 + (real_A or [1] * len(ids_A))]),
    }
    tokens = SpecialTokens(pad_token_id=PAD, eos_token_ids=frozenset({900}))
    recorded = make_pass(rows, notes={"action_mask": torch.tensor([actions_A])}, special_tokens=tokens)
    return [text for text in say([recorded]) if text.startswith("action mask")]


@pytest.mark.parametrize(
    ("ids_A", "actions_A", "real_A", "number"),
    [
        ([21, 22, 900, PAD, PAD, PAD], [1, 1, 1, 1, 1, 1], None, 3),
        ([21, 22, 900, PAD, PAD, PAD], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], 3),
        # Padding of an id that no config names, and padding with the end of a text.
        ([21, 900, 77, 77, 77, 77], [1, 1, 1, 1, 1, 1], None, 4),
        ([21, 22, 900, 900, 900, 900], [1, 1, 1, 1, 1, 1], None, 3),
        # Behind the last of several turns.
        ([21, 900, 31, 900, PAD, PAD], [1, 1, 0, 1, 1, 1], None, 2),
        # No text ends here: the mask of attention alone says what is padding.
        ([21, 22, 23, PAD, PAD, PAD], [1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], 3),
        # Sound: the actions end with the text, or at the longest allowed length, or a next turn comes, or a line's end.
        ([21, 22, 900, PAD, PAD, PAD], [1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0], 0),
        ([21, 22, 900, PAD, PAD, PAD], [1, 1, 1, 0, 0, 0], None, 0),
        ([21, 22, 23, 24, PAD, 25], [1, 1, 1, 1, 1, 1], None, 0),
        ([21, 900, 31, 32, 22, 900], [1, 1, 0, 0, 1, 1], None, 0),
        ([21, 22, 23, 24, 900, 31], [1, 1, 1, 1, 1, 1], None, 0),
    ],
)
def test_an_action_mask_of_padding_is_said(
    ids_A: list[int], actions_A: list[int], real_A: list[int] | None, number: int
) -> None:
    said = (
        f"action mask: {number} of {sum(actions_A)} action tokens are padding, outside the attention mask "
        "or behind the token that ends a row's text: does the loss count them?"
    )
    assert mask_actions(ids_A, actions_A, real_A) == ([said] if number else [])
