"""Compare ring attention with flash-attn on one GPU, and with bare calls of ring-flash-attn.

    torchrun --nproc-per-node 2 -m benchmarks ring_attention --tokens 32768

Forward and backward of one attention layer of Llama 3.1 8B (32 query heads, 8 key-value heads of 128) in bf16, as
long as on the slowest rank. `again` is the control: the first contestant a second time.
Efficiency is the time of the whole row on one GPU over N times the ring's, with flash-attn there and with the fastest
kernel there, which for one long document is cuDNN's.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actor_init.attention.cudnn import cudnn_dense
from actor_init.attention.kernels import flash_attn_varlen
from actor_init.attention.ring_attention import import_ring_flash_attn, ring_cudnn, ring_flash_attn, ring_sdpa
from actor_init.attention.ring_split import RingSlice, compute_ring_indices
from actor_init.spec import ParallelSpec
from actor_init.world import World
from benchmarks.harness import Answers, Column, Sample, alternate, make_parser, table

HEADS, KEY_VALUE_HEADS, HEAD_DIM = 32, 8, 128
Pass = Callable[[], object]


def main() -> int:
    parser = make_parser(__doc__, rounds=30)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--documents", type=int, default=3, help="documents in the packed row for llama3's form")
    parser.add_argument("--head-strides", type=int, nargs="+", default=[1, 4, 8])
    arguments = parser.parse_args()
    with World.from_env(ParallelSpec(ring=int(os.environ["WORLD_SIZE"]))) as world:
        step = arguments.tokens // arguments.documents
        several = torch.tensor([*range(0, step * arguments.documents, step), arguments.tokens], dtype=torch.int32)
        one = torch.tensor([0, arguments.tokens], dtype=torch.int32)
        show_link(world)
        compare(world, one, "zigzag, one document", [1], arguments)
        compare(world, several, f"llama3, {arguments.documents} documents", arguments.head_strides, arguments)
    return 0


def show_link(world: World, num_bytes: int = 1 << 30) -> None:
    """Measure how fast the ranks exchange data: the figures below depend on it."""
    part = torch.empty(num_bytes // world.world_size, dtype=torch.uint8, device=world.device)
    whole = torch.empty(num_bytes, dtype=torch.uint8, device=world.device)
    took = min(timed(world, lambda: dist.all_gather_into_tensor(whole, part)) for _ in range(5))
    if world.rank == 0:
        print(
            f"all-gather of {num_bytes >> 20} MiB: {(num_bytes - len(part)) / took / 1e9:.1f} GB/s into a rank",
            flush=True,
        )


def compare(world: World, borders: Tensor, title: str, head_strides: list[int], given: argparse.Namespace) -> None:
    on_cuda = world.device.type == "cuda"
    contestants: dict[str, Pass] = {}
    length = int(borders[-1])
    if on_cuda:
        whole = pass_of(
            flash_attn_varlen,
            layer_inputs(length, world),
            cu_seq_lens_q=borders.to(world.device),
            max_length_q=int(borders.diff().max()),
        )
        contestants = {"flash-attn, one GPU": whole, "again": whole}
        if len(borders) == 2:
            contestants["cuDNN, one GPU"] = pass_of(cudnn_dense, layer_inputs(length, world))
    for stride in head_strides:
        ring = compute_ring_indices(borders, world.ring_group, head_stride=stride, may_zigzag=True).to(world.device)
        inputs = layer_inputs(len(ring.local_index_L), world)
        contestants[f"ours, {stride} heads"] = pass_of(ring_flash_attn if on_cuda else ring_sdpa, inputs, ring=ring)
        if on_cuda:
            contestants[f"bare, {stride} heads"] = bare(ring, inputs)
        if on_cuda and ring.is_zigzag:
            contestants["cuDNN's blocks"] = pass_of(ring_cudnn, inputs, ring=ring)
    answers = Answers(given, f"ring_attention {title}", writes=world.rank == 0)
    whole_row = [name for name in contestants if name.endswith("one GPU")]
    measuring = {
        name: partial(measured, world, run, 1 if name in (*whole_row, "again") else world.world_size)
        for name, run in contestants.items()
    }
    figures = alternate(measuring, answers, rounds=given.rounds, warmup=3)
    if world.rank:
        return
    columns = [Column("median ms", "s", ".3f", 1e3)]
    if whole_row:
        fastest = min(whole_row, key=lambda name: median(one["s"] for one in figures[name]))
        columns.append(Column("efficiency", "of all ranks", ".3f", of=whole_row[0], is_speed=True))
        columns.append(Column("of the fastest", "of all ranks", ".3f", of=fastest, is_speed=True))
    print(f"\n{answers.machine}: {title}, {length:,} tokens, {world.world_size} ranks\n")
    print(table("contestant", figures, columns))
    for name in figures:
        if name.startswith("bare"):
            print(f"{name} / ours: {Column('', 's', '.3f', of=name.replace('bare', 'ours')).cell(figures, name)}")


def layer_inputs(num_tokens: int, world: World) -> list[Tensor]:
    """Return query, key and value as transformers has them (views of [1, L, heads, D]), and the output's gradient."""
    torch.manual_seed(world.rank)

    def made(num_heads: int) -> Tensor:
        return torch.randn(1, num_tokens, num_heads, HEAD_DIM, device=world.device, dtype=torch.bfloat16)

    def projected(num_heads: int) -> Tensor:
        return made(num_heads).transpose(1, 2).requires_grad_()

    return [projected(HEADS), projected(KEY_VALUE_HEADS), projected(KEY_VALUE_HEADS), made(HEADS)]


def pass_of(kernel: Callable[..., Any], inputs: list[Tensor], **where: Any) -> Pass:
    query, key, value, gradient = inputs

    def run() -> None:
        out, _ = kernel(None, query, key, value, None, **where)
        torch.autograd.grad(out, (query, key, value), gradient)

    return run


def bare(ring: RingSlice, inputs: list[Tensor]) -> Pass:
    """Call ring-flash-attn as its own tests do: tokens before heads, no adapter."""
    functions = import_ring_flash_attn()
    query, key, value = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in inputs[:3])
    gradient = inputs[3]

    def zigzag() -> None:
        out = functions.zigzag_ring_flash_attn_func(query, key, value, causal=True, group=ring.group)
        torch.autograd.grad(out, (query, key, value), gradient)

    query0, key0, value0 = (t[0].detach().requires_grad_() for t in (query, key, value))

    def llama3() -> None:
        out = functions.llama3_flash_attn_varlen_func(
            query0,
            key0,
            value0,
            ring.cu_seq_lens_q,
            ring.cu_seq_lens_k,
            ring.max_length_q,
            ring.max_length_k,
            heads_k_stride=ring.head_stride,
            local_k_slice=slice(ring.first_key, ring.end_key),
            causal=True,
            group=ring.group,
        )
        torch.autograd.grad(out, (query0, key0, value0), gradient[0])

    return zigzag if ring.is_zigzag else llama3


def measured(world: World, run: Pass, num_ranks: int, number: int) -> list[Sample]:
    """Return the seconds of a pass on the slowest rank, and of as many ranks as work on the row."""
    world.barrier()
    slowest = torch.tensor(timed(world, run), device=world.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [{"s": slowest.item(), "of all ranks": slowest.item() * num_ranks}]


def timed(world: World, run: Pass) -> float:
    if world.device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    start: Any = torch.cuda.Event(enable_timing=True)
    stop: Any = torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
