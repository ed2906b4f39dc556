"""Time forward and backward in a bare loop of transformers and FSDP2 or DeepSpeed, which has nothing of this project.

    python benchmarks/bare.py qwen3-30b-a3b --num-layers 8 --compile
    python benchmarks/bare.py llama-3.1-8b --engine zero3

fp32 master weights, bf16 compute, whole logits; compiled: each block, and the loss. Prints the median of the passes and
their peak.
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
MODEL_HELP = "a file in benchmarks/models or a preset, without .json, or the path of one"
ENGINES = ("fsdp2", "zero1", "zero3")


def find_config(name: str) -> Path:
    """Return the config of a model, as it was published: one of those here, one that the project ships, or a file."""
    if name.endswith(".json"):
        return Path(name)
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
    config: Any,
    attention: str,
    compiled: bool,
    device: torch.device,
    engine: str = "fsdp2",
    lora: Path | None = None,
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], object]]:
    """Return a function that runs forward and backward over ids [1, tokens], and one that clears the gradients.

    lora  where the adapter that the model is given is saved, of rank 16 on every linear layer; None: all is trained
    """
    with device:
        dtype = torch.float32 if engine == "fsdp2" else torch.bfloat16
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")).save_pretrained(str(lora))
    layers = model.model.layers
    is_compiled_zero3 = compiled and engine == "zero3"
    for layer in layers if compiled else ():
        if is_compiled_zero3:
            # A graph of its hooks would be another for each layer.
            layer.forward = torch.compile(layer.forward)
        else:
            layer.compile()
    loss_of = torch.compile(compute_loss) if compiled else compute_loss
    model.train()
    if engine == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*layers, model):
            fully_shard(module, mp_policy=policy)
        backward, clear = torch.Tensor.backward, model.zero_grad
    else:
        import deepspeed

        if is_compiled_zero3:
            # DeepSpeed's hooks are on every module unless a block is a leaf; inside a graph each is traced anew.
            deepspeed.utils.set_z3_leaf_modules(model, {type(layer) for layer in layers})
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model, *_ = deepspeed.initialize(
            model=model,
            optimizer=StillOptimizer(trained, lr=0.0),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                # DeepSpeed's own linear function reads a parameter's id, which makes a graph of each layer.
                "zero_optimization": {
                    "stage": int(engine.removeprefix("zero")),
                    "memory_efficient_linear": not is_compiled_zero3,
                },
                "zero_allow_untested_optimizer": True,
            },
            dist_init_required=False,
        )
        backward, clear = model.backward, model.step

    def run(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = loss_of(model(input_ids=ids, use_cache=False).logits[0], ids[0])
        backward(loss)
        return loss.detach()

    return run, clear


class StillOptimizer(torch.optim.SGD):
    """An optimizer that leaves the weights as they are."""

    def step(self, closure: Any = None) -> Any:
        pass


def compute_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:-1].float(), ids[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--attention", default="sdpa", help="transformers' name, as flex_attention")
    parser.add_argument("--engine", choices=ENGINES, default="fsdp2")
    parser.add_argument("--lora", type=Path, help="train an adapter, and save it in this folder")
    parser.add_argument("--passes", type=int, default=12)
    given = parser.parse_args()
    dist.init_process_group("cuda:nccl,cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda")
    config = read_config(given.model, given.num_layers)
    run, clear = build(config, given.attention, given.compile, device, given.engine, given.lora)
    ids = torch.randint(config.vocab_size, (1, given.tokens), device=device)
    seconds = []
    for _ in range(given.passes):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        run(ids)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        clear()
    peak = torch.cuda.max_memory_allocated()
    print(f"{given.model}: {statistics.median(seconds[4:]) * 1e3:.1f} ms, peak {peak / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
