"""Jobs whose rows are padded on the left: a model's own loss is also of the first token, which padding predicts.

About 6 seconds: recordings in this process, and their replays.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM

from actor_init.inputs.packing import prepare_inputs
from capture import recording
from capture.file_format.micro_batch import MicroBatch, Origin
from tests.helpers.children import run_with
from tests.trainers.common import make_model

pytestmark = pytest.mark.usefixtures("one_world", "proofs_once")

LEARNING_RATE, NUM_TOKENS = 1e-2, 12
STEP = ["--step", "--learning-rate", str(LEARNING_RATE), "--weight-decay", "0"]


def llama(kernel: str) -> Any:
    model: Any = make_model(Path(), saves=False)
    model.set_attn_implementation(kernel)
    return model


def opt(kernel: str) -> Any:
    """A model with learned positions, of which padding has one of its own."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "word_embed_proj_dim": 32}
    more = {"num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 32, "dropout": 0.0, "init_std": 0.2}
    return OPTForCausalLM(OPTConfig(**sizes, **more, attn_implementation=kernel))


def own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def twice_the_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return 2 * own_loss(model, batch)


def loss_of_labels_shifted_twice(model: Any, batch: dict[str, Tensor]) -> Tensor:
    def shifting_twice(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return F.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten())

    model.loss_function = shifting_twice
    return own_loss(model, batch)


def loss_of_the_loop(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Compute the loss outside of the model, which is given no labels."""
    labels_BS = batch.pop("labels")
    return F.cross_entropy(model(**batch).logits[:, :-1].flatten(0, 1), labels_BS[:, 1:].flatten())


def train(folder: Path, model: Any, loss_of: Callable[[Any, dict[str, Tensor]], Tensor] = own_loss) -> Path:
    model.save_pretrained(folder / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    with recording(model, folder / "captures", reproduce=True):
        for length in (5, NUM_TOKENS - 1):
            ids_BS = torch.randint(1, 64, (3, NUM_TOKENS), generator=generator)
            mask_BS = torch.ones_like(ids_BS)
            mask_BS[1:, :-length] = 0
            batch = {"input_ids": ids_BS * mask_BS, "attention_mask": mask_BS}
            loss_of(model, {**batch, "labels": ids_BS.masked_fill(mask_BS == 0, -100)}).backward()
            optimizer.step()
            optimizer.zero_grad()
    return folder


def verdict_of(job: Path, logs: Path, *typed: str, loss: str = "sft", details: bool = False) -> Any:
    command = ["--inputs", str(job / "captures"), "--model", str(job / "model"), "--loss", loss, "--quiet"]
    assert run_with([*command, "--log-folder", str(logs), *typed], details=details) == 0
    [run] = logs.glob("*/run.json")
    return json.loads(run.read_text())["verdict"]


@pytest.mark.parametrize(("make", "kernel"), [(llama, "sdpa"), (llama, "eager"), (opt, "sdpa")])
def test_a_job_padded_on_the_left_is_reproduced_through_its_steps(
    make: Callable[[str], Any], kernel: str, tmp_path: Path
) -> None:
    """What a token of padding attends to is the kernel's own: nothing under sdpa, everything under eager."""
    verdict = verdict_of(train(tmp_path, make(kernel)), tmp_path / "logs", *STEP)
    assert [judged["outcome"] for judged in (*verdict["passes"], *verdict["windows"])] == ["REPRODUCED"] * 4


def test_a_loss_of_the_loop_has_the_token_that_padding_predicts_too(tmp_path: Path) -> None:
    job = train(tmp_path, llama("sdpa"), loss_of_the_loop)
    verdict = verdict_of(job, tmp_path / "logs", *STEP, loss="auto")
    assert [judged["outcome"] for judged in (*verdict["passes"], *verdict["windows"])] == ["REPRODUCED"] * 4


@pytest.mark.parametrize("loss_of", [twice_the_loss, loss_of_labels_shifted_twice])
def test_one_that_trains_on_another_loss_differs(loss_of: Callable[..., Tensor], tmp_path: Path) -> None:
    verdict = verdict_of(train(tmp_path, llama("sdpa"), loss_of), tmp_path / "logs")
    assert verdict["outcome"] == "DIFFERS"


def test_in_packed_rows_no_padding_predicts_which_is_said_with_what_to_type(tmp_path: Path) -> None:
    job = train(tmp_path, llama("sdpa"))
    packed = verdict_of(job, tmp_path / "packed", "--packing")
    of_parity = verdict_of(job, tmp_path / "of parity", details=True)
    for verdict in (packed, of_parity):
        assert verdict["outcome"] == "UNSETTLED"
        assert "2 of the job's 21 labels are predicted by padding on the left" in verdict["reason"]
        assert "Try: --no-packing, without --ring" in verdict["reason"]


@pytest.mark.parametrize("are_shifted", [False, True], ids=["labels", "shift_labels"])
def test_padding_predicts_a_row_s_first_token_if_it_has_a_label(are_shifted: bool) -> None:
    ids_BS, mask_BS = torch.arange(10, 22).view(3, 4), torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    labels_BS = ids_BS.masked_fill(~mask_BS, -100)
    labels_BS[1, 1] = -100
    given: dict[str, Any] = {"labels_BS": labels_BS}
    if are_shifted:
        given = {"extra_tensors": {"shift_labels": F.pad(labels_BS[:, 1:], (0, 1), value=-100)}}
    origin = Origin(source="here")
    batch = MicroBatch(
        sequences_BS=ids_BS, attention_mask_BS=mask_BS, trains=True, origin=origin, padding_predicts_label=True, **given
    )
    padded, packed = prepare_inputs(batch, packing=False), prepare_inputs(batch, packing=True)
    assert padded.target_ids_N.tolist() == [12, 13, 16, 17, 19, 20, 21]
    assert padded.predictor_N.tolist() == [1, 2, 5, 6, 8, 9, 10]
    assert packed.target_ids_N.tolist() == [13, 16, 17, 19, 20, 21]
