"""Dumps of slime, verl, SkyRL, ROLL and NeMo-RL as format 1, against rows written out by hand in `tests/foreign`.

verl's files were written by verl 0.9.1 (tensordict 0.15.3), SkyRL's by SkyRL 0.3.0, ROLL's by a class of its name and
state with a real tensordict; the scripts stand beside them. slime's (0.3.1, and main after it) and NeMo-RL's (0.7.0)
are made here, as their source says.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from capture import CaptureError, MicroBatch, capture_files, read_micro_batch
from capture.cli import main
from capture.file_format.capture_file import read_call
from capture.folder_tools.convert import convert_folder
from capture.importers import IMPORTERS, read_dump
from replay.command_line.cli import main as replay_main
from tests.foreign.expected import ACTIONS, ADVANTAGES, ATTENTION, IDS, LOG_PROBS, POSITIONS, STEP
from tests.helpers.dumps import a_dump

FOREIGN = Path(__file__).resolve().parents[2] / "foreign"
ROWS = [
    [token for token, real in zip(ids, mask, strict=True) if real] for ids, mask in zip(IDS, ATTENTION, strict=True)
]
LENGTHS = [3, 2, 3]


def nemo_rl(path: Path) -> Path:
    """A row's values as lists of one: the logger slices the columns of a batch."""
    lines = []
    for i in range(3):
        real = ROWS[i] + [0] * (6 - len(ROWS[i]))
        first = len(ROWS[i]) - LENGTHS[i]
        after = 6 - len(ROWS[i])
        row = {
            "content": ["a text"],
            "rewards": [0.5 * i],
            "input_lengths": [len(ROWS[i])],
            "token_ids": [real],
            "token_loss_mask": [[0] * first + ACTIONS[i][: LENGTHS[i]] + [0] * after],
            "sample_loss_mask": [float(i != 1)],
            "advantages": [[0.0] * first + ADVANTAGES[i][: LENGTHS[i]] + [0.0] * after],
            "prev_logprobs": [[0.0] * first + LOG_PROBS[i][: LENGTHS[i]] + [0.0] * after],
        }
        lines.append(json.dumps({**row, "idx": i}))
    path.write_text("\n".join(lines) + "\n")
    return path


def slime_sample(i: int) -> dict[str, Any]:
    return {
        "tokens": torch.tensor(ROWS[i]),
        "total_lengths": len(ROWS[i]),
        "response_lengths": LENGTHS[i],
        "loss_masks": torch.tensor(ACTIONS[i][: LENGTHS[i]], dtype=torch.int32),
        "log_probs": torch.tensor(LOG_PROBS[i][: LENGTHS[i]]),
        "rollout_log_probs": LOG_PROBS[i][: LENGTHS[i]],
        "rewards": 0.5 * i,
        "rollout_routed_experts": torch.zeros(4, 2, 2),
        "metadata": {"a": "text"},
    }


def slime_rank(path: Path) -> Path:
    """Up to 0.3.1: one rank's columns."""
    samples = [slime_sample(i) for i in range(3)]
    columns: dict[str, Any] = {name: [sample[name] for sample in samples] for name in samples[0]}
    layout = {"partition": [4, 9, 2], "micro_batch_indices": [[0, 2], [1]], "num_microbatches": [2], "raw_reward": 1.5}
    torch.save({"rollout_id": STEP, "rank": 5, "rollout_data": columns | layout}, path)
    return path


def slime_all(path: Path) -> Path:
    """After 0.3.1: two ranks, samples sorted by their place in the rollout. Rank 0 had 2 and 0, rank 4 had 1."""
    of_rank = {0: 0, 1: 1, 2: 0}
    samples = [
        {"data_parallel_rank": of_rank[i], "rollout_position": place, "sample_index": None, **slime_sample(i)}
        for place, i in ((3, 0), (5, 1), (8, 2))
    ]
    shards = [
        {"rank": 0, "data_parallel_rank": 0, "partition": [8, 3], "micro_batch_indices": [[0], [1]]},
        {"rank": 4, "data_parallel_rank": 1, "partition": [5], "micro_batch_indices": [[0]]},
    ]
    whole = {"format_version": 2, "rollout_id": STEP, "rank": 0, "samples": samples, "dp_shards": shards}
    torch.save(whole | {"raw_reward": [0.0, 0.5, 1.0]}, path)
    return path


