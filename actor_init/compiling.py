"""torch.compile: one graph per kind of transformer block, and how many graphs there are by now."""

from collections.abc import Iterable

import torch
import torch._dynamo.config
from torch import nn
from torch._dynamo.utils import counters

ARGUMENTS = r"L\['(?!self'\]).*"  # in dynamo's names: all that a block's forward is given, and nothing of its own
MAX_GRAPHS_PER_BLOCK = 64  # where there is one for each layer, dynamo's 8 would leave the others uncompiled


def compile_blocks(blocks: Iterable[nn.Module], *, any_length: bool = True) -> None:
    """Compile each block's forward in place: one graph for any length, or one for each.

    Its `forward` and not the module: hooks (FSDP2's, ZeRO-3's) and gradient checkpointing stay outside the graph, and
    parameter names stay as they are. Not `dynamic=True`, which makes symbols also of the sizes of heads that a block
    keeps as attributes, where FSDP2 manages it: they are constants in the graph that a job compiles.
    """
    torch._dynamo.config.recompile_limit = MAX_GRAPHS_PER_BLOCK
    torch.compiler.config.dynamic_sources = ARGUMENTS if any_length else ""
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=None if any_length else False)


def num_graphs() -> int:
    """Graphs that dynamo has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])
