"""Time forward and backward of a model in a bare loop: transformers and FSDP2, and nothing of this project.

    python benchmarks/bare.py qwen3-30b-a3b --num-layers 8 --compile

FSDP2 over fp32 weights, bf16 compute, whole logits; compiled: each block, and the loss. Prints the
median of the passes and their peak.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parent.parent


def find_config(name: str) -> Path:
    """Return the config of a model, as it was published: one of those here, or one that the project ships."""
    path = ROOT / f"benchmarks/models/{name}.json"
    return path if path.exists() else ROOT / f"actor_init/presets/{name}.json"


def read_config(name: str, num_layers: int | None) -> Any:
    """Return the config of a model, as published, with fewer layers if a number is given."""
    config: Any = AutoConfig.from_pretrained(find_config(name))
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    return config


def build(
    config: Any, attention: str, compiled: bool, device: torch.device
) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the model, and a function that runs forward and backward over ids [1, tokens]; gradients stay."""
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model.train(), mp_policy=policy)
    loss_of = torch.compile(compute_loss) if compiled else compute_loss

    def run(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = loss_of(model(input_ids=ids, use_cache=False).logits[0], ids[0])
        loss.backward()
        return loss.detach()

    return model, run


def compute_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:-1].float(), ids[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a file in benchmarks/models or a preset, without .json")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--passes", type=int, default=12)
    given = parser.parse_args()
    dist.init_process_group("cuda:nccl,cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda")
    config = read_config(given.model, given.num_layers)
    model, run = build(config, given.attention, given.compile, device)
    ids = torch.randint(config.vocab_size, (1, given.tokens), device=device)
    seconds = []
    for _ in range(given.passes):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        run(ids)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        model.zero_grad()
    peak = torch.cuda.max_memory_allocated()
    print(f"{given.model}: {statistics.median(seconds[4:]) * 1e3:.1f} ms, peak {peak / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