def slime_rollout(path: Path) -> Path:
    samples = [
        {
            "tokens": ROWS[i],
            "response_length": LENGTHS[i],
            "loss_mask": None,
            "prompt": "why?",
            "reward": {"x": 1},
            "status": "completed",
        }
        for i in range(3)
    ]
    torch.save({"rollout_id": STEP, "samples": samples}, path)
    return path


def copied(name: str) -> Callable[[Path], Path]:
    return lambda path: Path(shutil.copy(FOREIGN / name, path))


FORMATS: dict[str, tuple[str, str, Callable[[Path], Path]]] = {
    "verl": ("verl", "gen_batch.dp", copied("verl_0.9.1.dp")),
    "verl, by NumPy": ("verl", "gen_batch.dp", copied("verl_0.9.1_numpy.dp")),
    "ROLL": ("roll", "step_000007.pkl", copied("roll_0.3.0.pkl")),
    "SkyRL": ("skyrl", "global_step_7_training_input.pkl", copied("skyrl_0.3.0.pkl")),
    "NeMo-RL": ("nemo-rl", "train_data_step7.jsonl", nemo_rl),
    "slime, a rank": ("slime", "7_5.pt", slime_rank),
    "slime, all": ("slime", "7.pt", slime_all),
    "slime, rollout": ("slime", "7.pt", slime_rollout),
}


def converted(what: str, folder: Path, **settings: Any) -> list[MicroBatch]:
    _, name, make = FORMATS[what]
    make(folder / name)
    done = convert_folder(folder / name, folder / "out", **settings)
    assert done.refused == {}
    return [read_micro_batch(path) for path in capture_files(folder / "out")]


def actions_of(batch: MicroBatch) -> list[list[int]]:
    """Per row the tokens that the action mask marks."""
    assert batch.action_mask_BA is not None
    last_BA = batch.sequences_BS[:, -batch.action_mask_BA.shape[1] :]
    return [row[mask].tolist() for row, mask in zip(last_BA, batch.action_mask_BA, strict=True)]


@pytest.mark.parametrize("what", ["verl", "verl, by NumPy", "ROLL", "SkyRL"])
def test_a_padded_batch_comes_over_as_it_is(what: str, tmp_path: Path) -> None:
    (batch,) = converted(what, tmp_path)
    assert batch.sequences_BS.tolist() == IDS
    assert batch.attention_mask_BS.long().tolist() == ATTENTION
    assert actions_of(batch) == [[13, 14, 15], [24, 25], [33, 35]]
    assert batch.trains
    log_probs, advantages = ("action_log_probs" if what == "SkyRL" else "old_log_probs"), "advantages"
    assert batch.extra_tensors[log_probs].tolist() == LOG_PROBS
    assert batch.extra_tensors[advantages].dtype == torch.bfloat16
    assert batch.extra_tensors[advantages].tolist() == ADVANTAGES
    assert batch.call_facts["training_step"] == STEP
    assert batch.call_facts["imported_from"] == what.partition(",")[0]


@pytest.mark.parametrize("what", ["verl", "verl, by NumPy", "ROLL"])
def test_the_other_columns_of_a_data_proto_are_kept_or_named(what: str, tmp_path: Path) -> None:
    (batch,) = converted(what, tmp_path)
    assert batch.extra_tensors["position_ids"].tolist() == POSITIONS
    assert batch.extra_tensors["score"].tolist() == [0.5, 0.0, 1.0]
    assert (batch.call_facts["temperature"], batch.call_facts["mean"]) == (0.75, 0.5)
    assert set(batch.left_out) == {"uid", "raw_prompt", "eos_token_id", "prompts", "responses"}


def test_what_of_skyrl_is_no_tensor_is_named(tmp_path: Path) -> None:
    (batch,) = converted("SkyRL", tmp_path)
    assert batch.left_out == {"pixel_values": "a list of tensors", "uids": "list"}
    assert batch.call_facts["response_length"] == 3


