"""How many layers a traced tensor has come through, and the bound that follows: made distances."""

from collections.abc import Sequence

import pytest

from replay.tracing.distances import TensorDistance
from replay.tracing.first_difference import choose_bounds, count_layers_passed
from replay.tracing.trace_file import TensorKey, TensorKind

BF16 = 2.0**-8


def find_layer(name: str) -> int | None:
    return int(name[1:]) if name[0] == "l" else None


def far(kind: TensorKind, name: str, relative: float = 0.0, step: int = 0) -> TensorDistance:
    return TensorDistance(key=TensorKey(kind, name, "output"), num_steps_before=step, relative=relative)


P, IN, F, G, PG = TensorKind  # in the order in which they are compared


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        # Weights and inputs have come through none; forward through one more with each layer, and not back again.
        ([(P, "l1"), (IN, "ids"), (F, "embed"), (F, "l0"), (F, "l1"), (F, "norm")], [0, 0, 0, 1, 2, 2]),
        ([(F, "l0"), (F, "l2"), (F, "l1"), (F, "head")], [1, 3, 3, 3]),
        # Backward through all of three layers, and then back.
        ([(F, "l2"), (G, "head"), (G, "l2"), (PG, "l2"), (G, "l1"), (G, "l0"), (G, "embed")], [3, 3, 4, 4, 5, 6, 6]),
        ([(F, "embed"), (G, "embed")], [0, 0]),
    ],
)
def test_layers_are_counted_in_the_order_of_the_pass(
    tensors: Sequence[tuple[TensorKind, str]], expected: Sequence[int]
) -> None:
    passed = count_layers_passed([far(*tensor) for tensor in tensors], find_layer)
    assert [each.num_layers for each in passed] == expected
    assert [each.is_backward for each in passed] == [kind in (G, PG) for kind, _ in tensors]


def test_each_step_begins_with_no_layer() -> None:
    steps = [far(F, "l1"), far(F, "norm"), far(F, "embed", step=1), far(F, "l0", step=1)]
    assert [each.num_layers for each in count_layers_passed(steps, find_layer)] == [2, 2, 0, 1]


def choose(distances: Sequence[TensorDistance], *equivalents: Sequence[TensorDistance]) -> list[float]:
    return choose_bounds(distances, equivalents, find_layer, roundoff=BF16, same_dtype=False)


def test_the_floor_of_a_layer_and_direction_is_the_largest_of_all_equivalent_runs() -> None:
    distances = [far(P, "l0"), far(IN, "ids"), far(F, "l0"), far(F, "l1"), far(G, "l1"), far(PG, "l1")]
    formula = 16 * BF16 + 1e-5
    estimates = [1e-5 + 2 * BF16, 0.0, formula * 2**0.5, formula * 3**0.5, formula * 2, formula * 2]
    assert choose(distances) == pytest.approx(estimates)
    # Two runs differ in the first layer's forward: the second layer has a quarter of the formula at least, and no
    # backward was seen to differ.
    measured = choose(distances, [far(F, "l0", 0.1), far(G, "l1", 0.0)], [far(F, "l0", 0.05)])
    assert measured == pytest.approx([*estimates[:2], 0.4, estimates[3] / 4, *estimates[4:]])
    both = choose(distances, [far(F, "l0", 1e-9), far(PG, "l1", 0.2)])
    assert both == pytest.approx([*estimates[:2], estimates[2] / 4, estimates[3] / 4, 0.8, 0.8])
