"""Compile transformer blocks and the loss with torch.compile, one graph per kind of block, and count the graphs."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch._dynamo.config
from torch import nn
from torch._dynamo.utils import counters

from actor_init.option_values import Compile, CompileLengths, UsageError
from capture.facts import Setting

# Dynamo's names of all arguments of a block's forward, except self; those of a loss begin with `loss_`. What is inside
# a mask of flex attention is left to torch, which makes a symbol of what it saw change: else windows and sizes of
# blocks, constants in a job's kernel, would be symbols too. `mask_mod` and capitals are arguments of torch's maker of
# masks.
BLOCK_ARGUMENTS = r"L\['(?!self'\]|loss_|mask_mod'\]|[A-Z])(?!.*attention_mask'\]\.(?!_base)).*"
# Dynamo's default of 8 would leave layers uncompiled where each has a graph of its own.
MAX_GRAPHS_PER_BLOCK = 64
ResultT = TypeVar("ResultT")


def compile_blocks(blocks: Iterable[nn.Module], *, lengths: CompileLengths = CompileLengths.DYNAMIC) -> None:
    """Compile each block's forward in place.

    lengths  dynamic: one graph for any length; static: one for each; automatic: torch's default, one for the first
             length, and when another comes, one for what may differ

    It compiles `forward` rather than the module, so that hooks (FSDP2's, ZeRO-3's) and gradient checkpointing stay
    outside the graph and parameter names do not change. It does not use `dynamic=True`, which under FSDP2 also makes
    symbols of the head sizes that a block keeps as attributes: they are constants in the graph that a job compiles.

    Raises UsageError if this torch has no way to say which lengths are dynamic.
    """
    if not hasattr(torch.compiler.config, "dynamic_sources"):
        setting = Setting("compile", Compile.BLOCKS)
        raise UsageError(setting, f"needs a later torch than {torch.__version__}, as 2.8", "Leave it out")
    torch._dynamo.config.recompile_limit = MAX_GRAPHS_PER_BLOCK
    torch.compiler.config.dynamic_sources = BLOCK_ARGUMENTS if lengths is CompileLengths.DYNAMIC else ""
    if lengths is CompileLengths.DYNAMIC:
        _fuse_norms_at_any_length()
    for block in blocks:
        block.forward = compile_function(block.forward, lengths)


def compile_function(function: Callable[..., ResultT], lengths: CompileLengths) -> Callable[..., ResultT]:
    return torch.compile(function, dynamic=False if lengths is CompileLengths.STATIC else None)


def _fuse_norms_at_any_length() -> None:
    """Have inductor fuse the two sums of a norm's backward whatever the number of tokens.

    Since 2.10 torch asks whether that is faster: whether tokens times width are 5 Mi, and tokens twice the width. The
    answers are conditions of a graph: for a width of 4,096, rows of 1,000 tokens, of 5,000 and of 9,000 compile three.
    """
    import torch._inductor.config

    triton = torch._inductor.config.triton
    if hasattr(triton, "mix_order_reduction_non_strict_mode"):
        triton.mix_order_reduction_non_strict_mode = True
    # torch 2.10 has no mode without the question, so the fusion is turned off.
    elif hasattr(triton, "mix_order_reduction"):
        triton.mix_order_reduction = False


def count_graphs() -> int:
    """Count the graphs that dynamo has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])
