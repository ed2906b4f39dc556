"""Other losses of the same logits, held against what transformers' own loss function gives of changed labels."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from capture.file_format.micro_batch import MicroBatch, Origin
from replay.runner.trial_losses import LogitStatistics, LossTables, LossTrial, TargetRows, list_loss_trials

ROWS, LENGTH, VOCABULARY, IGNORED = 2, 8, 16, -100
GENERATOR = torch.Generator().manual_seed(0)
LOGITS_BSV = torch.randn(ROWS, LENGTH, VOCABULARY, generator=GENERATOR, dtype=torch.float64)
IDS_BS = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=GENERATOR)
REAL_BS = torch.arange(LENGTH) < torch.tensor([[6], [8]])
LABELS_BS = IDS_BS.masked_fill(~REAL_BS | (torch.arange(LENGTH) < torch.tensor([[2], [3]])), IGNORED)


def list_losses(
    divisor: float | None = None,
    labels_BS: Tensor = LABELS_BS,
    num_tokens: int | None = None,
    *,
    real_BS: Tensor = REAL_BS,
    has_shared_rows: bool = False,
) -> dict[str, LossTrial]:
    is_label_BS = labels_BS != IGNORED
    rows = TargetRows(target_BS=IDS_BS, is_label_BS=is_label_BS, real_BS=real_BS, has_shared_rows=has_shared_rows)
    predictor_N, target_N = rows.list_targets()
    tables = LOGITS_BSV.log_softmax(-1).flatten(0, 1)[predictor_N].gather(1, target_N[:, None])
    predicting_NV = LOGITS_BSV[:, :-1][is_label_BS[:, 1:]]
    statistics = LogitStatistics(
        uniform=float(predicting_NV.log_softmax(-1).mean()), square=float(predicting_NV.logsumexp(-1).square().mean())
    )
    loss_tables = LossTables(
        rows=rows,
        tables_3BS=tables.view(3, ROWS, LENGTH),
        logits=statistics,
        divisor=divisor,
        num_tokens=int(is_label_BS[:, 1:].sum()) if num_tokens is None else num_tokens,
    )
    return {trial.name: trial for trial in list_loss_trials(loss_tables)}


def compute_job_loss(labels_BS: Tensor, divisor: float | None = None) -> float:
    return float(ForCausalLMLoss(LOGITS_BSV, labels_BS, VOCABULARY, num_items_in_batch=divisor))


CHANGED_LABELS: dict[str, Callable[[], Tensor]] = {
    "all real tokens": lambda: IDS_BS.masked_fill(~REAL_BS, IGNORED),
    "padding too": lambda: IDS_BS,
    "shifted twice": lambda: F.pad(LABELS_BS[:, 1:], (0, 1), value=IGNORED),
    "not shifted": lambda: F.pad(LABELS_BS[:, :-1], (1, 0), value=IGNORED),
    "labels and padding": lambda: torch.where(REAL_BS, LABELS_BS, IDS_BS),
    "prompts alone": lambda: IDS_BS.masked_fill(~REAL_BS | (LABELS_BS != IGNORED), IGNORED),
    "one label more": lambda: IDS_BS.masked_fill(~REAL_BS | (torch.arange(LENGTH) < torch.tensor([[1], [2]])), IGNORED),
    "one label less": lambda: IDS_BS.masked_fill(~REAL_BS | (torch.arange(LENGTH) < torch.tensor([[3], [4]])), IGNORED),
}


@pytest.mark.parametrize("name", CHANGED_LABELS)
def test_a_loss_over_other_tokens_is_what_a_model_gives_of_changed_labels(name: str) -> None:
    expected = compute_job_loss(CHANGED_LABELS[name]())

    assert list_losses()[name].loss == pytest.approx(expected, rel=1e-6)
    # What the job's model divides by 5 is held against the replay as a mean over the replay's tokens.
    num_tokens = int((LABELS_BS[:, 1:] != IGNORED).sum())
    with_divisor = compute_job_loss(CHANGED_LABELS[name](), 5.0) * 5.0 / num_tokens
    assert list_losses(divisor=5.0)[name].loss == pytest.approx(with_divisor, rel=1e-6)


def test_the_number_of_tokens_is_said() -> None:
    assert list_losses()["padding too"].says == "counts padding and prompts too: it is over all 14 tokens"


def test_labels_that_the_replay_leaves_out_are_those_of_documents_first_tokens() -> None:
    """Rows of several documents, each token of which has a label: there are no prompts that a loss could count."""
    labels_BS = IDS_BS.masked_fill(~REAL_BS, IGNORED)
    trials = list_losses(labels_BS=labels_BS, num_tokens=10, has_shared_rows=True)
    assert trials["all labels"].loss == pytest.approx(compute_job_loss(labels_BS))
    assert trials["all labels"].says.endswith("which the document before predicts: 12 tokens")
    assert "all real tokens" not in trials
    # Without borders the replay has all labels, and that is no other loss.
    assert "all labels" not in list_losses(labels_BS=labels_BS)


@pytest.mark.parametrize(
    ("is_shared", "is_left", "num_tokens", "says"),
    [
        (False, False, 12, "counts 2 labels of padding: 14 tokens"),
        # Packed documents alone tell of no border: what the replay leaves out is the padding.
        (True, False, 12, "counts 2 labels of padding: 14 tokens"),
        (True, False, 11, "counts 2 labels of padding and the first token of each packed document, which the document "
         "before predicts: 14 tokens"),
        # Padding on the left: its second token is a label, and it predicts the row's first one.
        (False, True, 12, "counts 1 label of padding and 1 label that padding predicts: 14 tokens"),
    ],
)  # fmt: skip
def test_labels_of_padding_are_not_taken_for_first_tokens_of_packed_documents(
    is_shared: bool, is_left: bool, num_tokens: int, says: str
) -> None:
    real_BS = REAL_BS.flip(1) if is_left else REAL_BS
    trials = list_losses(labels_BS=IDS_BS, num_tokens=num_tokens, real_BS=real_BS, has_shared_rows=is_shared)
    assert trials["all labels"].says == says
    assert trials["all labels"].loss == pytest.approx(compute_job_loss(IDS_BS))


@pytest.mark.parametrize("is_shared", [False, True])
def test_rows_of_several_documents_are_told_by_the_positions_that_begin_again(is_shared: bool) -> None:
    positions_BS = torch.arange(LENGTH).expand(ROWS, LENGTH) % (4 if is_shared else LENGTH)
    batch = MicroBatch(
        sequences_BS=IDS_BS,
        attention_mask_BS=REAL_BS,
        labels_BS=LABELS_BS,
        extra_tensors={"position_ids": positions_BS},
        trains=True,
        origin=Origin(source=""),
    )
    assert TargetRows.from_batch(batch).has_shared_rows is is_shared


def test_other_functions() -> None:
    losses_BS = -LOGITS_BSV.log_softmax(-1)[:, :-1].gather(-1, IDS_BS[:, 1:, None])[..., 0]
    is_label_BS = LABELS_BS[:, 1:] != IGNORED
    means = [float(losses[is_label].mean()) for losses, is_label in zip(losses_BS, is_label_BS, strict=True)]
    trials = list_losses()

    assert trials["mean of rows' means"].loss == pytest.approx(sum(means) / 2)
    assert trials["sum"].loss == pytest.approx(float(losses_BS[is_label_BS].sum()))
    assert trials["times 0.5"].loss == pytest.approx(0.5 * float(losses_BS[is_label_BS].mean()))
    smoothed = F.cross_entropy(
        LOGITS_BSV[:, :-1].flatten(0, 1), LABELS_BS[:, 1:].flatten(), ignore_index=IGNORED, label_smoothing=0.1
    )
    assert trials["smoothed by 0.1"].loss == pytest.approx(float(smoothed))
    assert "own mean" not in trials


def test_a_job_that_does_not_heed_its_divisor() -> None:
    num_tokens = int((LABELS_BS[:, 1:] != IGNORED).sum())
    expected = compute_job_loss(LABELS_BS) * 5.0 / num_tokens

    assert list_losses(divisor=5.0)["own mean"].loss == pytest.approx(expected, rel=1e-6)
