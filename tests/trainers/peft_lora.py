"""A LoRA adapter with weights of its own on a frozen base: python peft_lora.py FOLDER [plain | ddp | fsdp2]

What is saved for the replay is the base in `model`, the adapter in `adapter`, and the base with the adapter merged into
it in `merged`. Gradients are clipped. With ddp and fsdp2 there are two ranks.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.trainers.common import make_batches, make_model, rank, write_losses


def make_adapted(folder: Path) -> Any:
    torch.manual_seed(1)
    base = make_model(folder)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    if rank() == 0:
        model.save_pretrained(folder / "adapter")
        copy.deepcopy(model).merge_and_unload().save_pretrained(folder / "merged")
    return model


def main(folder: Path, kind: str) -> None:
    if kind != "plain":
        torch.distributed.init_process_group("gloo")
    model = make_adapted(folder)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "fsdp2":
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    losses = []
    for batch in make_batches():
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    write_losses(folder, losses)
    del model, optimizer
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(sys.argv[2:] or ["plain"]))
