"""What the jobs share: a tiny model, whose weights they save, and micro-batches.

A job is called with a folder. It saves its weights in `<folder>/model` and trains at learning rate 0, so that these are
the weights of every step, unless it says otherwise.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

IGNORED, PADDING = -100, 0
SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
}


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def saved(model: Any, folder: Path) -> Any:
    """The model, its weights saved by rank 0."""
    if rank() == 0:
        model.save_pretrained(folder / "model")
    return model


def make_model(folder: Path, **settings: Any) -> LlamaForCausalLM:
    """fp32 weights that are the same in every process."""
    torch.manual_seed(0)
    return saved(LlamaForCausalLM(LlamaConfig(**SIZES, **settings, use_cache=False)), folder)


def make_batches(num_batches: int, *, unequal: bool = False, prompt: int = 0) -> list[dict[str, Tensor]]:
    """Micro-batches of two rows, the first of them padded; where unequal every second one has few labels.

    The first `prompt` tokens have no label.
    """
    generator = torch.Generator().manual_seed(7 + rank())
    batches = []
    for number in range(num_batches):
        length = 24
        ids_BS = torch.randint(1, 64, (2, length), generator=generator)
        mask_BS = torch.ones_like(ids_BS)
        mask_BS[0, length - 4 :] = 0
        ids_BS[mask_BS == 0] = PADDING
        labels_BS = ids_BS.masked_fill(mask_BS == 0, IGNORED)
        labels_BS[:, :prompt] = IGNORED
        if unequal and number % 2:
            labels_BS[:, : length - 7 - rank()] = IGNORED
        batches.append({"input_ids": ids_BS, "attention_mask": mask_BS, "labels": labels_BS})
    return batches
