"""Which elements of a gradient are its signature, and how signatures are written."""

import math

import pytest

from capture.file_format.gradient_signature import (
    MAX_SIGNATURE_ELEMENTS,
    GradientSignature,
    choose_signature_elements,
    find_held_elements,
)
from capture.file_format.micro_batch import CaptureError
from capture.file_format.optimizer_step import OptimizerStep, merge_steps

SIGNATURE = GradientSignature(
    name="a.weight", shape=(8, 4), is_part=True, norm=2.5, start=1, stride=3, values=(0.5, -math.inf, 1e-30)
)


@pytest.mark.parametrize("shape", [(32,), (32, 32), (97, 32), (64, 1024), (), (1,), (50257, 768), (3, 3)])
def test_the_elements_lie_all_over_the_parameter(shape: tuple[int, ...]) -> None:
    size, width = math.prod(shape), shape[-1] if shape else 1
    start, stride, count = choose_signature_elements("a.weight", shape)
    elements = [start + number * stride for number in range(count)]
    assert count == min(MAX_SIGNATURE_ELEMENTS, size)
    assert all(0 <= element < size for element in elements)
    assert stride == 1 or len({element % width for element in elements}) == min(width, count)
    assert elements[-1] - elements[0] > 0.7 * size or stride == 1


@pytest.mark.parametrize(("first", "end"), [(0, 40), (0, 7), (5, 6), (12, 12), (18, 40), (8, 9), (39, 40), (38, 39)])
def test_a_shard_holds_those_that_lie_in_it(first: int, end: int) -> None:
    elements = [8 + number * 5 for number in range(7)]
    number, count = find_held_elements(8, 5, 7, first, end)
    assert [element for element in elements if first <= element < end] == elements[number : number + count]


def test_a_step_is_written_with_its_signatures_and_read_again() -> None:
    step = OptimizerStep(number=0, passes=(1,), shares=(1.0,), signatures=(SIGNATURE,))
    [read] = OptimizerStep.from_json(step.to_json(), "x").signatures
    assert (read.name, read.shape, read.is_part, read.start, read.stride) == ("a.weight", (8, 4), True, 1, 3)
    assert (read.norm, *read.values) == pytest.approx((2.5, 0.5, -math.inf, 1e-30))


def test_of_two_parts_of_a_step_both_signatures_are_kept() -> None:
    first = OptimizerStep(number=0, passes=(1,), shares=(1.0,), signatures=(SIGNATURE,))
    other = GradientSignature(name="b", shape=(2,), is_part=False, norm=1.0, start=0, stride=1, values=(1.0, 0.0))
    merged = merge_steps(first, OptimizerStep(number=0, passes=(1,), shares=(1.0,), signatures=(other,)))
    assert {signature.name for signature in merged.signatures} == {"a.weight", "b"}


@pytest.mark.parametrize("broken", ['[["a", [2], false, 0, 1, "AA"]]', '[["a", [2], 0, 0, 1, "AAAAAA=="]]', '[["a"]]'])
def test_a_broken_signature_is_refused(broken: str) -> None:
    text = OptimizerStep(number=0, passes=(1,), shares=(1.0,)).to_json()
    with pytest.raises(CaptureError, match="no record of an optimizer step"):
        OptimizerStep.from_json(text.replace('"signatures": []', f'"signatures": {broken}'), "x")
