"""A LoRA adapter with weights of its own: python peft_lora.py FOLDER

What is saved for the replay is the model with the adapter merged into it.
"""

import copy
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from tests.trainers.common import make_batches, make_model, write_losses


def main(folder: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(make_model(folder, saves=False), config)
    copy.deepcopy(model).merge_and_unload().save_pretrained(folder / "model")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    losses = []
    for batch in make_batches():
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    write_losses(folder, losses)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
