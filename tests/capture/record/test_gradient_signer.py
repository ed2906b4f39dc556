"""At which steps gradients are signed, and what of a gradient in an unusual layout is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from capture import capture_files, recording
from capture.file_format.capture_file import read_call
from capture.file_format.gradient_signature import GradientSignature
from capture.record import optimizer_hooks
from capture.record.gradient_signer import (
    MAX_FIRST_STEPS,
    MAX_SIGNED,
    MICROSECONDS_PER_PARAMETER,
    MICROSECONDS_PER_STEP,
    GradientSigner,
    RawSignatures,
)
from capture.record.optimizer_hooks import GradientNorms
from capture.record.parameter_sampler import ParameterSampler


def make_model(num_parameters: int, size: int = 2) -> nn.Module:
    parameters = [nn.Parameter(torch.arange(1.0, 1.0 + size)) for _ in range(num_parameters)]
    return nn.ParameterList(parameters)


def list_signed_steps(model: nn.Module, num_steps: int, device_type: str | None = None) -> list[int]:
    signer = GradientSigner(ParameterSampler(model))
    return [number for number in range(num_steps) if signer.begin_step(device_type)]


def test_ranks_that_hold_the_same_part_each_count_it_in_part() -> None:
    """So the squares of all ranks' norms add up to that of the whole, and each rank's elements are its own."""
    signatures = [
        GradientSignature(name=name, shape=(8,), is_part=True, norm=0.0, start=0, stride=1, values=()) for name in "ab"
    ]
    raw = RawSignatures(
        values=torch.tensor([6.0, 5.0, 1.0, 2.0, 3.0]),
        unsigned=tuple(zip(signatures, (1, 2), strict=True)),
        num_copies=(4, 1),
    )
    first, second = raw.to_signatures()
    assert (first.name, first.values, second.name, second.values) == ("a", (1.0,), "b", (2.0, 3.0))
    assert 4 * first.norm**2 == pytest.approx(6.0**2)
    assert second.norm == 5.0
    assert raw.names == {"a", "b"}


def test_the_first_steps_are_signed_and_then_so_few_that_it_costs_next_to_nothing() -> None:
    assert list_signed_steps(make_model(7), 12) == list(range(12))
    # 50 parameters of 8 microseconds each are 0.4 ms: as many as there are at most would be 10.
    assert list_signed_steps(make_model(50), 19, "cuda") == [*range(MAX_FIRST_STEPS), 12, 18]
    # 300 parameters of 8 microseconds each are 2.4 ms, of which a step may cost 70 microseconds.
    assert list_signed_steps(make_model(300), 100, "cuda") == [0, 35, 70]
    # A CPU reads 2 million elements in 2 ms.
    assert list_signed_steps(make_model(20, 100_000), 70) == [0, 31, 62]
    assert list_signed_steps(make_model(2, 20_000_000), 3) == [0]
    assert MICROSECONDS_PER_STEP <= 0.001 * 70_000


def test_a_device_that_reads_long_has_its_gradients_signed_at_fewer_steps_unless_the_job_has_their_norms() -> None:
    # 75 parameters of 29 million elements in bf16: 0.6 ms of the job's thread, and 1.45 ms of the device.
    with torch.device("meta"):
        model = nn.ParameterList([nn.Parameter(torch.empty(29_000_000, dtype=torch.bfloat16)) for _ in range(75)])
    signers = {has_norms: GradientSigner(ParameterSampler(model)) for has_norms in (False, True)}
    signed = {
        has_norms: [number for number in range(61) if signer.begin_step(has_norms=has_norms)]
        for has_norms, signer in signers.items()
    }
    assert signed[False] == [0, 30, 60]
    assert signed[True] == [*range(6), *range(9, 61, 9)]


class NormCounter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._foreach_norm.Scalar
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "num_readings"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_norms_of_the_clipping_are_kept_where_they_are_exact(
    dtype: torch.dtype, num_readings: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 50), nn.Linear(50, 7)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with recording(model, tmp_path, reproduce=True, arguments={"input": "input_ids"}), NormCounter() as counter:
        model(torch.tensor([[1, 2, 2, 4]])).sum().backward()
        gradients = {name: value.grad for name, value in model.named_parameters()}
        expected = {name: float(value.double().norm()) for name, value in gradients.items() if value is not None}
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    [path] = capture_files(tmp_path)
    step = read_call(path).step
    assert step is not None
    assert {signature.name: signature.norm for signature in step.signatures} == pytest.approx(expected, rel=1e-6)
    # The clipping reads the gradients once.
    assert counter.count == num_readings


def test_norms_are_kept_at_the_steps_that_are_signed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []
    steps_with_norms: list[int] = []

    class Keeper(optimizer_hooks.NormKeeper):
        def __init__(self) -> None:
            super().__init__()
            steps_with_norms.append(len(losses) - 1)

    monkeypatch.setattr(optimizer_hooks, "NormKeeper", Keeper)
    # So many parameters take more than twice what a step may on average, so every third step is signed.
    num_parameters = int(2.5 * MICROSECONDS_PER_STEP / MICROSECONDS_PER_PARAMETER)
    layers = [nn.Linear(5, 5, bias=False) for _ in range(num_parameters - 1)]
    model = nn.Sequential(nn.Embedding(5, 5), *layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with recording(model, tmp_path, reproduce=True, arguments={"input": "input_ids"}):
        while len(losses) < MAX_FIRST_STEPS + 6:
            loss = model(torch.tensor([[1, 2, 2, 4]])).sum()
            losses.append(loss.item())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    steps = [read_call(path).step for path in capture_files(tmp_path)]
    signed = [number for number, step in enumerate(steps) if step is not None and step.signatures]
    assert MAX_FIRST_STEPS == 8
    assert signed == steps_with_norms == [*range(8), 9, 12]


def test_a_norm_is_that_of_a_gradient_that_has_not_changed_since() -> None:
    gradient, other = torch.ones(4), torch.ones(4)
    norms = GradientNorms()
    norms.add([gradient], [gradient.norm()])
    assert (norms.find(gradient), norms.find(other)) == (torch.tensor(2.0), None)
    gradient.mul_(2)
    assert norms.find(gradient) is None


def test_a_large_model_is_signed_in_turns() -> None:
    model = make_model(MAX_SIGNED + 10)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    signer = GradientSigner(ParameterSampler(model))
    names: list[set[str]] = []
    for _ in range(1000):
        if not signer.begin_step():
            continue
        signatures = signer.sign()
        assert signatures is not None
        names.append(signatures.names)
        if len(names) == 2:
            break
    assert [len(signed) for signed in names] == [(MAX_SIGNED + 10) // 2] * 2
    assert not names[0] & names[1]


def test_a_gradient_whose_elements_lie_otherwise_has_a_norm_alone() -> None:
    model = nn.Linear(5, 3, bias=False)
    model.weight.grad = torch.arange(15.0).view(5, 3).T
    raw = GradientSigner(ParameterSampler(model)).sign()
    assert raw is not None
    [signature] = raw.to_signatures()
    assert signature.values == ()
    assert signature.norm == float(torch.arange(15.0).norm())


def test_gradients_of_several_dtypes_are_signed_together() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.bfloat16, torch.float64)])
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    raw = GradientSigner(ParameterSampler(model)).sign()
    assert raw is not None
    assert [(signature.norm, signature.values) for signature in raw.to_signatures()] == [(2.0, (1.0,) * 4)] * 2


def test_a_trained_parameter_without_a_gradient_is_named() -> None:
    model = make_model(4)
    first, second, third, _ = model.parameters()
    first.grad = torch.ones(2)
    second.requires_grad_(False)
    third.grad = torch.zeros(2)
    raw = GradientSigner(ParameterSampler(model)).sign()
    assert raw is not None
    assert (raw.names, raw.without) == ({"0", "2"}, ("3",))
