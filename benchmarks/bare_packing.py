"""Compare packed rows, compiled, with padded rows, eager, in bare loops of transformers and FSDP2, on captured inputs.

    python -m benchmarks bare_packing --inputs inputs/my-run --model llama-3.1-8b --num-layers 8 --rounds 3
    python -m benchmarks bare_packing --model tiny-moe --rounds 1                                 # on a CPU

The question is what `side_by_side` asks of the replay: how much faster are packed rows? These loops have nothing of the
replay: FSDP2 over fp32 masters that stay gathered, bf16 compute, whole logits, a mean cross entropy of every real token
but the first. Padded: sdpa, eager. Packed: blocks and loss compiled for any length; on a GPU, flash attention. A third
series, padded again, is the control.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from actor_init.spec import ParallelSpec
from actor_init.world import World
from benchmarks import bare
from benchmarks.harness import Answers, Column, Contestant, Sample, alternate, make_parser, table
from benchmarks.sides import describe_parts, time_pass
from capture import capture_files, read_micro_batch

Rows = tuple[Tensor, Tensor]  # token ids [rows, tokens], and which of them are real

COLUMNS = (
    Column("real tokens/s", "speed", ",.0f"),
    Column("of padded", "speed", ".3f", of="padded"),
    Column("peak GiB, both models included", "peak", ".1f", 2**-30, reduce=max),
)


def main() -> int:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--inputs", type=Path, default=Path("inputs/sample"))
    parser.add_argument("--model", required=True, help=bare.MODEL_HELP)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--max-inputs", type=int, default=10)
    given = parser.parse_args()
    config = bare.read_config(given.model, given.num_layers)
    with World.from_env(ParallelSpec()) as world:
        batches = [batch for path in capture_files(given.inputs) if (batch := read_micro_batch(path)).trains]
        rows = [
            (batch.sequences_BS.to(world.device) % config.vocab_size, batch.attention_mask_BS.bool().to(world.device))
            for batch in batches[: given.max_inputs]
        ]
        runs = {
            name: build(config, packs=packs, device=world.device)
            for name, packs in (("padded", False), ("packed, compiled", True))
        }
        sides: dict[str, Contestant] = {name: _block_of(run, rows, world.device) for name, run in runs.items()}
        sides["padded again"] = sides["padded"]
        answers = Answers(given, "bare_packing")
        figures = alternate(sides, answers, rounds=given.rounds)
        print(
            f"{answers.machine}: {given.rounds} blocks a side\n\n{table('bare loop', figures, COLUMNS)}\n", flush=True
        )
        for name, run in runs.items():
            print(describe_parts(f"first input, {name}", partial(run, rows[0]), world.device), flush=True)
    return 0


def build(config: Any, *, packs: bool, device: torch.device) -> Callable[[Rows], None]:
    """Return a function that runs forward and backward over rows, and clears the gradients."""
    on_gpu = device.type == "cuda"
    with device:
        attention = "flash_attention_2" if packs and on_gpu else "sdpa"
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    for layer in model.model.layers:
        if packs:
            layer.compile(dynamic=True)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    model.train()
    loss_of = torch.compile(compute_loss, dynamic=True) if packs else compute_loss

    def run(rows: Rows) -> None:
        ids, is_real = rows
        positions = (is_real.long().cumsum(1) - 1).clamp(min=0)
        # The first token of a row is no target. The logits at a position are of the token behind it.
        is_target = is_real & (positions > 0)
        if packs:
            ids, positions, is_target = (values[is_real][None] for values in (ids, positions, is_target))
        mask = None if packs else is_real
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        loss_of(logits[:, :-1].flatten(0, 1), ids[:, 1:].masked_fill(~is_target[:, 1:], -100).flatten()).backward()
        model.zero_grad(set_to_none=True)

    return run


def compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


def _block_of(run: Callable[[Rows], None], rows: list[Rows], device: torch.device) -> Contestant:
    def block(_: int) -> list[Sample]:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        seconds, peaks = zip(*(time_pass(partial(run, batch), device) for batch in rows), strict=True)
        return [{"speed": sum(int(is_real.sum()) for _, is_real in rows) / sum(seconds), "peak": float(max(peaks))}]

    return block
