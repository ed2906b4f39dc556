"""Measure how fast a folder of safetensors becomes a sharded model, beside the speed at which the disk reads it.

    python -m benchmarks loading --folder /data/some-folder-on-the-disk --rounds 3
    torchrun --nproc-per-node 2 -m benchmarks loading --folder /data/some-folder --layers 32 --hidden 4096

Makes a Llama of random bytes in bf16, in files of 1 GB, unless the folder has one, and opens it under FSDP2 with fp32
masters. Before each series the files' pages are dropped from memory, which needs no root; the disk's
own speed is that of one thread that reads the files from begin to end in pieces of 8 MiB. The two alternate, the disk
once more in each round as the control; then loading once more from memory, which is what is left with the fastest disk.
"""

import gc
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from actor_init.backends.protocol import open_backend
from actor_init.model import find_model
from actor_init.spec import ActorSpec, ParallelSpec
from actor_init.world import World
from benchmarks.harness import Answers, Column, Sample, alternate, make_parser, table

PIECE_BYTES = 8 * 2**20


def main() -> int:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--folder", type=Path, help="where the model is, or is made. Default: a temporary one")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=2048)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as own, World.from_env(ParallelSpec()) as world:
        folder = given.folder or Path(world.broadcast_from_rank0(own))
        if world.rank == 0 and not any(folder.glob("*.safetensors")):
            make(folder, num_layers=given.layers, hidden_size=given.hidden)
        world.barrier()
        files = sorted(folder.glob("*.safetensors"))
        kinds: dict[str, Callable[[], None]] = {
            "loading": lambda: load(folder, world),
            "disk": lambda: read(files),
            "disk again": lambda: read(files),
            "loading, from memory": lambda: load(folder, world),
        }
        num_bytes = sum(path.stat().st_size for path in files)

        def measured(name: str, number: int) -> list[Sample]:
            if "memory" in name:
                read(files)
            elif world.rank == 0:
                forget(files)
            world.barrier()
            began = time.perf_counter()
            if name.startswith("loading") or world.rank == 0:
                kinds[name]()
            world.barrier()
            seconds = time.perf_counter() - began
            return [{"s": seconds, "GB/s": num_bytes / seconds / 1e9}]

        answers = Answers(given, "loading", writes=world.rank == 0)
        figures = alternate({name: partial(measured, name) for name in kinds}, answers, rounds=given.rounds)
        if world.rank == 0:
            columns = (Column("s", "s"), Column("GB/s", "GB/s"), Column("of the disk's", "GB/s", of="disk"))
            print(f"{answers.machine}: {num_bytes / 1e9:.2f} GB, {world.world_size} ranks, {given.rounds} rounds")
            print(table("series", figures, columns))
    return 0


def make(folder: Path, *, num_layers: int, hidden_size: int) -> None:
    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 7 // 2,
        num_attention_heads=hidden_size // 128,
        num_key_value_heads=max(hidden_size // 512, 1),
        vocab_size=32000,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.detach().view(torch.int16).random_(0, 0x3F00)
    model.save_pretrained(folder, max_shard_size="1GB")


def forget(files: list[Path]) -> None:
    """Drop the files' pages from the system's memory."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # pages that are not on the disk yet stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read(files: list[Path]) -> None:
    piece = bytearray(PIECE_BYTES)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass


def load(folder: Path, world: World) -> None:
    spec = ActorSpec(model=str(folder), backend="fsdp2")
    source = find_model(spec, None, "")
    backend = open_backend(spec, source, world)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    backend.close()
    del backend
    gc.collect()
