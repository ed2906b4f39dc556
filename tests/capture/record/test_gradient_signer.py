"""At which steps gradients are signed, and what of a gradient in an unusual layout is."""

import torch
from torch import nn

from capture.record.gradient_signer import MAX_FIRST_STEPS, MAX_SIGNED, MICROSECONDS_PER_STEP, GradientSigner
from capture.record.parameter_sampler import ParameterSampler


def make_model(num_parameters: int, size: int = 2) -> nn.Module:
    parameters = [nn.Parameter(torch.arange(1.0, 1.0 + size)) for _ in range(num_parameters)]
    return nn.ParameterList(parameters)


def list_signed_steps(model: nn.Module, num_steps: int, device_type: str | None = None) -> list[int]:
    signer = GradientSigner(ParameterSampler(model))
    return [number for number in range(num_steps) if signer.begin_step(device_type)]


def test_the_first_steps_are_signed_and_then_so_few_that_it_costs_next_to_nothing() -> None:
    first = list(range(MAX_FIRST_STEPS))
    assert list_signed_steps(make_model(7), 12) == list(range(12))
    # 300 parameters of 8 microseconds each are 2.4 ms, of which a step may cost 70 microseconds.
    assert list_signed_steps(make_model(300), 100, "cuda") == [*first[:6], 35, 70]
    # A CPU reads 2 million elements in 2 ms.
    assert list_signed_steps(make_model(20, 100_000), 70) == [*first[:7], 31, 62]
    assert list_signed_steps(make_model(2, 20_000_000), 3) == [0]
    assert MICROSECONDS_PER_STEP <= 0.001 * 70_000


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
