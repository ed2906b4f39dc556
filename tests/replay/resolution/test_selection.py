"""Which captures a data rank replays, in which order, and what is said of the others."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actor_init.spec import UsageError
from capture.file_format.capture_file import read_call, write_call
from capture.file_format.micro_batch import Origin
from capture.file_format.optimizer_step import OptimizerStep
from replay.options.option_parsing import format_error_with_flags
from replay.options.spec import InputOrder, InputsSpec, LossName, Passes
from replay.resolution.selection import Selection, select
from tests.helpers.made_captures import damage, write_end, write_pass, write_passes, write_recordings


def select_on_all_ranks(num_data_ranks: int, spec: InputsSpec) -> list[Selection]:
    return [select(spec, data_rank, num_data_ranks) for data_rank in range(num_data_ranks)]


def test_one_data_rank_replays_every_training_pass_in_recorded_order(tmp_path: Path) -> None:
    paths = write_passes(tmp_path, {0: "rttr", 1: "tr"})
    chosen = select(InputsSpec(inputs=tmp_path), 0, 1)
    assert chosen.inputs == [paths[0][1], paths[0][2], paths[1][0]]
    assert chosen.num_left_out_passes == 3
    assert chosen.num_left_over == 0
    assert chosen.damaged == []


@pytest.mark.parametrize(("passes", "kept"), [(Passes.TRAIN, [1]), (Passes.ROLLOUT, [0, 2]), (Passes.ALL, [0, 1, 2])])
def test_passes_chooses_the_kind(tmp_path: Path, passes: Passes, kept: list[int]) -> None:
    paths = write_passes(tmp_path, {0: "rtr"})
    chosen = select(InputsSpec(inputs=tmp_path, passes=passes), 0, 1)
    assert chosen.inputs == [paths[0][i] for i in kept]
    assert chosen.num_left_out_passes == 3 - len(kept)


def test_as_many_data_ranks_as_captured_ranks_replay_their_own_files(tmp_path: Path) -> None:
    paths = write_passes(tmp_path, {3: "ttt", 8: "ttt"})
    ranks = select_on_all_ranks(2, InputsSpec(inputs=tmp_path))
    assert [chosen.inputs for chosen in ranks] == [paths[3], paths[8]]


def test_other_numbers_of_data_ranks_are_dealt_all_files_in_turn(tmp_path: Path) -> None:
    paths = write_passes(tmp_path, {0: "tttt", 1: "ttt"})
    every = paths[0] + paths[1]
    ranks = select_on_all_ranks(3, InputsSpec(inputs=tmp_path))
    assert [chosen.inputs for chosen in ranks] == [every[0:6:3], every[1:6:3], every[2:6:3]]
    assert [chosen.num_left_over for chosen in ranks] == [1, 1, 1]


@pytest.mark.parametrize("num_data_ranks", [1, 2, 3])
def test_shuffled_epochs_give_the_same_windows_to_any_number_of_data_ranks(tmp_path: Path, num_data_ranks: int) -> None:
    write_passes(tmp_path, {0: "ttrt", 1: "tt"})
    spec = InputsSpec(inputs=tmp_path, shuffle_inputs=True, epochs=4, max_inputs=18 // num_data_ranks)
    rounds = zip(*(chosen.inputs for chosen in select_on_all_ranks(num_data_ranks, spec)), strict=True)
    dealt = [path for members in rounds for path in members]
    once = select(InputsSpec(inputs=tmp_path, shuffle_inputs=True), 0, 1).inputs
    assert len(once) == 5
    assert [sorted(dealt[i : i + 6]) for i in (0, 6, 12)] == [sorted((once * 4)[i : i + 6]) for i in (0, 6, 12)]


def test_an_epoch_repeats_the_order_and_reads_no_file_again(tmp_path: Path) -> None:
    paths = write_passes(tmp_path, {0: "rtt"})
    damage(paths[0][1])
    chosen = select(InputsSpec(inputs=tmp_path, epochs=3), 0, 1)
    assert chosen.inputs == [paths[0][2]] * 3
    assert (len(chosen.damaged), chosen.num_left_out_passes) == (1, 1)


def test_all_data_ranks_stop_at_the_shortest_and_the_rest_is_counted(tmp_path: Path) -> None:
    paths = write_passes(tmp_path, {0: "tttt", 1: "tt"})
    ranks = select_on_all_ranks(2, InputsSpec(inputs=tmp_path))
    assert [chosen.inputs for chosen in ranks] == [paths[0][:2], paths[1]]
    assert [chosen.num_left_over for chosen in ranks] == [2, 2]


def test_skipped_inputs_are_those_that_a_shorter_run_took(tmp_path: Path) -> None:
    write_passes(tmp_path, {0: "tttrttt", 1: "ttttt"})
    every = [chosen.inputs for chosen in select_on_all_ranks(2, InputsSpec(inputs=tmp_path))]
    skipping = select_on_all_ranks(2, InputsSpec(inputs=tmp_path, skip_inputs=3))
    assert [chosen.inputs for chosen in skipping] == [inputs[3:] for inputs in every]
    limited = select_on_all_ranks(2, InputsSpec(inputs=tmp_path, skip_inputs=1, max_inputs=2))
    assert [chosen.inputs for chosen in limited] == [inputs[1:3] for inputs in every]


def test_uneven_gives_each_data_rank_all_its_inputs(tmp_path: Path) -> None:
    paths = write_passes(tmp_path, {0: "tttt", 1: "tt"})
    ranks = select_on_all_ranks(2, InputsSpec(inputs=tmp_path, uneven=True))
    assert [chosen.inputs for chosen in ranks] == [paths[0], paths[1]]
    assert [chosen.num_left_over for chosen in ranks] == [0, 0]
    ranks = select_on_all_ranks(2, InputsSpec(inputs=tmp_path, uneven=True, max_inputs=3))
    assert [chosen.inputs for chosen in ranks] == [paths[0][:3], paths[1]]
    ranks = select_on_all_ranks(2, InputsSpec(inputs=tmp_path, uneven=True, skip_inputs=1, max_inputs=2))
    assert [chosen.inputs for chosen in ranks] == [paths[0][1:3], paths[1][1:]]
    ranks = select_on_all_ranks(4, InputsSpec(inputs=tmp_path, uneven=True))
    assert [len(chosen.inputs) for chosen in ranks] == [2, 2, 1, 1]


def test_uneven_changes_nothing_where_numbers_are_equal(tmp_path: Path) -> None:
    write_passes(tmp_path, {0: "trtt", 1: "ttrt"})
    for passes in Passes:
        even, uneven = (
            select_on_all_ranks(2, InputsSpec(inputs=tmp_path, passes=passes, uneven=u)) for u in (False, True)
        )
        assert uneven == even


def test_max_inputs_counts_on_each_data_rank(tmp_path: Path) -> None:
    paths = write_passes(tmp_path, {0: "tttt", 1: "tttt"})
    ranks = select_on_all_ranks(2, InputsSpec(inputs=tmp_path, max_inputs=3))
    assert [chosen.inputs for chosen in ranks] == [paths[0][:3], paths[1][:3]]
    assert [chosen.num_left_over for chosen in ranks] == [0, 0]


def test_at_one_time_all_data_ranks_replay_one_kind_of_pass(tmp_path: Path) -> None:
    kinds = {0: "rtrttr", 1: "trrttt"}
    trains = {
        path: kind == "t"
        for rank, paths in write_passes(tmp_path, kinds).items()
        for path, kind in zip(paths, kinds[rank], strict=True)
    }
    for shuffle in (False, True):
        ranks = select_on_all_ranks(2, InputsSpec(inputs=tmp_path, passes=Passes.ALL, shuffle_inputs=shuffle))
        assert [trains[p] for p in ranks[0].inputs] == [trains[p] for p in ranks[1].inputs]
        assert sum(len(chosen.inputs) for chosen in ranks) + ranks[0].num_left_over == 12


def test_shuffling_depends_on_the_seed_alone_and_deals_one_list_to_all(tmp_path: Path) -> None:
    every = write_passes(tmp_path, {0: "tttttt", 1: "tttttt"})
    expected = every[0] + every[1]
    random.Random(123).shuffle(expected)
    ranks = select_on_all_ranks(2, InputsSpec(inputs=tmp_path, shuffle_inputs=True, random_seed=123))
    assert ranks[0].inputs == expected[0::2]
    assert ranks[1].inputs == expected[1::2]
    other = select(InputsSpec(inputs=tmp_path, shuffle_inputs=True, random_seed=124), 0, 1)
    assert other.inputs != expected
    assert sorted(other.inputs) == sorted(expected)


def test_only_as_many_files_are_read_as_are_replayed(tmp_path: Path) -> None:
    [paths] = write_passes(tmp_path, {0: "rttttt"}).values()
    for path in paths[3:]:
        path.write_bytes(b"no capture")
    chosen = select(InputsSpec(inputs=tmp_path, max_inputs=2), 0, 1)
    assert (chosen.inputs, chosen.damaged) == (paths[1:3], [])
    # One more would have been noticed.
    assert len(select(InputsSpec(inputs=tmp_path, max_inputs=3), 0, 1).damaged) == 3


def test_a_damaged_file_is_named_and_the_others_are_chosen(tmp_path: Path) -> None:
    paths = write_passes(tmp_path, {0: "ttt"})
    damage(paths[0][1])
    chosen = select(InputsSpec(inputs=tmp_path), 0, 1)
    assert chosen.inputs == [paths[0][0], paths[0][2]]
    [(path, reason)] = chosen.damaged
    assert path == paths[0][1]
    assert "truncated" in reason


def test_a_folder_of_damaged_files_leaves_nothing_to_replay_but_their_names(tmp_path: Path) -> None:
    path = write_pass(tmp_path)
    damage(path)
    chosen = select(InputsSpec(inputs=tmp_path), 0, 1)
    assert chosen.inputs == []
    assert [path for path, _ in chosen.damaged] == [path]


@pytest.mark.parametrize(
    ("settings", "num_data_ranks", "is_whole"),
    [
        ({}, 1, True),
        ({}, 2, False),  # rank 0 has one input more than rank 1
        ({"uneven": True}, 2, True),
        ({"epochs": 2, "shuffle_inputs": True}, 1, True),
        ({"skip_inputs": 1}, 1, False),
        ({"max_inputs": 3}, 1, False),
        ({"pick_inputs": "0,2"}, 1, False),
    ],
)
def test_a_selection_is_whole_if_no_pass_of_the_job_is_left_out(
    settings: dict[str, Any], num_data_ranks: int, is_whole: bool, tmp_path: Path
) -> None:
    write_passes(tmp_path, {0: "ttrt", 1: "tt"})
    ranks = select_on_all_ranks(num_data_ranks, InputsSpec(inputs=tmp_path, **settings))
    assert [chosen.is_whole for chosen in ranks] == [is_whole] * num_data_ranks


@pytest.mark.parametrize(
    ("mask", "labels_first", "padding_predicts", "keeps"),
    [
        # Padding on the left, and the first real token has a label.
        ([0, 1, 1, 1], True, True, True),
        ([0, 1, 1, 1], True, False, False),
        ([0, 1, 1, 1], False, True, False),
        # Padding between two real tokens.
        ([1, 0, 1, 1], False, True, True),
        ([1, 0, 1, 1], False, False, True),
        ([1, 1, 1, 0], True, True, False),
    ],
)
def test_padding_is_kept_where_it_predicts_a_label_or_stands_between_tokens(
    mask: list[int], labels_first: bool, padding_predicts: bool, keeps: bool, tmp_path: Path
) -> None:
    ids_BS, mask_BS = torch.tensor([[3, 4, 5, 6]]), torch.tensor([mask]).bool()
    labels_BS = ids_BS.masked_fill(~mask_BS, -100)
    if not labels_first:
        labels_BS[0, mask.index(1)] = -100
    tensors = {"sequences": ids_BS, "attention_mask": mask_BS, "labels": labels_BS}
    write_call(tmp_path, tensors, {}, trains=True, origin=Origin(source="", rank=0, step=0))
    chosen = select(InputsSpec(inputs=tmp_path), 0, 1, loss=LossName.SFT, padding_predicts_label=padding_predicts)
    assert chosen.must_keep_padding is keeps


def test_neither_one_file_nor_a_folder_with_a_damaged_one_is_the_whole_job(tmp_path: Path) -> None:
    [paths] = write_passes(tmp_path, {0: "ttt"}).values()
    assert not select(InputsSpec(input_file=paths[0]), 0, 1).is_whole
    damage(paths[2])
    assert not select(InputsSpec(inputs=tmp_path), 0, 1).is_whole


def write_steps(folder: Path, sizes: list[int], num_ranks: int) -> list[list[list[Path]]]:
    """Write the passes of a job's steps, as many of each rank as `sizes` say; returns them by step and rank."""
    steps: list[list[list[Path]]] = []
    first = 0
    for number, size in enumerate(sizes):
        forwards = range(first, first + size)
        steps.append([])
        for rank in range(num_ranks):
            steps[-1].append([])
            for forward in forwards:
                unmarked = write_pass(folder, rank=rank, step=forward)
                step = OptimizerStep(number=number, passes=tuple(forwards), shares=(1.0,) * size)
                call = replace(
                    read_call(unmarked), optimizer_step=number, step=step if forward == forwards[-1] else None
                )
                unmarked.unlink()
                steps[-1][-1].append(call.write(folder))
        first += size
    return steps


