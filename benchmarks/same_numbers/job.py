"""Record five tiny jobs for the replays of `python -m benchmarks.same_numbers`.

    python benchmarks/same_numbers/job.py FOLDER

`FOLDER/NAME/inputs` has the inputs of a job and `FOLDER/NAME/model` the weights it began with:

    dropout     a GPT-2 with dropout, padded rows, recorded with its random states
    no-states   the same, recorded without them
    policy      a Llama, the clipped ratio of PPO, two passes to a step
    beyond      a Llama whose third pass has a token beyond its vocabulary: refused when it is read
    too-long    a GPT-2 whose third pass has rows longer than its positions: its forward breaks off

It is run with the tree of BASE, so it imports nothing of this project but what a user's job does.

Shape letters: B rows, S tokens a row, A trailing tokens of a row that the action mask covers, V tokens of the vocabulary.
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


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    train_with_labels(gpt2(dropout=0.1), batches(), folder / "dropout")
    train_with_labels(gpt2(dropout=0.1), batches(), folder / "no-states", reproduce=False)
    train_a_policy(llama(), folder / "policy")
    beyond, too_long = batches(), batches()
    beyond[BROKEN]["input_ids"][1, 3] = VOCABULARY
    too_long[BROKEN] = {name: torch.cat([tensor_BS] * 6, dim=1) for name, tensor_BS in too_long[BROKEN].items()}
    train_with_labels(llama(), beyond, folder / "beyond")
    train_with_labels(gpt2(dropout=0.0), too_long, folder / "too-long")


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


def batches() -> list[dict[str, Tensor]]:
    """Make rows of unequal lengths, padded on the right."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for number in range(NUM_PASSES):
        ids_BS = torch.randint(1, VOCABULARY, (NUM_ROWS, LENGTH), generator=generator)
        lengths_B = torch.tensor([LENGTH - number % 3, LENGTH - 2])
        mask_BS = (torch.arange(LENGTH)[None] < lengths_B[:, None]).long()
        made.append({"input_ids": ids_BS * mask_BS, "attention_mask": mask_BS})
    return made


def train_with_labels(model: Any, batches: list[dict[str, Tensor]], folder: Path, *, reproduce: bool = True) -> None:
    model.save_pretrained(folder / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with recording(model, folder / "inputs", reproduce=reproduce):
        for batch in batches:
            labels_BS = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
            labels_BS[:, :3] = IGNORED
            # the job goes on after a pass that fails, as a replay does
            with suppress(IndexError, RuntimeError):
                model(**batch, labels=labels_BS).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def train_a_policy(model: Any, folder: Path) -> None:
    model.save_pretrained(folder / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(11)
    with recording(model, folder / "inputs", reproduce=True) as recorder:
        for number, batch in enumerate(batches()):
            advantages_BA, *noises_BA = torch.randn(3, NUM_ROWS, NUM_ACTIONS, generator=generator)
            mask_BA = batch["attention_mask"][:, -NUM_ACTIONS:].bool()
            logits_BAV = model(**batch).logits[:, -NUM_ACTIONS - 1 : -1]
            chosen_BA = logits_BAV.log_softmax(-1).gather(-1, batch["input_ids"][:, -NUM_ACTIONS:, None])[..., 0]
            old_BA, reference_BA = (chosen_BA.detach() + noise_BA / 4 for noise_BA in noises_BA)
            ratio_BA = (chosen_BA - old_BA).exp()
            gains_BA = torch.minimum(ratio_BA * advantages_BA, ratio_BA.clamp(0.8, 1.2) * advantages_BA)
            loss = -gains_BA[mask_BA].mean()
            noted = {"advantages": advantages_BA, "action_mask": mask_BA, "ref_log_probs": reference_BA}
            recorder.note(**noted, old_log_probs=old_BA, loss=loss)
            (loss / 2).backward()
            if number % 2:
                recorder.note(grad_norm=nn.utils.clip_grad_norm_(model.parameters(), 1e9))
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
