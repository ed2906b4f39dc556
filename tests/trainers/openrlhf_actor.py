"""The Actor class of OpenRLHF in a loop of its own: python openrlhf_actor.py FOLDER

OpenRLHF imports flash_attn, which is built for CUDA only, as soon as it is imported itself. The Actor uses it for
packed samples alone; so that the class can run on a CPU, empty modules stand in for it here.
"""

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType

import torch

from tests.trainers.common import make_batches, make_model, write_losses

STANDING_IN = {
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
}


def stand_in_for_flash_attn() -> None:
    for name, functions in STANDING_IN.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        for function in functions:
            setattr(module, function, None)
        sys.modules[name] = module


def main(folder: Path) -> None:
    make_model(folder)
    if not torch.cuda.is_available():
        stand_in_for_flash_attn()
    from openrlhf.models import Actor

    actor = Actor(str(folder / "model"), attn_implementation="eager", param_dtype="bf16").float()  # it knows no fp32
    actor.model.save_pretrained(folder / "model")
    actor.gradient_checkpointing_enable()
    actor.train()
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.0)
    losses = []
    for batch in make_batches():
        ids_BS, mask_BS = batch["input_ids"], batch["attention_mask"]
        action_mask_BA = mask_BS[:, 4:].bool()
        log_probs_BA, _ = actor(ids_BS, action_mask_BA, attention_mask=mask_BS, return_output=True)
        loss = -(log_probs_BA * action_mask_BA).sum() / action_mask_BA.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    write_losses(folder, losses)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