@pytest.mark.parametrize("typed", [2, None])
def test_typed_windows_are_those_of_all_data_ranks_and_others_come_last(typed: int | None, tmp_path: Path) -> None:
    first, second, third = write_steps(tmp_path, [1, 2, 2], num_ranks=2)
    for rank in range(2):
        chosen = select(InputsSpec(inputs=tmp_path), rank, 2, grad_accumulation=typed)
        windows = [*second[rank], *third[rank]]
        assert chosen.inputs == ([*windows, *first[rank]] if typed else [*first[rank], *windows])
        assert (chosen.grad_accumulation, chosen.has_job_windows) == (2, typed is None)
        assert "each data rank what one rank captured" in chosen.dealing


@pytest.mark.parametrize(("number", "recording"), [(None, "b"), (1, "a"), (2, "b")])
def test_of_several_recordings_one_is_replayed_and_what_it_lacks_is_its_own(
    number: int | None, recording: str, tmp_path: Path
) -> None:
    paths = write_recordings(tmp_path, {"a": "ttr", "b": "ttr"})
    missing = {"a": {"given a cache": 3}, "b": {"given a cache": 1, "given embeddings": 2}}
    for name, numbers in missing.items():
        write_end(tmp_path, name, not_recorded=numbers)
    chosen = select(InputsSpec(inputs=tmp_path, recording=number), 0, 1)
    assert (chosen.inputs, chosen.not_recorded) == (paths[recording][:2], missing[recording])
    assert chosen.recording is not None
    assert (chosen.recording.number, chosen.recording.num_recordings) == ("ab".index(recording) + 1, 2)
    assert set(chosen.recording.ids) == {recording}
    assert (chosen.num_left_out_passes, chosen.is_whole) == (1, True)


