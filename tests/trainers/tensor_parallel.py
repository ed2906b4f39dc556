"""A loop whose layers torch's tensor parallelism splits: torchrun --nproc-per-node 2 tensor_parallel.py FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from tests.trainers.common import make_batches, make_model, write_losses


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    model = make_model(folder)
    dist.barrier()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    split_outputs = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    split_inputs = ["self_attn.o_proj", "mlp.down_proj"]
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in split_outputs}
    plan |= {name: RowwiseParallel() for name in split_inputs}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in make_batches(of_rank=0):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    write_losses(folder, losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
