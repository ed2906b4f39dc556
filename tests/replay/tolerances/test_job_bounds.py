"""The bounds of the verdict, worked out by hand: which dtype, floor and number of values decides."""

import math
from typing import Any

import pytest

from replay.tolerances.difference import absolute_difference, as_share, relative_difference
from replay.tolerances.job_bounds import (
    ACTION_TOKENS,
    GRAD_NORM,
    GRADIENT,
    LOG_PROBS,
    LOSS,
    TOKEN_LOG_PROBS,
    NoiseFloor,
    compute_bound,
    compute_flip_bound,
    compute_norm_bound,
    compute_rms_bound,
    compute_signature_bound,
    compute_tie_distance,
    is_equal_but_for_dtype,
    measure_difference,
)
from replay.tolerances.run_bounds import (
    compute_bound_from_floor,
    compute_layer_bound,
    compute_measured_bound,
    compute_weight_bound,
)

BF16, FP32 = 2.0**-8, 2.0**-24
# Of two layers and eight tokens: half a roundoff, and three times the root of 2 L / N = 1 / 2.
FORMULA = BF16 * (0.5 + 3 / math.sqrt(2))
MANY = 1000  # values, of which the largest is multiplied by 4


@pytest.mark.parametrize(
    ("name", "dtypes", "bound"),
    [
        (LOSS, ["bfloat16"], FORMULA),
        # The coarser dtype counts, whichever comes first.
        (LOSS, ["float32", "bfloat16"], FORMULA),
        (LOG_PROBS, ["bfloat16", "float32"], FORMULA),
        (LOSS, ["float32"], 1e-5),
        (TOKEN_LOG_PROBS, ["float32"], 3e-5),
        (ACTION_TOKENS, ["float32"], 3e-5),
        (GRAD_NORM, ["bfloat16"], 4 * BF16),
        (GRAD_NORM, ["float32"], 1e-4),
        (GRADIENT, ["bfloat16"], 64 * BF16),
        (GRADIENT, ["float32"], 1e-3),
    ],
)
def test_a_bound_follows_from_the_coarser_dtype_and_has_a_least(name: str, dtypes: list[str], bound: float) -> None:
    assert compute_bound(name, dtypes, 2, 8) == pytest.approx(bound)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_pass_without_tokens_is_bound_as_one_of_one_token(num_tokens: int) -> None:
    assert compute_bound(LOSS, ["bfloat16"], 2, num_tokens) == pytest.approx(BF16 * (0.5 + 3 * 2))


@pytest.mark.parametrize(
    ("name", "floor", "values", "bound"),
    [
        # A floor below the formula makes the bound smaller, and one above it larger.
        (LOSS, FORMULA / 8, {}, FORMULA / 2),
        (LOSS, FORMULA / 2, {}, 2 * FORMULA),
        (LOSS, 1e-9, {}, 1e-5),
        # Few values do not raise a bound above the formula, nor above four times the floor.
        (LOSS, FORMULA / 8, {"num_values": 8}, FORMULA),
        (LOSS, FORMULA / 2, {"num_values": 8}, 2 * FORMULA),
        # In a mixture another route may have made the floor, so the formula is the most.
        (LOSS, FORMULA / 2, {"is_mixture": True}, FORMULA),
        (LOSS, FORMULA / 8, {"is_mixture": True}, FORMULA / 2),
        # Of tokens' log-probs all have one floor.
        (ACTION_TOKENS, FORMULA / 8, {"floor_of": TOKEN_LOG_PROBS}, FORMULA / 2),
        (LOSS, FORMULA / 8, {"floor_of": TOKEN_LOG_PROBS}, FORMULA),
        # A gradient's elements are bound by their floor alone, but where it is the least.
        (GRADIENT, 0.01, {}, 0.04),
        (GRADIENT, 0.1, {}, 0.4),
        (GRADIENT, 0.01, {"is_least": True}, 64 * BF16),
        (GRADIENT, 0.1, {"is_least": True}, 0.4),
    ],
)
def test_a_measured_floor_decides_within_the_formula(
    name: str, floor: float, values: dict[str, Any], bound: float
) -> None:
    measured = NoiseFloor(
        value=floor, num_values=values.get("num_values", MANY), is_least=values.get("is_least", False)
    )
    floors = {values.get("floor_of", name): measured}
    found = compute_bound(name, ["bfloat16"], 2, 8, floors, is_mixture=values.get("is_mixture", False))
    assert found == pytest.approx(bound)