def test_json_lines_become_rows(tmp_path: Path) -> None:
    (batch,) = converted("NeMo-RL", tmp_path)
    real = [row[mask].tolist() for row, mask in zip(batch.sequences_BS, batch.attention_mask_BS, strict=True)]
    assert real == ROWS
    assert actions_of(batch) == [[13, 14, 15], [], [33, 35]]  # row 1 is taken out by its sample_loss_mask
    assert batch.extra_tensors["prev_logprobs"][0].tolist() == [0, 0, -0.5, -1.5, -0.25, 0]
    assert batch.extra_tensors["rewards"].tolist() == [0.0, 0.5, 1.0]
    assert batch.call_facts["training_step"] == STEP
    assert batch.left_out == {"content": "a text"}


def test_a_slime_rank_keeps_its_micro_batches(tmp_path: Path) -> None:
    first, second = converted("slime, a rank", tmp_path)
    assert first.sequences_BS.tolist() == [[11, 12, 13, 14, 15], [0, 32, 33, 34, 35]]
    assert first.attention_mask_BS.tolist() == [[True] * 5, [False] + [True] * 4]
    assert actions_of(first) == [[13, 14, 15], [33, 35]]
    assert actions_of(second) == [[24, 25]]
    for name in ("log_probs", "rollout_log_probs"):
        assert first.extra_tensors[name].tolist() == [LOG_PROBS[0], LOG_PROBS[2]]
    assert first.extra_tensors["rewards"].tolist() == [0.0, 1.0]
    assert (first.origin.rank, first.origin.step, second.origin.step) == (5, 0, 1)
    assert first.call_facts["training_step"] == STEP
    assert set(first.left_out) == {"metadata", "rollout_routed_experts", "raw_reward"}


def test_slime_samples_go_back_to_their_ranks_in_order(tmp_path: Path) -> None:
    batches = converted("slime, all", tmp_path)
    assert [(batch.origin.rank, batch.origin.step) for batch in batches] == [(0, 0), (0, 1), (4, 0)]
    assert [actions_of(batch) for batch in batches] == [[[33, 35]], [[13, 14, 15]], [[24, 25]]]


def test_a_slime_rollout_counts_every_token_of_a_response(tmp_path: Path) -> None:
    (batch,) = converted("slime, rollout", tmp_path)
    assert actions_of(batch) == [[13, 14, 15], [24, 25], [33, 34, 35]]
    assert set(batch.left_out) == {"loss_mask", "prompt", "reward", "status"}


@pytest.mark.parametrize("what", FORMATS)
def test_rows_say_how_many_make_a_micro_batch(what: str, tmp_path: Path) -> None:
    batches = converted(what, tmp_path, num_rows=2)
    assert sorted(batch.num_rows for batch in batches) == [1, 2]
    (tmp_path / "whole").mkdir()
    whole = converted(what, tmp_path / "whole", num_rows=3)
    cut, uncut = ([row for batch in some for row in actions_of(batch)] for some in (batches, whole))
    assert sorted(cut) == sorted(uncut)


