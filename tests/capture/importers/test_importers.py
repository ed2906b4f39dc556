"""Dumps of slime, verl, SkyRL, ROLL and NeMo-RL as format 1, against rows written out by hand in `tests/foreign`.

verl's files were written by verl 0.9.1 (tensordict 0.15.3), SkyRL's by SkyRL 0.3.0, ROLL's by a class of its name and
state with a real tensordict; the scripts stand beside them. slime's (0.3.1, and main after it) and NeMo-RL's (0.7.0)
are made here, as their source says.
"""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
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
from tests.helpers.dumps import make_dump

FOREIGN = Path(__file__).resolve().parents[2] / "foreign"
ROWS = [
    [token for token, real in zip(ids, mask, strict=True) if real] for ids, mask in zip(IDS, ATTENTION, strict=True)
]
LENGTHS = [3, 2, 3]


def write_nemo_rl(path: Path) -> Path:
    """Write a row's values as lists of one value each: the logger slices the columns of a batch."""
    lines = []
    for number in range(3):
        tokens, length = ROWS[number], LENGTHS[number]
        num_prompt, num_padding = len(tokens) - length, 6 - len(tokens)
        row = {
            "content": ["a text"],
            "rewards": [0.5 * number],
            "input_lengths": [len(tokens)],
            "token_ids": [tokens + [0] * num_padding],
            "token_loss_mask": [[0] * num_prompt + ACTIONS[number][:length] + [0] * num_padding],
            "sample_loss_mask": [float(number != 1)],
            "advantages": [[0.0] * num_prompt + ADVANTAGES[number][:length] + [0.0] * num_padding],
            "prev_logprobs": [[0.0] * num_prompt + LOG_PROBS[number][:length] + [0.0] * num_padding],
        }
        lines.append(json.dumps({**row, "idx": number}))
    path.write_text("\n".join(lines) + "\n")
    return path


def make_slime_sample(number: int) -> dict[str, Any]:
    length = LENGTHS[number]
    return {
        "tokens": torch.tensor(ROWS[number]),
        "total_lengths": len(ROWS[number]),
        "response_lengths": length,
        "loss_masks": torch.tensor(ACTIONS[number][:length], dtype=torch.int32),
        "log_probs": torch.tensor(LOG_PROBS[number][:length]),
        "rollout_log_probs": LOG_PROBS[number][:length],
        "rewards": 0.5 * number,
        "rollout_routed_experts": torch.zeros(4, 2, 2),
        "metadata": {"a": "text"},
    }


def write_slime_rank(path: Path) -> Path:
    """Write one rank's columns, as slime did up to 0.3.1."""
    samples = [make_slime_sample(number) for number in range(3)]
    columns: dict[str, Any] = {name: [sample[name] for sample in samples] for name in samples[0]}
    layout = {"partition": [4, 9, 2], "micro_batch_indices": [[0, 2], [1]], "num_microbatches": [2], "raw_reward": 1.5}
    torch.save({"rollout_id": STEP, "rank": 5, "rollout_data": columns | layout}, path)
    return path


def write_slime_ranks(path: Path) -> Path:
    """Write the samples of two ranks, sorted by their position in the rollout, as slime does after 0.3.1.

    Rank 0 had samples 2 and 0, rank 4 had sample 1.
    """
    data_ranks = {0: 0, 1: 1, 2: 0}
    samples = [
        {
            "data_parallel_rank": data_ranks[number],
            "rollout_position": position,
            "sample_index": None,
            **make_slime_sample(number),
        }
        for position, number in ((3, 0), (5, 1), (8, 2))
    ]
    shards = [
        {"rank": 0, "data_parallel_rank": 0, "partition": [8, 3], "micro_batch_indices": [[0], [1]], "seed": 3},
        {"rank": 4, "data_parallel_rank": 1, "partition": [5], "micro_batch_indices": [[0]]},
    ]
    whole = {"format_version": 2, "rollout_id": STEP, "rank": 0, "samples": samples, "dp_shards": shards}
    torch.save(whole | {"raw_reward": [0.0, 0.5, 1.0]}, path)
    return path