def test_max_inputs_counts_the_epochs_of_one_input_file(tmp_path: Path) -> None:
    file = write_pass(tmp_path)
    spec = InputsSpec(input_file=file, epochs=5, skip_inputs=1, max_inputs=3)
    assert select(spec, 0, 1).inputs == [file] * 3


def test_one_input_file_is_replayed_on_every_data_rank(tmp_path: Path) -> None:
    path = write_pass(tmp_path)
    for chosen in select_on_all_ranks(2, InputsSpec(input_file=path)):
        assert chosen.inputs == [path]


def write_rollouts(folder: Path) -> None:
    write_passes(folder, {0: "rrr"})


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (InputsSpec(inputs=Path("nowhere")), "nowhere: no such folder. Try: replay"),
        (InputsSpec(inputs=Path("empty")), "empty holds no captures"),
        (InputsSpec(inputs=Path("above")), "but folders that do: below. Try: --inputs above/below"),
        (InputsSpec(inputs=Path("a_file.pkl")), "is a file. Try: replay --input-file a_file.pkl"),
        (InputsSpec(input_file=Path("empty")), "is a folder. Try: replay --inputs empty"),
        (InputsSpec(input_file=Path("empty/none.pkl")), "does not exist. Try: replay inspect empty"),
        (InputsSpec(inputs=Path("rollouts")), "no train pass, but 3 of kind rollout. Try: --passes rollout"),
    ],
)
def test_where_there_is_nothing_to_replay_one_line_says_what_to_type(
    spec: InputsSpec, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("a_file.pkl").touch()
    write_rollouts(Path("rollouts"))
    write_rollouts(Path("above/below"))
    with pytest.raises(UsageError) as refusal:
        select(spec, 0, 1)
    assert says in format_error_with_flags(refusal.value)


def test_fewer_inputs_than_data_ranks_are_refused(tmp_path: Path) -> None:
    write_passes(tmp_path, {0: "t"})
    with pytest.raises(UsageError, match="1 train input does not suffice for 2 data ranks"):
        select(InputsSpec(inputs=tmp_path), 0, 2)


@pytest.mark.parametrize(("packs", "order"), [(True, [1, 0, 2]), (False, [0, 2, 1])])
@pytest.mark.parametrize("most", [None, 2])
def test_worst_first_is_by_the_tokens_that_are_fed(
    packs: bool, order: list[int], most: int | None, tmp_path: Path
) -> None:
    sizes = [(50, 20), (30, 30), (40, 10)]  # row length, real tokens of a row
    paths = [write_pass(tmp_path, step=step, length=size, num_real=real) for step, (size, real) in enumerate(sizes)]
    chosen = select(InputsSpec(inputs=tmp_path, order=InputOrder.WORST, max_inputs=most), 0, 1, packs=packs)
    assert chosen.inputs == [paths[number] for number in order][:most]
    assert chosen.dealing == f"most {'real' if packs else 'padded'} tokens first"


@pytest.mark.parametrize("captured_by", [(0, 0, 0, 0), (0, 0, 1, 1)])
def test_worst_first_gives_data_ranks_inputs_of_like_size(captured_by: tuple[int, ...], tmp_path: Path) -> None:
    sizes = [5, 40, 7, 39]
    paths = [
        write_pass(tmp_path, rank=rank, step=step, length=50, num_real=real)
        for step, (rank, real) in enumerate(zip(captured_by, sizes, strict=True))
    ]
    ranks = select_on_all_ranks(2, InputsSpec(inputs=tmp_path, order=InputOrder.WORST))
    assert [chosen.inputs for chosen in ranks] == [[paths[1], paths[2]], [paths[3], paths[0]]]
    assert {chosen.dealing for chosen in ranks} == {"most real tokens first, dealt in turn to 2 data ranks"}


def test_picked_inputs_come_in_the_order_they_are_picked(tmp_path: Path) -> None:
    paths = write_passes(tmp_path, {0: "ttrt", 1: "ttt"})
    whole = select_on_all_ranks(2, InputsSpec(inputs=tmp_path))
    picked = select_on_all_ranks(2, InputsSpec(inputs=tmp_path, pick_inputs="2,0,2"))
    for chosen, every in zip(picked, whole, strict=True):
        assert chosen.inputs == [every.inputs[number] for number in (2, 0, 2)]
        assert len(chosen.rounds) == 3
    assert paths[0][3] in picked[0].inputs
    with pytest.raises(UsageError, match=r"^pick_inputs=3: each data rank has 3 inputs. Give numbers from 0 to 2$"):
        select(InputsSpec(inputs=tmp_path, pick_inputs="3"), 0, 2)
