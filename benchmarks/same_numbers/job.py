"""Record five tiny jobs for the replays of `python -m benchmarks.same_numbers`.

    python benchmarks/same_numbers/job.py FOLDER

`FOLDER/NAME/inputs` has the inputs of a job and `FOLDER/NAME/model` the weights it began with:

    dropout     a GPT-2 with dropout, padded rows, recorded with its random states
    no-states   the same, recorded without them
    policy      a Llama, the clipped ratio of PPO, two passes to a step
    beyond      a Llama whose third pass has a token beyond its vocabulary: refused when it is read
    too-long    a GPT-2 whose third pass has rows longer than its positions: its forward breaks off

It is run with the tree of BASE, so it imports nothing of this project but what a user's job does.

Shape letters: B rows, S tokens a row, A columns of the action mask (the last tokens of each row), V the vocabulary.
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from capture import recording

NUM_PASSES, NUM_ROWS, LENGTH, NUM_ACTIONS, VOCABULARY, POSITIONS = 4, 2, 12, 6, 64, 64
BROKEN = 2  # the pass that fails, of two of the jobs
IGNORED = -100
Batch = dict[str, Tensor]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    beyond, too_long = batches(), batches()
    beyond[BROKEN]["input_ids"][1, 3] = VOCABULARY
    too_long[BROKEN] = {name: torch.cat([tensor_BS] * 6, dim=1) for name, tensor_BS in too_long[BROKEN].items()}
    train(gpt2(dropout=0.1), batches(), folder / "dropout")
    train(gpt2(dropout=0.1), batches(), folder / "no-states", reproduce=False)
    train(llama(), batches(), folder / "policy", window=2)
    train(llama(), beyond, folder / "beyond")
    train(gpt2(dropout=0.0), too_long, folder / "too-long")


def gpt2(dropout: float) -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS, "vocab_size": VOCABULARY}
    shares = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **shares, **tokens, initializer_range=0.2, use_cache=False)).train()


def llama() -> Any:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False)).train()


def batches() -> list[Batch]:
    """Make rows of unequal lengths, padded on the right, with labels behind a prompt of three tokens."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for number in range(NUM_PASSES):
        lengths_B = torch.tensor([LENGTH - number % 3, LENGTH - 2])
        mask_BS = (torch.arange(LENGTH)[None] < lengths_B[:, None]).long()
        ids_BS = torch.randint(1, VOCABULARY, (NUM_ROWS, LENGTH), generator=generator) * mask_BS
        labels_BS = ids_BS.masked_fill((mask_BS == 0) | (torch.arange(LENGTH) < 3), IGNORED)
        made.append({"input_ids": ids_BS, "attention_mask": mask_BS, "labels": labels_BS})
    return made


def train(model: Any, batches: list[Batch], folder: Path, *, window: int = 1, reproduce: bool = True) -> None:
    """Train on the labels, or with a `window` of several passes by a policy's loss."""
    model.save_pretrained(folder / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with recording(model, folder / "inputs", reproduce=reproduce) as recorder:
        for number, batch in enumerate(batches):
            # the job goes on after a pass that fails, as a replay does
            with suppress(IndexError, RuntimeError):
                loss = model(**batch).loss if window == 1 else policy_loss(model, batch, recorder)
                (loss / window).backward()
            if (number + 1) % window == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()


def policy_loss(model: Any, batch: Batch, recorder: Any) -> Tensor:
    """Compute the clipped ratio of PPO, whose old policy is a little off, and note what it is computed from."""
    mask_BA = batch["attention_mask"][:, -NUM_ACTIONS:].bool()
    logits_BSV = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logits_BAV = logits_BSV[:, -NUM_ACTIONS - 1 : -1]
    log_probs_BA = logits_BAV.log_softmax(-1).gather(-1, batch["input_ids"][:, -NUM_ACTIONS:, None])[..., 0]
    generator = torch.Generator().manual_seed(int(batch["input_ids"].sum()))
    advantages_BA, *noises_BA = torch.randn(3, NUM_ROWS, NUM_ACTIONS, generator=generator)
    old_BA, reference_BA = (log_probs_BA.detach() + noise_BA / 4 for noise_BA in noises_BA)
    ratio_BA = (log_probs_BA - old_BA).exp()
    loss = -torch.minimum(ratio_BA * advantages_BA, ratio_BA.clamp(0.8, 1.2) * advantages_BA)[mask_BA].mean()
    noted = {"advantages": advantages_BA, "old_log_probs": old_BA, "ref_log_probs": reference_BA}
    recorder.note(**noted, action_mask=mask_BA, loss=loss)
    return loss


if __name__ == "__main__":
    main(Path(sys.argv[1]))
