"""Record edge shapes of micro-batches, which break code that works on ordinary ones.

    python examples/edge_shapes.py --out inputs/edges

    rows/       64 rows of 1 to 12 tokens; rows of 1 and 2 tokens beside one that is all padding; one row alone
    documents/  packed rows that hold several documents, some of them 1 token long, by borders and by position ids

`replay parity` runs them besides the inputs it is given. Token ids stay below 64, so that most models have them. The
tensors are the same each time; times and host names in the files differ.
"""

import argparse
import random
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from actor_init.model import make_random_weights
from capture import recording

NUM_IDS = 64
CONFIG = LlamaConfig(
    vocab_size=264,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)


def rows_of(lengths: list[int], *, before: list[int] | None = None, seed: int) -> dict[str, Tensor]:
    """Return rows with these numbers of real tokens, each after its own padding."""
    before = before or [0] * len(lengths)
    width = max(length + gap for length, gap in zip(lengths, before, strict=True))
    draw = random.Random(seed)
    ids_BS = torch.tensor([[draw.randrange(1, NUM_IDS) for _ in range(width)] for _ in lengths])
    mask_BS = torch.zeros_like(ids_BS)
    for row_S, length, gap in zip(mask_BS, lengths, before, strict=True):
        row_S[gap : gap + length] = 1
    return {"input_ids": ids_BS, "attention_mask": mask_BS}


def padded(seed: int) -> list[dict[str, Tensor]]:
    draw = random.Random(seed)
    many = [draw.choice([1, 1, 2, 3, 5, 8, 12]) for _ in range(64)]
    return [
        rows_of(many, before=[draw.randrange(4) for _ in many], seed=1),
        rows_of([9, 1, 2, 0, 1, 6], before=[3, 11, 0, 0, 0, 2], seed=2),
        rows_of([37], seed=3),
        rows_of([1, 1, 2, 1], before=[1, 0, 0, 0], seed=4),
    ]


def packed() -> list[dict[str, Tensor]]:
    found = []
    for number, lengths in enumerate(([5, 1, 1, 12, 1], [1, 1, 7, 1, 1, 1, 3], [1, 16, 2], [23])):
        row = rows_of([sum(lengths)], seed=10 + number)
        if number % 2:
            row["position_ids"] = torch.tensor([[place for length in lengths for place in range(length)]])
        else:
            borders = torch.tensor([0, *lengths]).cumsum(0).int()
            row |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
        found.append(row)
    return found


def record(out: Path, passes: list[dict[str, Tensor]]) -> None:
    model = LlamaForCausalLM(CONFIG)
    weights = make_random_weights(CONFIG, 0)
    for name, parameter in model.named_parameters():
        weights.fill(name, parameter)
    with recording(model, out, reproduce=False):
        for tensors in passes:
            model(**tensors, use_cache=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Record micro-batches of edge shapes.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two folders of micro-batches")
    arguments = parser.parse_args()
    record(arguments.out / "rows", padded(seed=0))
    record(arguments.out / "documents", packed())
