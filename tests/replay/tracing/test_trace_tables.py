"""The tables of a traced pass: made files of several ranks, put together by hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actor_init.spec import UsageError
from replay.tracing.trace_file import (
    FED,
    FED_POSITIONS,
    LOG_PROBS,
    PREDICTED_POSITIONS,
    TensorKey,
    TensorKind,
    TracedPass,
    TraceFile,
    write_trace,
)

KEY = TensorKey(TensorKind.FORWARD, "model.layers.0.mlp", "output")
GRADIENT = TensorKey(TensorKind.GRADIENT, "model.layers.0.mlp", "output")
LOG_PROB_KEY = TensorKey(TensorKind.FORWARD, LOG_PROBS, "output")


def write(path: Path, tensors: Mapping[str, Any], *order: TensorKey) -> TraceFile:
    made: dict[str, Tensor] = {name: torch.tensor(values) for name, values in tensors.items()}
    write_trace(path, made, {"order": [str(key) for key in order], "blocks": "model.layers", "seen": "modules"})
    return TraceFile.open(path)


def make_pass(files: Mapping[int, list[TraceFile]], *parts: TensorKey) -> TracedPass:
    return TracedPass(source="a.pkl", num_columns=4, order=[KEY], parts=frozenset(parts), files=files)


def test_a_rings_tokens_come_in_the_order_of_the_capture(tmp_path: Path) -> None:
    """Each rank has slices from both ends of a row, and as many tokens as come to it."""
    own: dict[str, Any] = {FED_POSITIONS: [0, 1, 6], str(KEY): [[10.0], [11.0], [16.0]], PREDICTED_POSITIONS: [6, 1]}
    other: dict[str, Any] = {FED_POSITIONS: [5, 3], str(KEY): [[15.0], [13.0]], PREDICTED_POSITIONS: [3]}
    files = [
        write(tmp_path / "0", own | {str(LOG_PROB_KEY): [[-6.0], [-1.0]]}, KEY, LOG_PROB_KEY),
        write(tmp_path / "1", other | {str(LOG_PROB_KEY): [[-3.0]]}, KEY, LOG_PROB_KEY),
    ]
    traced = make_pass({0: files})
    [table] = traced.read_tables(KEY)
    assert table.positions_T.tolist() == [0, 1, 3, 5, 6]
    assert table.values_TK.flatten().tolist() == [10.0, 11.0, 13.0, 15.0, 16.0]
    # Log-probs stand at the tokens that they are of.
    [log_probs] = traced.read_tables(LOG_PROB_KEY)
    assert log_probs.positions_T.tolist() == [1, 3, 6]
    assert log_probs.values_TK.flatten().tolist() == [-1.0, -3.0, -6.0]


def test_tp_ranks_have_a_table_each_unless_each_holds_an_addend(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {FED_POSITIONS: [0, 2], FED: [[1, 5], [1, 6]]}
    files = {
        rank: [
            write(
                tmp_path / f"{rank}",
                tensors | {str(KEY): [[1.0 + rank], [2.0]], str(GRADIENT): [[10.0 * rank], [3.0]]},
                KEY,
                GRADIENT,
            )
        ]
        for rank in range(3)
    }
    traced = make_pass(files, GRADIENT)
    assert [table.values_TK.flatten().tolist() for table in traced.read_tables(KEY)] == [
        [1.0, 2.0],
        [2.0, 2.0],
        [3.0, 2.0],
    ]
    [whole] = traced.read_tables(GRADIENT)
    assert (whole.positions_T.tolist(), whole.values_TK.flatten().tolist()) == ([0, 2], [30.0, 9.0])
    assert [table.values_TK.tolist() for table in traced.read_tables(FED, FED_POSITIONS)] == [tensors[FED]] * 3


def test_a_trace_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", {FED_POSITIONS: [0]})
    assert not list(tmp_path.glob("*.tmp"))
    with pytest.raises(UsageError, match="is not there or damaged"):
        TraceFile.open(tmp_path / "b")
    (tmp_path / "c").write_bytes((tmp_path / "a").read_bytes()[:30])
    with pytest.raises(UsageError, match="is not there or damaged"):
        TraceFile.open(tmp_path / "c")
    write_trace(tmp_path / "d", {}, {"order": [], "blocks": "", "seen": "", "format": 2})
    with pytest.raises(UsageError, match="d is in format 2; this version compares traces of format 1"):
        TraceFile.open(tmp_path / "d")
