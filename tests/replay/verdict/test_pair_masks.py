"""Jobs that hand their model a mask of pairs of tokens: those of packed documents are replayed by their documents.

About 4 seconds: recordings in this process, and their replays.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from capture import recording
from tests.helpers.children import run_with
from tests.trainers.common import make_model

pytestmark = pytest.mark.usefixtures("one_world", "proofs_once")

LENGTHS = ([5, 4, 3], [2, 9])
NUM_TOKENS, LEARNING_RATE = 12, 1e-2


def train(folder: Path, *, rows: int, has_positions: bool, leaks: bool = False) -> Path:
    """Train two steps on packed documents. With `leaks` the mask is that of one document in each row."""
    model: Any = make_model(Path(), saves=False)
    model.save_pretrained(folder / "model")
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    lengths = LENGTHS[:rows]
    numbers = [[number for number, length in enumerate(row) for _ in range(length)] for row in lengths]
    number_BS = torch.tensor([row + [-1] * (NUM_TOKENS - len(row)) for row in numbers])
    real_BS = number_BS >= 0
    same_BSS = (number_BS[:, :, None] == number_BS[:, None]) | torch.tensor(leaks)
    sees_BSS = (same_BSS & real_BS[:, None] & real_BS[:, :, None]).tril()
    # The lowest finite number, since a row of padding that sees nothing would be nan.
    mask = torch.zeros(sees_BSS.shape).masked_fill(~sees_BSS, torch.finfo(torch.float32).min)
    positions = [[position for length in row for position in range(length)] for row in lengths]
    position_BS = torch.tensor([row + [0] * (NUM_TOKENS - len(row)) for row in positions])
    begins_BS = position_BS == 0
    with recording(model, folder / "captures", reproduce=True):
        for _ in range(2):
            ids_BS = torch.randint(1, 64, (rows, NUM_TOKENS), generator=generator)
            labels_BS = ids_BS.masked_fill(~real_BS | begins_BS, -100)
            given = {"position_ids": position_BS} if has_positions else {}
            model(input_ids=ids_BS, attention_mask=mask[:, None], labels=labels_BS, **given).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return folder


def verdict_of(job: Path) -> Any:
    command = ["--inputs", str(job / "captures"), "--model", str(job / "model"), "--loss", "sft", "--quiet"]
    steps = ["--step", "--learning-rate", str(LEARNING_RATE), "--weight-decay", "0"]
    assert run_with([*command, *steps, "--log-folder", str(job / "logs")]) == 0
    [run] = job.glob("logs/*/run.json")
    return json.loads(run.read_text())["verdict"]


@pytest.mark.parametrize(("rows", "has_positions"), [(2, True), (1, False)])
def test_packed_documents_are_reproduced_through_their_steps(rows: int, has_positions: bool, tmp_path: Path) -> None:
    verdict = verdict_of(train(tmp_path, rows=rows, has_positions=has_positions))
    assert [judged["outcome"] for judged in (*verdict["passes"], *verdict["windows"])] == ["REPRODUCED"] * 4
