"""accelerate's FSDP2 in bf16, weights loaded in bf16: torchrun --nproc-per-node 2 accelerate_fsdp2.py FOLDER"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

from benchmarks.published_bugs.jobs.common import make_batches, make_model, saved


def main(folder: Path) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        mixed_precision_policy="bf16",
        reshard_after_forward=True,
    )
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=plugin)
    # accelerate does not take up a plugin for FSDP on CPUs, though its FSDP2 works there: told by hand
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model = saved(make_model(folder).to(torch.bfloat16), folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model, optimizer = accelerator.prepare(model, optimizer)
    print("norm", next(model.parameters()).dtype)
    for batch in make_batches(4):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
