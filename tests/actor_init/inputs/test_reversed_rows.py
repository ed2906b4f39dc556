"""Rows in reverse: the model is fed a micro-batch's last row first, and the log tells rows in the captured order."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actor_init.inputs.packing import prepare_inputs
from actor_init.spec import UsageError
from capture.file_format.capture_file import read_micro_batch
from capture.file_format.micro_batch import with_rows_reversed
from replay.options.spec import InputsSpec, MeasureSpec, ReplaySpec, find_sample_folder
from replay.runlog.records import PassRecord
from tests.helpers.children import run_with
from tests.helpers.made_captures import write_pass
from tests.helpers.read_logs import read_log


def replay(tmp_path: Path, name: str, *, reverse_rows: bool = False) -> list[PassRecord]:
    common = ["--input-file", str(next((tmp_path / "in").glob("*.pkl")))]
    typed = [*common, "--dtype", "fp32", "--quiet", "--log-folder", str(tmp_path / name)]
    assert run_with(typed, reverse_rows=reverse_rows) == 0
    return read_log(next((tmp_path / name).iterdir()))[1]


def test_what_belongs_to_a_row_goes_along_and_what_all_share_stays(tmp_path: Path) -> None:
    batch = read_micro_batch(write_pass(tmp_path, num_rows=3, num_real=8, vocabulary=264))
    extra = {
        "position_ids": torch.arange(30).view(3, 10),
        "shared_positions": torch.arange(10).view(1, 10),
        "cu_seq_lens": torch.tensor([0, 4, 10]),
    }
    turned = with_rows_reversed(replace(batch, extra_tensors=extra))
    assert turned.sequences_BS.tolist() == batch.sequences_BS.tolist()[::-1]
    assert turned.attention_mask_BS.tolist() == batch.attention_mask_BS.tolist()[::-1]
    assert turned.extra_tensors["position_ids"][:, 0].tolist() == [20, 10, 0]
    assert turned.extra_tensors["shared_positions"].tolist() == extra["shared_positions"].tolist()
    assert turned.extra_tensors["cu_seq_lens"].tolist() == [0, 4, 10]
    assert with_rows_reversed(turned).sequences_BS.tolist() == batch.sequences_BS.tolist()


@pytest.mark.usefixtures("one_world")
def test_the_log_keeps_the_captured_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pass(tmp_path / "in", num_rows=3, length=20, num_real=16, num_actions=9, vocabulary=264)
    shutil.copy(find_sample_folder() / "actor.json", tmp_path / "in")
    fed: list[Any] = []

    def watch_inputs(*args: Any, **kwargs: Any) -> Any:
        fed.append(args[0].sequences_BS.tolist())
        return prepare_inputs(*args, **kwargs)

    monkeypatch.setattr("replay.runner.run_pass.prepare_inputs", watch_inputs)
    [plain] = replay(tmp_path, "plain")
    [turned] = replay(tmp_path, "turned", reverse_rows=True)
    assert fed[1] == fed[0][::-1]
    assert turned.result.row_log_probs == pytest.approx(plain.result.row_log_probs, rel=1e-6)
    assert len({round(log_prob, 3) for log_prob in plain.result.row_log_probs}) == 3  # so that an order shows
    assert (turned.input.input_digest, turned.input.row_tokens) == (plain.input.input_digest, plain.input.row_tokens)
    assert turned.result.loss == pytest.approx(plain.result.loss, rel=1e-6)


def test_a_trace_tells_rows_by_their_place() -> None:
    with pytest.raises(UsageError, match="trace=True tells rows by their place, and these are fed in reverse"):
        ReplaySpec(inputs=InputsSpec(reverse_rows=True), measure=MeasureSpec(trace=True))
