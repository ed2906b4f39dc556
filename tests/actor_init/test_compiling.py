"""What of a compiled block is a symbol: how long its inputs are and what else it is given, and nothing of its own."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from actor_init.compiling import compile_blocks
from actor_init.option_values import CompileLengths, UsageError
from replay.options.option_parsing import format_error_with_flags


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

    def keep_graph(graph: GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep_graph))
    block = Block()
    # `fully_shard` tells dynamo so.
    if is_managed:
        vars(block).update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)
    compile_blocks([block], lengths=lengths)
    for length in (6, 9, 5):
        hidden_BSH = torch.rand(1, length, 8)
        expected = hidden_BSH.reshape(1, length, 2, 4) * length
        torch.testing.assert_close(block(hidden_BSH, longest=length), expected)
    assert len(graphs) == num_graphs
    sizes = [node.args[2] for graph in graphs for node in graph.graph.nodes if node.target == "unflatten"]
    assert sizes == [(-1, 4)] * len(graphs)


def test_inductor_puts_no_condition_on_the_number_of_tokens_into_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("torch._inductor.config").triton
    if not hasattr(triton, "mix_order_reduction"):
        pytest.skip("this torch has no such fusion")
    monkeypatch.setattr(triton, "mix_order_reduction_non_strict_mode", False)
    compile_blocks([], lengths=CompileLengths.STATIC)
    assert not triton.mix_order_reduction_non_strict_mode
    compile_blocks([])
    assert triton.mix_order_reduction_non_strict_mode


def test_a_torch_without_dynamic_lengths_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.compiler.config", SimpleNamespace())
    with pytest.raises(UsageError) as refusal:
        compile_blocks([nn.Linear(2, 2)])
    assert (
        format_error_with_flags(refusal.value)
        == f"--compile needs a later torch than {torch.__version__}, as 2.8. Leave it out"
    )
