"""Folders of inputs, some of which fail."""

from pathlib import Path
from typing import Any

from capture.file_format.actor_config import write_actor_config
from tests.helpers.made_captures import write_pass

CONFIG: dict[str, Any] = {
    "model_type": "gpt2",  # learned positions: a row longer than n_positions breaks the forward itself
    "vocab_size": 64,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


TOO_LONG = 40


def folder_of(home: Path, lengths: list[int], *, num_ranks: int = 1) -> Path:
    """Captures of CONFIG's model, dealt to the ranks in turn; those longer than 32 break its forward."""
    folder = home / "inputs"
    for step, length in enumerate(lengths):
        write_pass(folder, rank=step % num_ranks, step=step, length=length, num_real=length)
    write_actor_config(folder, CONFIG, "tiny")
    return folder
