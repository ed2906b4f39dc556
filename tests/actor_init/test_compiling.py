"""What of a compiled block is a symbol: how long its inputs are and what else it is given, and nothing of its own."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from actor_init.compiling import compile_blocks
from actor_init.toggles import CompileLengths


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_size = 4

    def forward(self, hidden_BSH: Tensor, *, longest: int) -> Tensor:
        heads_BSND: Tensor = hidden_BSH.unflatten(-1, (-1, self.head_size))
        return heads_BSND * longest


@pytest.mark.parametrize(
    ("lengths", "num_graphs"), [(CompileLengths.DYNAMIC, 1), (CompileLengths.AUTOMATIC, 2), (CompileLengths.STATIC, 3)]
)
@pytest.mark.parametrize("is_managed", [True, False])
def test_graphs_serve_the_lengths_they_are_to_and_have_constants_for_heads(
    is_managed: bool, lengths: CompileLengths, num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[GraphModule] = []

    def kept(graph: GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=kept))
    block = Block()
    if is_managed:  # by what `fully_shard` tells dynamo
        vars(block).update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)
    compile_blocks([block], lengths=lengths)
    for length in (6, 9, 5):
        hidden_BSH = torch.rand(1, length, 8)
        expected = hidden_BSH.reshape(1, length, 2, 4) * length
        torch.testing.assert_close(block(hidden_BSH, longest=length), expected)
    assert len(graphs) == num_graphs
    sizes = [node.args[2] for graph in graphs for node in graph.graph.nodes if node.target == "unflatten"]
    assert sizes == [(-1, 4)] * len(graphs)
