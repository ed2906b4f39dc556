"""Which masks and positions a pass is fed in trials, on made-up rows."""

import torch
from torch import Tensor
from transformers import LlamaConfig

from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import Origin
from replay.runner.trial_feeds import CapturedRows, FeedTrial, feed_as_captured, list_mask_trials, list_position_trials

CONFIG = LlamaConfig(vocab_size=64, max_position_embeddings=9)


def make_rows(**tensors: Tensor) -> CapturedRows:
    call = CapturedCall(tensors=tensors, call_facts={}, left_out={}, trains=True, origin=Origin(source="a.pkl"))
    return CapturedRows.from_call(call, call.micro_batch())


def make_left_padded() -> CapturedRows:
    mask_BS = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    return make_rows(input_ids=torch.arange(3, 13).view(2, 5), attention_mask=mask_BS)


def make_packed() -> CapturedRows:
    return make_rows(input_ids=torch.arange(3, 9)[None], position_ids=torch.tensor([[0, 1, 2, 3, 0, 1]]))


def name_trials(rows: CapturedRows) -> dict[str, FeedTrial]:
    return {trial.name: trial for trial in (*list_mask_trials(rows, CONFIG), *list_position_trials(rows, CONFIG))}


def test_rows_as_captured_are_fed_with_the_jobs_own_mask_and_positions() -> None:
    feed = feed_as_captured(make_left_padded())
    assert (feed.table, feed.position_BS) == (None, None)


def test_documents_of_a_packed_row_are_kept_apart_by_a_table() -> None:
    feed = feed_as_captured(make_packed())

    assert feed.position_BS is not None
    assert feed.position_BS.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert feed.table is not None
    assert feed.table.visible_BSS[0, 4].tolist() == [False, False, False, False, True, False]


def test_what_tokens_see() -> None:
    rows = make_left_padded()

    assert rows.see()[0, 3].tolist() == [False, False, True, True, False]
    assert rows.see(padding=True)[0, 3].tolist() == [True, True, True, True, False]
    assert rows.see(ahead=1)[0, 3].tolist() == [False, False, True, True, True]
    assert rows.see(ahead=-1)[0, 3].tolist() == [False, False, True, False, False]
    assert rows.see(all_keys=True)[0, 2].tolist() == [False, False, True, True, True]
    # A token that sees nothing sees itself, since its attention would be nan.
    assert rows.see()[0, 0].tolist() == [True, False, False, False, False]
    assert rows.see(ahead=-1)[1, 0].tolist() == [True, False, False, False, False]


def test_documents_of_a_packed_row_see_each_other() -> None:
    rows = make_packed()

    assert rows.see()[0, 5].tolist() == [False, False, False, False, True, True]
    assert rows.see(documents=True)[0, 5].tolist() == [True] * 6


def test_positions_begin_again_where_the_numbers_part_and_nowhere_else() -> None:
    rows = make_left_padded()
    [again] = [trial for trial in list_position_trials(rows, CONFIG, 3) if trial.name == "positions: begin again"]

    assert again.feed.position_BS is not None
    assert again.feed.position_BS.tolist() == [[0, 1, 2, 0, 1]] * 2
    assert not any(trial.name == again.name for trial in list_position_trials(rows, CONFIG))


def test_only_what_the_rows_can_tell_is_tried() -> None:
    padded, packed = name_trials(make_left_padded()), name_trials(make_packed())

    assert "padding is seen" in padded
    assert "padding is seen" not in packed
    assert "documents see each other" in packed
    assert "documents see each other" not in padded
    assert "no sliding window" not in padded
    windowed = list_mask_trials(make_packed(), LlamaConfig(sliding_window=2))
    assert [trial.name for trial in windowed][-3:] == ["no sliding window", "wider window", "narrower window"]


def test_positions_are_tried_once_each() -> None:
    trials = name_trials(make_packed())
    positions = {
        name: trial.feed.position_BS.tolist() for name, trial in trials.items() if trial.feed.position_BS is not None
    }

    assert positions["positions: columns"] == [[0, 1, 2, 3, 4, 5]]
    assert "positions: real tokens" not in positions
    assert positions["positions: from 1"] == [[1, 2, 3, 4, 1, 2]]
    assert positions["positions: halved"] == [[0.0, 0.5, 1.0, 1.5, 0.0, 0.5]]


def test_no_position_is_beyond_the_models_longest() -> None:
    ids_BS = torch.arange(3, 12)[None]

    assert "positions: from 1" not in name_trials(make_rows(input_ids=ids_BS))
    assert "positions: from 1" in name_trials(make_rows(input_ids=ids_BS[:, :8]))


def test_positions_of_left_padded_rows() -> None:
    trials = name_trials(make_left_padded())

    assert trials["positions: columns"].feed.position_BS is not None
    assert trials["positions: real tokens"].feed.position_BS is not None
    assert trials["positions: real tokens"].feed.position_BS.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
