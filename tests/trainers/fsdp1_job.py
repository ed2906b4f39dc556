"""A loop under torch's first FSDP, two ranks on CPUs: python fsdp1_job.py FOLDER [original]

With `original` the optimizer sees the original parameters (`use_orig_params`), else flat ones.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.trainers.common import make_batches, make_model, write_losses


def train(folder: Path, keeps_originals: bool) -> list[float]:
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    model = FullyShardedDataParallel(
        make_model(folder), auto_wrap_policy=policy, use_orig_params=keeps_originals, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    losses = []
    for batch in make_batches():
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    write_losses(Path(sys.argv[1]), train(Path(sys.argv[1]), sys.argv[2:] == ["original"]))
    torch.distributed.destroy_process_group()
