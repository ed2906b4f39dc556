"""On one rank FSDP2 joins gradients without a list of their pieces, and copies none; they are those of stock FSDP2."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from actor_init.backends.fsdp2_one_rank import OneRankReduceScatter, join_gradients, spare_one_rank
from actor_init.spec import ParallelSpec
from actor_init.world import World

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="nothing is spared before torch 2.9"
)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.from_env(ParallelSpec()) as opened:
        yield opened


class CountsCopies(TorchDispatchMode):
    """Counts copies of a tensor to itself, which torch leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_to_itself = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.num_to_itself += func._schema.name == "aten::copy_" and args[0] is args[1]
        return func(*args, **(kwargs or {}))


def make_model(world: World, *, spared: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, bias=False)) for _ in range(3)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model, model):
        fully_shard(module, mesh=world.weights_mesh["shard"], mp_policy=policy)
    if spared:
        spare_one_rank(model, world.device)
    return model


def run_backward(model: nn.Module) -> None:
    torch.manual_seed(1)
    for _ in range(2):
        model(torch.randn(4, 6)).square().sum().backward()


def read_gradients(model: nn.Module) -> dict[str, Tensor]:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(isinstance(gradient, DTensor) for gradient in gradients.values())
    return {name: gradient.to_local() for name, gradient in gradients.items() if isinstance(gradient, DTensor)}


def test_gradients_of_two_accumulated_passes_are_stock_fsdp2_s(world: World) -> None:
    stock, spared = make_model(world, spared=False), make_model(world, spared=True)
    for model in (stock, spared):
        run_backward(model)
    expected = read_gradients(stock)
    assert len(expected) == 9
    assert all(gradient.abs().sum() > 0 for gradient in expected.values())
    for name, gradient in read_gradients(spared).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)


def test_no_list_of_pieces_is_made_and_no_gradient_copied(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("torch lists the pieces on the host")

    model = make_model(world, spared=True)
    monkeypatch.setattr(torch, "_chunk_cat", refuse)
    with CountsCopies() as copies:
        run_backward(model)
    # Three blocks, in two passes.
    assert copies.num_to_itself == 6


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_tensors_are_joined_as_torch_joins_them(num_chunks: int) -> None:
    tensors = [torch.randn(4, 3).bfloat16(), torch.randn(2).bfloat16(), torch.randn(6, 1, 2).bfloat16()]
    out = torch.empty(num_chunks, sum(tensor.numel() for tensor in tensors) // num_chunks)
    expected = torch._chunk_cat(tensors, 0, num_chunks).float()
    join_gradients(tensors, 0, num_chunks, out)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_a_result_is_the_tensor_that_was_to_be_reduced() -> None:
    comm = OneRankReduceScatter()
    cpu = torch.device("cpu")
    joined = comm.allocate((6,), dtype=torch.float32, device=cpu)
    assert comm.allocate((6,), dtype=torch.float32, device=cpu) is joined
    assert comm.allocate((6,), dtype=torch.float32, device=cpu) is not joined


def test_a_tensor_left_by_a_backward_that_failed_is_no_other_module_s() -> None:
    comm = OneRankReduceScatter()
    cpu = torch.device("cpu")
    comm.allocate((6,), dtype=torch.float32, device=cpu)
    joined = comm.allocate((8,), dtype=torch.float32, device=cpu)
    assert joined.shape == (8,)
    assert comm.allocate((8,), dtype=torch.float32, device=cpu) is joined
