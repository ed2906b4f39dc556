"""What the jobs share: a tiny model, batches, and a place for the losses that they computed themselves.

A job is called with a folder. It saves its weights in `<folder>/model`, trains at learning rate 0, and leaves
`<folder>/losses_rank<r>.json`: the loss of each training micro-batch of that rank, in order.
"""

import json
import os
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

IGNORED, PADDING = -100, 0
NUM_STEPS = 3


def make_model(folder: Path, *, saves: bool = True) -> LlamaForCausalLM:
    """fp32 weights that are the same in every process; wide enough that each micro-batch's loss is its own."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))
    if saves and rank() == 0:
        model.save_pretrained(folder / "model")
    return model


def rank() -> int:
    """Return the rank in torch's process group, or without one in the variables that launchers set."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def make_batches(
    num_batches: int = NUM_STEPS, num_rows: int = 2, *, of_rank: int | None = None
) -> list[dict[str, Tensor]]:
    """Rows of unequal length, padded on the right; prompts of three tokens have no label. Each rank has its own."""
    generator = torch.Generator().manual_seed(7 + (rank() if of_rank is None else of_rank))
    batches = []
    for number in range(num_batches):
        length = 10 + number
        ids_BS = torch.randint(1, 64, (num_rows, length), generator=generator)
        mask_BS = torch.ones_like(ids_BS)
        mask_BS[0, length - 2 :] = 0
        ids_BS[mask_BS == 0] = PADDING
        labels_BS = ids_BS.masked_fill(mask_BS == 0, IGNORED)
        labels_BS[:, :3] = IGNORED
        batches.append({"input_ids": ids_BS, "attention_mask": mask_BS, "labels": labels_BS})
    return batches


def write_losses(folder: Path, losses: list[float]) -> None:
    (folder / f"losses_rank{rank()}.json").write_text(json.dumps(losses))
