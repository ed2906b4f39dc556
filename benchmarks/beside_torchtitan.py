"""Compare the replay's speed and memory with torchtitan's, in one process, in blocks of passes that alternate.

    python -m benchmarks beside_torchtitan --form compiled --rounds 4 --kernels fused
    python -m benchmarks beside_torchtitan --form compiled --model qwen3-30b-a3b --layers 8
    torchrun --nproc-per-node 2 -m benchmarks beside_torchtitan --form compiled
    torchrun --nproc-per-node 2 -m benchmarks beside_torchtitan --form compiled --tp 2 --sequence-parallel

torchtitan 0.2.2 must be importable (its wheel alone does: packages that it imports and that this comparison does not
use are stood in for). Both run the model over one document, forward and backward, fp32 masters and bf16 compute under
FSDP2: torchtitan its own model, `apply_tp` (sequence and loss parallel), `apply_compile`, `apply_fsdp` and loss;
the replay what a user gets from `replay --backend fsdp2`, with the options behind this script's own. A third series,
torchtitan again, is the control.

It prints tokens a second, the peak of each without what the other holds, for the dense model its FLOP/s as share of a
measured matrix multiplication (6 FLOPs a parameter and token without the embedding, 6 * layers * width * tokens for
causal attention), and from one profiled pass of each where the time goes.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest.mock import MagicMock

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from actor_init.world import World
from benchmarks.bare import find_config
from benchmarks.harness import Answers, Column, Contestant, Sample, alternate, make_parser, table
from benchmarks.long_input import write_inputs
from benchmarks.sides import Side, describe_parts, hold, open_replay, run_block, time_pass
from replay.command_line.cli import parse_command_line

# By the name of a config: torchtitan's package, its name of the size, and of a tiny one.
MODELS = {
    "llama-3.1-8b": ("llama3", "8B", "debugmodel"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B", "debugmodel_moe"),
}
UNUSED = ("datasets", "torchdata", "tokenizers", "tyro", "wandb", "tomli")


def main() -> int:
    parser = make_parser(__doc__, rounds=4)
    parser.add_argument("--form", choices=("eager", "compiled"), default="eager")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--passes", type=int, default=4, help="measured passes a block")
    parser.add_argument("--warmup", type=int, default=2, help="passes before them")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script on a CPU")
    arguments, replay_arguments = parser.parse_known_args()
    compiled = arguments.form == "compiled"
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs"
        count = int(os.environ.get("WORLD_SIZE", "1"))
        write_inputs(inputs, num_tokens=arguments.tokens, vocabulary=256 if arguments.tiny else 128256, count=count)
        options = ["--backend", "fsdp2", "--inputs", str(inputs), "--max-inputs", "1", "--log-folder", folder]
        options += replay_arguments
        options += ["--num-layers", str(arguments.layers)] if not arguments.tiny else []
        name = "tiny-moe" if arguments.tiny else arguments.model
        options += ["--model", str(find_config(name))]
        options += ["--compile"] if compiled else []
        spec = parse_command_line(options).args[0].spec
        with World.from_env(spec.actor.parallel) as world:
            ceiling = _matmul_ceiling(world.device)
            _install_attention_order(world.device)
            theirs = hold(lambda: _torchtitan(arguments, compiled, world), world.device)
            ours = hold(lambda: open_replay(spec, world), world.device)
            sides: dict[str, Contestant] = {
                theirs.name: partial(_run_block, theirs, arguments, world.device),
                ours.name: partial(_run_block, ours, arguments, world.device),
                f"{theirs.name} again": partial(_run_block, theirs, arguments, world.device),
            }
            answers = Answers(
                arguments, f"beside_torchtitan {arguments.form}", more=replay_arguments, writes=world.rank == 0
            )
            figures = alternate(sides, answers, rounds=arguments.rounds, warmup=0)  # a block has its own
            if world.rank == 0:
                print(answers.machine)
                _print(figures, arguments, ceiling)
            for side in (theirs, ours):
                parts = describe_parts(side.name, side.run, world.device)
                if world.rank == 0:
                    print(parts)
    return 0


def _run_block(side: Side, arguments: argparse.Namespace, device: torch.device, number: int) -> list[Sample]:
    sample = run_block(side, device, num_warmup=arguments.warmup, num_passes=arguments.passes, number=number)
    speed = arguments.tokens / sample["s"]
    if MODELS[arguments.model][0] == "llama3":
        sample = {**sample, "FLOP/s": _flops_a_token(arguments.layers, arguments.tokens) * speed}
    return [{**sample, "tokens/s": speed}]


def _torchtitan(arguments: argparse.Namespace, compiled: bool, world: World) -> Side:
    package, size, tiny = MODELS[arguments.model]
    is_dense = package == "llama3"
    # Only a mixture of experts calls torchtitan's kernels.
    _stand_in_for(*UNUSED, *(("torchtitan.models.moe.kernels",) if is_dense else ()))
    library = import_module(f"torchtitan.models.{package}")
    parallelize = import_module(f"torchtitan.models.{'llama3' if is_dense else 'llama4'}.infra.parallelize")
    loss_of = import_module("torchtitan.components.loss").cross_entropy_loss
    sizes = library.llama3_args if is_dense else library.qwen3_args
    config = replace(sizes[tiny if arguments.tiny else size], max_seq_len=arguments.tokens)
    if not arguments.tiny:
        config = replace(config, n_layers=arguments.layers)
    with torch.device("meta"):
        model = library.Transformer(config) if is_dense else library.Qwen3Model(config)
    tp_mesh = world.weights_mesh["tp"]
    if tp_mesh.size() > 1:
        parallelize.apply_tp(model, tp_mesh, loss_parallel=True, enable_float8_tensorwise_tp=False)
    if compiled:
        compile_config = import_module("torchtitan.config.job_config").Compile(enable=True)
        parallelize.apply_compile(model, compile_config, **({} if is_dense else {"ep_enabled": False}))
        loss_of = torch.compile(loss_of)
    parallelize.apply_fsdp(model, world.weights_mesh["shard"], torch.bfloat16, torch.float32, pp_enabled=False)
    if world.device.type == "cpu":  # gloo has no sum that multiplies first
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=world.device)
    with torch.no_grad():
        model.init_weights(buffer_device=world.device)
    model.train()
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab_size, (1, arguments.tokens), device=world.device)
    labels = tokens.roll(-1, 1)

    def train() -> None:
        with loss_parallel() if tp_mesh.size() > 1 else nullcontext():
            loss = loss_of(model(tokens), labels) / arguments.tokens
            loss.backward()

    def run() -> tuple[float, int]:
        measured = time_pass(train, world.device)
        model.zero_grad(set_to_none=True)
        return measured

    return Side(name="torchtitan", run=run)


def _stand_in_for(*unused: str) -> None:
    missing = [name for name in unused if "." in name or importlib.util.find_spec(name) is None]
    parts = [name + part for name in missing for part in ("", ".distributed", ".stateful_dataloader")]
    for module in (*parts, "torch.utils.tensorboard"):
        sys.modules[module] = MagicMock(__spec__=None, StatefulDataLoader=type("StatefulDataLoader", (), {}))


def _install_attention_order(device: torch.device) -> None:
    """Have torch choose its order of attention kernels, cuDNN's first on a Hopper, before torchtitan sets one.

    torch chooses at the first attention of a process. If that is within torchtitan's `sdpa_kernel(set_priority=True)`
    its choice is lost when the context ends, and the replay would run flash attention (pytorch/pytorch#140467; torch
    2.11: 52.6 ms for cuDNN's 27.2).
    """
    query = torch.zeros(1, 1, 16, 64, device=device, dtype=torch.bfloat16)
    torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)


def _matmul_ceiling(device: torch.device) -> float:
    """Return FLOP/s of a bf16 matrix multiplication of 8,192 (256 on a CPU) in each dimension, random data."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []

    def multiply() -> None:
        for _ in range(10):
            a @ b

    for _ in range(13):
        seconds, _ = time_pass(multiply, device)
        times.append(seconds / 10)
    return 2.0 * float(size) ** 3 / statistics.median(times[3:])


def _flops_a_token(num_layers: int, num_tokens: int) -> float:
    width, hidden, key_values, vocabulary = 4096, 14336, 1024, 128256
    layer = 2 * width * width + 2 * width * key_values + 3 * width * hidden
    parameters = num_layers * layer + width * vocabulary
    return 6.0 * parameters + 6 * num_layers * width * num_tokens


def _print(figures: Mapping[str, Sequence[Sample]], arguments: argparse.Namespace, ceiling: float) -> None:
    columns = (
        Column("ms", "s", ".1f", 1e3),
        Column("tokens/s", "tokens/s", ",.0f"),
        Column("of torchtitan's", "s", ".3f", of="torchtitan", is_speed=True),
        Column("peak GiB", "peak", ".1f", 2**-30, reduce=max),
        Column("of torchtitan's", "peak", ".3f", of="torchtitan"),
        Column("TFLOP/s", "FLOP/s", ".0f", 1e-12),
        Column("of the ceiling", "FLOP/s", ".3f", 1 / ceiling),
    )
    print(f"\n{table(f'side, {arguments.form}', figures, columns)}")
    print(
        f"\nmatrix multiplication {ceiling / 1e12:.0f} TFLOP/s; {arguments.rounds} blocks of "
        f"{arguments.passes} passes a side"
    )
