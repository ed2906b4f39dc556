"""Micro-batches of random tokens, each rank's own: prompts have no label, and rows have unequal lengths."""

import torch
from torch import Tensor

from tests.broken_jobs.declarations import Layout, Setup
from tests.broken_jobs.models import VOCABULARY

IGNORED, PADDING = -100, 0
NUM_ROWS = 3

Batch = dict[str, Tensor]


def windows_of(setup: Setup, rank: int) -> list[list[Batch]]:
    """A list for each step of one rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        [_batch(setup, generator, 2 * step + 3 * number + rank) for number in range(setup.accumulation)]
        for step in range(setup.num_steps)
    ]


def num_labels(batch: Batch) -> int:
    """Those that the loss is of: a model does not predict a row's first token."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def _batch(setup: Setup, generator: torch.Generator, longer: int) -> Batch:
    """`longer` makes a micro-batch's rows longer than another's, but where all have one length."""
    if setup.layout is Layout.PACKED:
        return _packed(generator, [6, 9 + longer % 5, 4 + longer % 3])
    if setup.layout is Layout.FULL:
        lengths, prompts = [12] * NUM_ROWS, [3] * NUM_ROWS
    else:
        lengths = [6 + longer % 4, 12 + longer, 9]
        prompts = [2, 1 + longer % 6, 4]
    if not setup.has_prompts:
        prompts = [0] * NUM_ROWS
    return pad_texts(setup, generator, lengths, prompts)


def pad_texts(setup: Setup, generator: torch.Generator, lengths: list[int], prompts: list[int]) -> Batch:
    width = max(lengths)
    ids_BS = torch.full((len(lengths), width), PADDING)
    mask_BS = torch.zeros_like(ids_BS)
    labels_BS = torch.full_like(ids_BS, IGNORED)
    for row, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        first = width - length if setup.layout is Layout.LEFT else 0
        tokens_S = torch.randint(1, VOCABULARY, (length,), generator=generator)
        for name, place in (("bos_token_id", 0), ("eos_token_id", -1)):
            if (id_ := setup.config.get(name)) is not None:
                tokens_S[place] = id_
        ids_BS[row, first : first + length] = tokens_S
        mask_BS[row, first : first + length] = 1
        labels_BS[row, first + prompt : first + length] = tokens_S[prompt:]
    batch = {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": labels_BS}
    if setup.passes_position_ids:
        batch["position_ids"] = (mask_BS.cumsum(1) - 1).clamp(min=0)
    return batch


def _packed(generator: torch.Generator, lengths: list[int]) -> Batch:
    documents = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]
    labels = [torch.cat([torch.tensor([IGNORED, IGNORED]), document[2:]]) for document in documents]
    return {
        "input_ids": torch.cat(documents)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "labels": torch.cat(labels)[None],
    }
