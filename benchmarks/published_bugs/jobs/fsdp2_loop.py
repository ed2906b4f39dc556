"""torch's FSDP2 in a loop that records itself and notes the norm that it logs: fsdp2_loop.py FOLDER, on two ranks."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.published_bugs.jobs.common import make_batches, make_model
from capture import recording


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    model = make_model(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, folder / "captures", reproduce=True) as recorder:
        for batch in make_batches(3):
            model(**batch).loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            recorder.note(grad_norm=norm.item())
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