def test_a_folder_is_read_by_number_and_counts_on(tmp_path: Path) -> None:
    for step in (10, 9):
        (tmp_path / "in" / str(step)).mkdir(parents=True)
        nemo_rl(tmp_path / "in" / f"train_data_step{step}.jsonl")
    shutil.copy(FOREIGN / "verl_0.9.1.dp", tmp_path / "in" / "10" / "gen_batch.dp")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    calls = [read_call(path) for path in capture_files(tmp_path / "out")]
    assert [(call.call_facts["training_step"], call.origin.step) for call in calls] == [(STEP, 0), (9, 1), (10, 2)]
    assert main(["check", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("what", FORMATS)
def test_what_was_converted_replays(what: str, tmp_path: Path, one_world: None) -> None:
    converted(what, tmp_path)
    arguments = ["--inputs", str(tmp_path / "out"), "--model", str(tiny_model(tmp_path)), "--random-weights"]
    assert replay_main([*arguments, "--quiet", "--log-folder", str(tmp_path / "logs")]) == 0
    (report,) = (tmp_path / "logs").rglob("rank0.jsonl")
    losses = [json.loads(line)["loss"] for line in report.read_text().splitlines()]
    assert len(losses) == len(capture_files(tmp_path / "out"))
    assert all(loss > 0 for loss in losses)


def tiny_model(folder: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 64,
    }
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return folder / "model"


@pytest.mark.parametrize("what", FORMATS)
def test_whose_a_dump_is_can_be_said(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project, name, make = FORMATS[what]
    make(tmp_path / name)
    assert main(["convert", "--from", project, str(tmp_path / name), str(tmp_path / "out")]) == 0
    for other in IMPORTERS:
        if other != project:
            assert main(["convert", "--from", other, str(tmp_path / name), str(tmp_path / other)]) == 1
            assert f"refused    {name}" in capsys.readouterr().out


def test_dumps_of_openrlhf_are_still_told(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(a_dump(), protocol=4))
    assert main(["convert", str(tmp_path / "a.pkl"), str(tmp_path / "out")]) == 0
    assert len(capture_files(tmp_path / "out")) == 1


def test_what_cannot_be_told_lists_what_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pkl").write_text("a text")
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "--from with one of slime, nemo-rl, verl, roll, skyrl, openrlhf" in capsys.readouterr().out
    with pytest.raises(SystemExit) as wrong:
        main(["convert", "--from", "trl", str(tmp_path), str(tmp_path / "other")])
    assert wrong.value.code == 2
    assert "choose from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": None}, "no token_ids"),
        ({"token_ids": [[1, 2]]}, "not as long in every row"),
        ({"token_loss_mask": [[1] * 6]}, "no row's first token"),
        ({"token_loss_mask": [[0] * 5 + [2]]}, "only 0 and 1"),
        ({"token_ids": [[-1] * 6]}, "token id -1 is negative"),
        ({"token_ids": [["a"] * 6]}, "no token_ids"),
    ],
    ids=str,
)
def test_lines_that_do_not_fit_together_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = nemo_rl(tmp_path / "train_data_step7.jsonl")
    lines = path.read_text().splitlines()
    row = {name: value for name, value in (json.loads(lines[2]) | change).items() if value is not None}
    path.write_text("\n".join([*lines[:2], json.dumps(row)]))
    (reason,) = convert_folder(path, tmp_path / "out").refused.values()
    assert message in str(reason)


@pytest.mark.parametrize(
    ("groups", "message"),
    [([[0, 1]], "each of 3 samples once"), ([[0], [1], [2, 2]], "each of 3"), ([[0.0]], "lists of integers")],
)
def test_micro_batches_that_are_none_are_refused(groups: Any, message: str, tmp_path: Path) -> None:
    path = slime_rank(tmp_path / "7_5.pt")
    saved = torch.load(path, weights_only=True)
    saved["rollout_data"]["micro_batch_indices"] = groups
    torch.save(saved, path)
    (reason,) = convert_folder(path, tmp_path / "out").refused.values()
    assert message in str(reason)


def test_a_batch_that_is_too_large_says_how_many_rows_to_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capture.importers.rows.MAX_TENSOR_BYTES", 500)
    shutil.copy(FOREIGN / "verl_0.9.1.dp", tmp_path)
    (reason,) = convert_folder(tmp_path, tmp_path / "out").refused.values()
    assert "Try: rows=1" in str(reason)
    assert convert_folder(tmp_path / "verl_0.9.1.dp", tmp_path / "new", num_rows=1).refused == {}


def test_log_probs_that_are_not_a_number_come_over(tmp_path: Path) -> None:
    sample = slime_sample(0) | {"log_probs": torch.tensor([float("nan"), float("-inf"), 0.0])}
    torch.save({"rollout_id": 1, "samples": [sample]}, tmp_path / "1.pt")
    assert convert_folder(tmp_path, tmp_path / "out").num_written == 1
    [done] = capture_files(tmp_path / "out")
    found = read_micro_batch(done).extra_tensors["log_probs"]
    assert found[0].isnan().tolist() == [True, False, False]
    assert found[0, 1] == float("-inf")


def test_no_truncated_dump_is_read(tmp_path: Path) -> None:
    for project, name, make in FORMATS.values():
        size = make(tmp_path / name).stat().st_size
        for length in [size - 2, *range(7 * ((size - 2) // 7), -1, -7)]:  # a last newline is no loss
            os.truncate(tmp_path / name, length)
            with pytest.raises(CaptureError):
                list(read_dump(tmp_path / name, name, IMPORTERS[project], None))
