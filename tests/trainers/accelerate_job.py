"""A loop under accelerate, two ranks on CPUs: python accelerate_job.py FOLDER ddp|fsdp2 [recorded]"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

from capture.integrations import record_prepared
from tests.trainers.common import make_batches, make_model, write_losses


def train(folder: Path, kind: str, *recorded: str) -> list[float]:
    plugin = None
    if kind == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            reshard_after_forward=True,
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if plugin is not None:
        # accelerate does not take up a plugin for FSDP on CPUs, though its FSDP2 works there: told by hand
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model = make_model(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    if recorded:
        record_prepared(accelerator, model, folder / "captures", reproduce=True)
    losses = []
    for batch in make_batches():
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"{accelerator.distributed_type}: {type(model).__name__}")
    accelerator.free_memory()
    if recorded:
        accelerator.end_training()
    return losses


if __name__ == "__main__":
    write_losses(Path(sys.argv[1]), train(Path(sys.argv[1]), *sys.argv[2:]))
    # The model went with train: a DDP model that is freed after its group can deadlock, pytorch/pytorch#56297.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
