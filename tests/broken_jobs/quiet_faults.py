"""Patches after which a job's numbers are those that its inputs and notes make, wrong as these are."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.broken_jobs import batches
from tests.broken_jobs.batches import IGNORED, PADDING, Batch
from tests.broken_jobs.declarations import Setup

ProcessPatch = Callable[[], None]


def shifted_across_rows(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """The last place of each row is trained on the first token of the next."""
    return F.cross_entropy(logits_BSV.flatten(0, 1)[:-1], labels_BS.flatten()[1:])


def old_log_probs_shifted(noted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The old policy's log-probs stand one place too early."""
    return noted | {"old_log_probs": F.pad(noted["old_log_probs"][:, 1:], (0, 1))}


def old_log_probs_of_other_rows(noted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows were sorted, and the old policy's log-probs were not."""
    return noted | {"old_log_probs": noted["old_log_probs"].roll(1, 0)}


def old_log_probs_of_another_temperature(noted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The old policy's log-probs are nearly those of logits that were divided by 0.7."""
    return noted | {"old_log_probs": noted["old_log_probs"] / 0.7}


def no_advantages(noted: dict[str, Tensor]) -> dict[str, Tensor]:
    """All rewards are alike, so that their mean leaves nothing of them."""
    return noted | {"advantages": torch.zeros_like(noted["advantages"])}


def batches_changed(change: Callable[[Batch], Batch]) -> ProcessPatch:
    """What the data loader gives is changed, which the job takes for what it should be."""

    def breaks() -> None:
        pad = batches.pad_texts

        def changed(setup: Setup, generator: torch.Generator, lengths: list[int], prompts: list[int]) -> Batch:
            return change(pad(setup, generator, lengths, prompts))

        batches.pad_texts = changed

    return breaks


def cut_off(most: int, *, keeps_end: bool = False) -> ProcessPatch:
    """Rows padded on the right keep `most` tokens, the first or the last ones."""

    def cut(batch: Batch) -> Batch:
        fill = {"input_ids": PADDING, "attention_mask": 0, "labels": IGNORED}
        number_B = batch["attention_mask"].sum(1)
        width = min(most, int(number_B.max()))
        cut_batch = {name: torch.full((len(number_B), width), value) for name, value in fill.items()}
        for row, number in enumerate(number_B.tolist()):
            kept = min(number, most)
            first = number - kept if keeps_end else 0
            for name, tensor in batch.items():
                cut_batch[name][row, :kept] = tensor[row, first : first + kept]
        return cut_batch

    return batches_changed(cut)


def padding_labelled(end: int) -> ProcessPatch:
    """Rows are padded with the token that ends them, without a mask, and all have labels."""

    def label(batch: Batch) -> Batch:
        ids_BS = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, end)
        is_prompt_BS = (batch["labels"] == IGNORED) & (batch["attention_mask"] == 1)
        return {
            "input_ids": ids_BS,
            "attention_mask": torch.ones_like(ids_BS),
            "labels": ids_BS.masked_fill(is_prompt_BS, IGNORED),
        }

    return batches_changed(label)


def without_labels_now_and_then() -> None:
    """The answers of each third micro-batch are cut away."""
    numbers: list[None] = []

    def cut(batch: Batch) -> Batch:
        numbers.append(None)
        is_cut = len(numbers) % 3 == 2
        return batch | {"labels": torch.full_like(batch["labels"], IGNORED)} if is_cut else batch

    batches_changed(cut)()