@pytest.mark.parametrize(
    ("floor", "values", "bound"),
    [
        (None, {}, 24 * BF16 * 2),
        (None, {"num_layers": 0}, 24 * BF16),
        (NoiseFloor(value=0.01, num_values=8), {}, 0.04),
        (NoiseFloor(value=0.01, num_values=7), {}, 0.06),
        (NoiseFloor(value=0.01, num_values=8, is_least=True), {}, 24 * BF16 * 2),
        (NoiseFloor(value=0.1, num_values=8, is_least=True), {}, 0.4),
        (NoiseFloor(value=1e-9, num_values=8), {}, 1e-3),
        # Steps take two trainings apart; a sum over passes is rounded once a pass.
        (NoiseFloor(value=0.01, num_values=8), {"has_stepped": True}, 0.08),
        (NoiseFloor(value=0.01, num_values=8), {"num_passes": 9}, math.hypot(0.04, 3 * BF16)),
        (
            NoiseFloor(value=0.01, num_values=8),
            {"num_passes": 9, "has_stepped": True},
            math.hypot(0.08, 3 * BF16),
        ),
    ],
)
def test_a_signature_is_bound_by_its_floor_or_its_layers(
    floor: NoiseFloor | None, values: dict[str, Any], bound: float
) -> None:
    known: dict[str, Any] = {"num_layers": 4, "dtypes": ["float32", "bfloat16"], "floor": floor} | values
    assert compute_signature_bound(**known) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("signature_bound", "num_parameters", "bound"),
    [(0.4, 1, 0.2), (0.4, 4, 0.1), (0.4, 1000, 12 * BF16), (1e-4, 1, 5e-4), (0.01, 1, 5e-3), (0.01, 4, 12 * BF16)],
)
def test_a_norm_of_several_parameters_is_sharper_but_for_what_they_share(
    signature_bound: float, num_parameters: int, bound: float
) -> None:
    assert compute_norm_bound(signature_bound, ["bfloat16"], num_parameters) == pytest.approx(bound)


def test_routes_and_means_have_bounds_of_their_own() -> None:
    assert compute_tie_distance(["bfloat16", "float32"], 8) == pytest.approx(8 * BF16 * 4)
    assert compute_tie_distance(["float32"], 8) == pytest.approx(3e-5)
    assert compute_flip_bound(300) == pytest.approx(0.02)
    assert compute_flip_bound(0) == compute_flip_bound(1) == pytest.approx(3.01)
    assert compute_rms_bound(NoiseFloor(value=0.01, num_values=1)) == pytest.approx(0.03)
    assert compute_rms_bound(NoiseFloor(value=1e-6, num_values=1)) == pytest.approx(3e-5)


def test_runs_are_bound_by_layers_by_dtypes_and_by_what_equivalents_showed() -> None:
    assert compute_weight_bound(BF16, same_dtype=True) == 1e-5
    assert compute_weight_bound(BF16, same_dtype=False) == pytest.approx(1e-5 + 2 * BF16)
    assert compute_layer_bound(FP32, 3) == pytest.approx(2 * (16 * FP32 + 1e-5))
    assert compute_measured_bound(0.1, 0.2) == pytest.approx(0.4)
    assert compute_measured_bound(0.01, 0.2) == pytest.approx(0.05)
    # Without a floor fp32's spacing is one; a ceiling limits the factor of few points, and not the floor itself.
    assert compute_bound_from_floor(None, 8, 1.0) == 4 * 2.0**-23
    assert compute_bound_from_floor(0.01, MANY, 0.001) == pytest.approx(0.04)
    assert compute_bound_from_floor(0.01, 8, 0.06) == pytest.approx(0.06)
    assert compute_bound_from_floor(0.01, 8, 9.0) == pytest.approx(0.11, rel=0.05)


@pytest.mark.parametrize(
    ("recorded", "replayed", "difference"),
    [
        (4.0, 5.0, 0.25),
        (-4.0, -5.0, 0.25),
        # Below 1 a difference is absolute.
        (0.5, 0.75, 0.25),
        (0.0, 0.25, 0.25),
        (math.nan, math.inf, 0.0),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
    ],
)
def test_a_difference_is_relative_to_what_the_job_recorded(recorded: float, replayed: float, difference: float) -> None:
    assert measure_difference(recorded, replayed) == difference


def test_what_has_no_size_is_infinitely_far() -> None:
    assert relative_difference(1.0, 0.0) == math.inf
    assert relative_difference(0.0, 0.0) == 0.0
    assert relative_difference(1.0, 2.0) == 0.5
    assert relative_difference(1.0, 0.0, least_size=4.0) == 0.25
    assert as_share(0.0, 0.0) == 0.0
    assert absolute_difference(-1.0, 1.0) == 2.0


@pytest.mark.parametrize(
    ("value", "other", "is_equal"),
    [
        (1.0, 1.0, True),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (math.inf, math.inf, True),
        (math.inf, 1.0, False),
        # Rounding towards zero in bf16 takes a value one spacing away, and fp16 rounds its smallest to 0.
        (1.0, 1.0 + 2**-7, True),
        (1.0, 1.0 - 2**-7, True),
        (1.0, 1.0 + 2**-6, False),
        (0.0, 2**-25, True),
        (0.0, 2**-23, False),
        (1.0, -1.0, False),
    ],
)
def test_a_value_may_be_another_one_rounded(value: float, other: float, is_equal: bool) -> None:
    assert is_equal_but_for_dtype(value, other) is is_equal
    assert is_equal_but_for_dtype(other, value) is is_equal
