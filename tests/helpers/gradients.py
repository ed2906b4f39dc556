"""Gathered gradients against the reference's, parameter by parameter.

A total norm hides a mistake in a small parameter: what counts here is each parameter's own relative error.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.helpers.reference import Reference

GRADIENT_BOUND = 1e-4  # relative norm of a parameter's error: fp32 sums in another order
SMALLEST_SHARE = 1e-5  # of the total norm: below it a gradient may be the rounding of larger ones that cancel


def gradient_errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of each whole gradient in `found`, by parameter name; both have to have the same names.

    Expected gradients have to be large enough for a relative error to mean something: choose other weights otherwise.
    """
    assert found.keys() == expected.keys()
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    total = float(torch.tensor(list(norms.values())).norm())
    assert min(norms.values()) > SMALLEST_SHARE * total, min(norms, key=norms.__getitem__)
    return {name: float((found[name].double() - expected[name]).norm()) / norm for name, norm in norms.items()}


def windows_in(path: Path) -> list[dict[str, Tensor]]:
    """The gathered gradients of each accumulation window, as tests.helpers.gradient_worker wrote them."""
    windows: list[dict[str, Tensor]] = torch.load(path)
    return windows


def assert_gradients_are_the_reference_s(path: Path, sources: Sequence[Sequence[Path]], reference: Reference) -> None:
    """`path` is a gradient worker's file; `sources` has the captures that each window averages, of all data ranks."""
    windows = windows_in(path)
    assert len(windows) == len(sources)
    for window, captures in zip(windows, sources, strict=True):
        errors = gradient_errors(window, reference.gradients(captures))
        wrong = {name: error for name, error in errors.items() if not error < GRADIENT_BOUND}
        assert not wrong, f"{[capture.name for capture in captures]}: {wrong}"