def write_slime_rollout(path: Path) -> Path:
    samples = [
        {
            "tokens": ROWS[number],
            "response_length": LENGTHS[number],
            "loss_mask": None,
            "prompt": "why?",
            "reward": {"x": 1},
            "status": "completed",
        }
        for number in range(3)
    ]
    torch.save({"rollout_id": STEP, "samples": samples}, path)
    return path


def copy_of(name: str) -> Callable[[Path], Path]:
    """Return a function that copies a file of `tests/foreign` to a path."""
    return lambda path: Path(shutil.copy(FOREIGN / name, path))


FORMATS: dict[str, tuple[str, str, Callable[[Path], Path]]] = {
    "verl": ("verl", "gen_batch.dp", copy_of("verl_0.9.1.dp")),
    "verl, by NumPy": ("verl", "gen_batch.dp", copy_of("verl_0.9.1_numpy.dp")),
    "ROLL": ("roll", "step_000007.pkl", copy_of("roll_0.3.0.pkl")),
    "SkyRL": ("skyrl", "global_step_7_training_input.pkl", copy_of("skyrl_0.3.0.pkl")),
    "NeMo-RL": ("nemo-rl", "train_data_step7.jsonl", write_nemo_rl),
    "slime, a rank": ("slime", "7_5.pt", write_slime_rank),
    "slime, all": ("slime", "7.pt", write_slime_ranks),
    "slime, rollout": ("slime", "7.pt", write_slime_rollout),
}


def convert(what: str, folder: Path, **settings: Any) -> list[MicroBatch]:
    _, name, write = FORMATS[what]
    write(folder / name)
    assert convert_folder(folder / name, folder / "out", **settings).refused == {}
    return [read_micro_batch(path) for path in capture_files(folder / "out")]


def select_actions(batch: MicroBatch) -> list[list[int]]:
    """Return for each row the tokens that the action mask marks."""
    assert batch.action_mask_BA is not None
    last_BA = batch.sequences_BS[:, -batch.action_mask_BA.shape[1] :]
    return [row[mask].tolist() for row, mask in zip(last_BA, batch.action_mask_BA, strict=True)]


@pytest.mark.parametrize("what", ["verl", "verl, by NumPy", "ROLL", "SkyRL"])
def test_a_padded_batch_comes_over_as_it_is(what: str, tmp_path: Path) -> None:
    (batch,) = convert(what, tmp_path)
    assert batch.sequences_BS.tolist() == IDS
    assert batch.attention_mask_BS.long().tolist() == ATTENTION
    assert select_actions(batch) == [[13, 14, 15], [24, 25], [33, 35]]
    assert batch.trains
    log_probs, advantages = ("action_log_probs" if what == "SkyRL" else "old_log_probs"), "advantages"
    assert batch.extra_tensors[log_probs].tolist() == LOG_PROBS
    assert batch.extra_tensors[advantages].dtype == torch.bfloat16
    assert batch.extra_tensors[advantages].tolist() == ADVANTAGES
    assert batch.call_facts["training_step"] == STEP
    assert batch.call_facts["imported_from"] == what.partition(",")[0]


@pytest.mark.parametrize("what", ["verl", "verl, by NumPy", "ROLL"])
def test_the_other_columns_of_a_data_proto_are_kept_or_named(what: str, tmp_path: Path) -> None:
    (batch,) = convert(what, tmp_path)
    assert batch.extra_tensors["position_ids"].tolist() == POSITIONS
    assert batch.extra_tensors["score"].tolist() == [0.5, 0.0, 1.0]
    assert (batch.call_facts["temperature"], batch.call_facts["mean"]) == (0.75, 0.5)
    assert set(batch.left_out) == {"uid", "raw_prompt", "eos_token_id", "prompts", "responses"}


def test_without_a_mask_of_its_own_a_batch_of_verl_counts_the_real_tokens_of_its_responses(tmp_path: Path) -> None:
    data = (FOREIGN / "verl_0.9.1_numpy.dp").read_bytes()
    assert data.count(b"response_mask") == 1
    (tmp_path / "gen_batch.dp").write_bytes(data.replace(b"response_mask", b"another__mask"))
    assert convert_folder(tmp_path / "gen_batch.dp", tmp_path / "out").refused == {}
    [path] = capture_files(tmp_path / "out")
    assert select_actions(read_micro_batch(path)) == [[13, 14, 15], [24, 25], [33, 34, 35]]


def test_the_responses_of_verl_are_the_last_tokens_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the other dumps half of each row is a response."""
    protocol: Any = ModuleType("verl.protocol")
    protocol.DataProto = type("DataProto", (), {"__module__": "verl.protocol", "__getstate__": lambda self: self.state})
    for name in ("verl", "verl.protocol"):
        monkeypatch.setitem(sys.modules, name, protocol)
    tensors = {"input_ids": [[1, 2, 3, 4, 5]], "attention_mask": [[0, 1, 1, 1, 1]], "responses": [[5]]}
    columns = {name: torch.tensor(values) for name, values in tensors.items()}
    dump = protocol.DataProto()
    arrays = {name: ("int64", value.shape, value.numpy().reshape(-1).view("uint8")) for name, value in columns.items()}
    dump.state = ((1,), None, arrays), {}, {}
    (tmp_path / "gen_batch.dp").write_bytes(pickle.dumps(dump))
    assert convert_folder(tmp_path / "gen_batch.dp", tmp_path / "out").refused == {}
    [path] = capture_files(tmp_path / "out")
    assert select_actions(read_micro_batch(path)) == [[5]]


def test_what_of_skyrl_is_no_tensor_is_named(tmp_path: Path) -> None:
    (batch,) = convert("SkyRL", tmp_path)
    assert batch.left_out == {"pixel_values": "a list of tensors", "uids": "list"}
    assert batch.call_facts["response_length"] == 3


def test_json_lines_become_rows(tmp_path: Path) -> None:
    (batch,) = convert("NeMo-RL", tmp_path)
    real = [row[mask].tolist() for row, mask in zip(batch.sequences_BS, batch.attention_mask_BS, strict=True)]
    assert real == ROWS
    # Row 1 is taken out by its sample_loss_mask.
    assert select_actions(batch) == [[13, 14, 15], [], [33, 35]]
    assert batch.extra_tensors["prev_logprobs"][0].tolist() == [0, 0, -0.5, -1.5, -0.25, 0]
    assert batch.extra_tensors["rewards"].tolist() == [0.0, 0.5, 1.0]
    assert batch.call_facts["training_step"] == STEP
    assert batch.left_out == {"content": "a text"}


def test_what_only_some_lines_have_as_numbers_is_named_and_left_out(tmp_path: Path) -> None:
    path = write_nemo_rl(tmp_path / "train_data_step7.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["mixed"] = [1.0] if number else ["a text"]
        line["late"] = [[1.0] * 6] if number == 2 else ["a text"]
        line["short"] = {} if number else {"short": 1}
        line["whole"] = number
        if number != 1:
            line["missing"] = [0.5]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert convert_folder(path, tmp_path / "out").refused == {}
    batch = read_micro_batch(capture_files(tmp_path / "out")[0])
    assert batch.left_out == {
        "content": "a text",
        "mixed": "numbers in some rows only",
        "late": "numbers in some rows only",
        "missing": "numbers in some rows only",
        "short": "dict",
    }
    assert batch.extra_tensors["whole"].tolist() == [0.0, 1.0, 2.0]
    assert batch.extra_tensors.keys().isdisjoint(batch.left_out)


def test_a_slime_rank_keeps_its_micro_batches(tmp_path: Path) -> None:
    first, second = convert("slime, a rank", tmp_path)
    assert first.sequences_BS.tolist() == [[11, 12, 13, 14, 15], [0, 32, 33, 34, 35]]
    assert first.attention_mask_BS.tolist() == [[True] * 5, [False] + [True] * 4]
    assert select_actions(first) == [[13, 14, 15], [33, 35]]
    assert select_actions(second) == [[24, 25]]
    for name in ("log_probs", "rollout_log_probs"):
        assert first.extra_tensors[name].tolist() == [LOG_PROBS[0], LOG_PROBS[2]]
    assert first.extra_tensors["rewards"].tolist() == [0.0, 1.0]
    assert (first.origin.rank, first.origin.step, second.origin.step) == (5, 0, 1)
    assert first.call_facts["training_step"] == STEP
    assert set(first.left_out) == {"metadata", "rollout_routed_experts", "raw_reward"}


def test_slime_samples_go_back_to_their_ranks_in_order(tmp_path: Path) -> None:
    batches = convert("slime, all", tmp_path)
    assert [(batch.origin.rank, batch.origin.step) for batch in batches] == [(0, 0), (0, 1), (4, 0)]
    assert [select_actions(batch) for batch in batches] == [[[33, 35]], [[13, 14, 15]], [[24, 25]]]
    of_samples = {"metadata", "rollout_routed_experts", "sample_index"}
    # What belongs to no sample is named too: of the whole dump, and of the rank.
    assert [set(batch.left_out) - of_samples for batch in batches] == [
        {"raw_reward", "seed"},
        {"raw_reward", "seed"},
        {"raw_reward"},
    ]


def test_a_slime_rollout_counts_every_token_of_a_response(tmp_path: Path) -> None:
    (batch,) = convert("slime, rollout", tmp_path)
    assert select_actions(batch) == [[13, 14, 15], [24, 25], [33, 34, 35]]
    assert set(batch.left_out) == {"loss_mask", "prompt", "reward", "status"}


@pytest.mark.parametrize("what", FORMATS)
def test_rows_say_how_many_make_a_micro_batch(what: str, tmp_path: Path) -> None:
    batches = convert(what, tmp_path, num_rows=2)
    assert sorted(batch.num_rows for batch in batches) == [1, 2]
    (tmp_path / "whole").mkdir()
    whole = convert(what, tmp_path / "whole", num_rows=3)
    cut_rows = [row for batch in batches for row in select_actions(batch)]
    assert sorted(cut_rows) == sorted(row for batch in whole for row in select_actions(batch))


def test_a_folder_is_read_by_number_and_counts_on(tmp_path: Path) -> None:
    for step in (10, 9):
        (tmp_path / "in" / str(step)).mkdir(parents=True)
        write_nemo_rl(tmp_path / "in" / f"train_data_step{step}.jsonl")
    shutil.copy(FOREIGN / "verl_0.9.1.dp", tmp_path / "in" / "10" / "gen_batch.dp")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    calls = [read_call(path) for path in capture_files(tmp_path / "out")]
    assert [(call.call_facts["training_step"], call.origin.step) for call in calls] == [(STEP, 0), (9, 1), (10, 2)]
    assert main(["check", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("what", FORMATS)
def test_what_was_converted_replays(what: str, tmp_path: Path, one_world: None) -> None:
    convert(what, tmp_path)
    arguments = ["--inputs", str(tmp_path / "out"), "--model", str(write_tiny_model(tmp_path)), "--random-weights"]
    assert replay_main([*arguments, "--quiet", "--log-folder", str(tmp_path / "logs")]) == 0
    (report,) = (tmp_path / "logs").rglob("rank0.jsonl")
    losses = [json.loads(line)["loss"] for line in report.read_text().splitlines()]
    assert len(losses) == len(capture_files(tmp_path / "out"))
    assert all(loss > 0 for loss in losses)


def write_tiny_model(folder: Path) -> Path:
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
    project, name, write = FORMATS[what]
    write(tmp_path / name)
    assert main(["convert", "--from", project, str(tmp_path / name), str(tmp_path / "out")]) == 0
    for other in IMPORTERS:
        if other != project:
            assert main(["convert", "--from", other, str(tmp_path / name), str(tmp_path / other)]) == 1
            assert f"refused    {name}" in capsys.readouterr().out


def test_dumps_of_openrlhf_are_still_told(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(make_dump(), protocol=4))
    assert main(["convert", str(tmp_path / "a.pkl"), str(tmp_path / "out")]) == 0
    assert len(capture_files(tmp_path / "out")) == 1


def test_what_cannot_be_told_lists_what_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pkl").write_text("a text")
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "--from with one of slime, nemo-rl, verl, roll, skyrl, openrlhf" in capsys.readouterr().out
    assert main(["convert", "--from", "trl", str(tmp_path), str(tmp_path / "other")]) == 2
    allowed = "Give one of slime, nemo-rl, verl, roll, skyrl, openrlhf"
    assert capsys.readouterr().err == f"capture: --from trl is not known. {allowed}\n"


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
    path = write_nemo_rl(tmp_path / "train_data_step7.jsonl")
    lines = path.read_text().splitlines()
    row = {name: value for name, value in (json.loads(lines[2]) | change).items() if value is not None}
    path.write_text("\n".join([*lines[:2], json.dumps(row)]))
    (reason,) = convert_folder(path, tmp_path / "out").refused.values()
    assert message in str(reason)


@pytest.mark.parametrize(
    ("indices", "message"),
    [([[0, 1]], "each of 3 samples once"), ([[0], [1], [2, 2]], "each of 3"), ([[0.0]], "lists of integers")],
)
def test_micro_batches_that_are_none_are_refused(indices: Any, message: str, tmp_path: Path) -> None:
    path = write_slime_rank(tmp_path / "7_5.pt")
    saved = torch.load(path, weights_only=True)
    saved["rollout_data"]["micro_batch_indices"] = indices
    torch.save(saved, path)
    (reason,) = convert_folder(path, tmp_path / "out").refused.values()
    assert message in str(reason)


def test_a_batch_that_is_too_large_says_how_many_rows_to_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capture.importers.dump_rows.MAX_TENSOR_BYTES", 500)
    shutil.copy(FOREIGN / "verl_0.9.1.dp", tmp_path)
    (reason,) = convert_folder(tmp_path, tmp_path / "out").refused.values()
    assert "Try: rows=1" in str(reason)
    assert convert_folder(tmp_path / "verl_0.9.1.dp", tmp_path / "new", num_rows=1).refused == {}


def test_log_probs_that_are_not_a_number_come_over(tmp_path: Path) -> None:
    sample = make_slime_sample(0) | {"log_probs": torch.tensor([float("nan"), float("-inf"), 0.0])}
    torch.save({"rollout_id": 1, "samples": [sample]}, tmp_path / "1.pt")
    assert convert_folder(tmp_path, tmp_path / "out").num_written == 1
    [path] = capture_files(tmp_path / "out")
    log_probs_BA = read_micro_batch(path).extra_tensors["log_probs"]
    assert log_probs_BA[0].isnan().tolist() == [True, False, False]
    assert log_probs_BA[0, 1] == float("-inf")


def test_no_truncated_dump_is_read(tmp_path: Path) -> None:
    for project, name, write in FORMATS.values():
        size = write(tmp_path / name).stat().st_size
        # The longest is two bytes shorter: without its last newline a file is still whole.
        for length in [size - 2, *range(7 * ((size - 2) // 7), -1, -7)]:
            os.truncate(tmp_path / name, length)
            with pytest.raises(CaptureError):
                list(read_dump(tmp_path / name, name, IMPORTERS[project], None))
