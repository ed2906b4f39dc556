"""The noise floor and the verdict, from made distances: what is rounding passes, what is not does not widen it."""

import math
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from actor_init.spec import Dtype
from replay.agreement.noise_floor import (
    CellResult,
    FarthestPoint,
    ParityNoise,
    judge_distances,
    measure_noise,
    measure_parity_distances,
)
from replay.comparison.differences import ComparedPoint, Differences, Quantity, compare
from replay.runlog.reader import PastRun
from replay.tolerances.difference import estimate_chance_beyond, estimate_rounding_ceiling
from tests.helpers.made_logs import passed, write_log

CONFIG = {"num_hidden_layers": 4, "hidden_size": 64}
SPACING = 2.0**-23


def far(value: float, num_points: int = 16) -> FarthestPoint:
    return FarthestPoint(value=value, source="x.pkl", place=0, num_points=num_points)


def noise(*values: float, dtype: Dtype = Dtype.BF16, num_points: int = 16) -> ParityNoise:
    named = {f"equivalent {number}": far(value, num_points) for number, value in enumerate(values)}
    return measure_noise(dtype, "loss", named, estimate_rounding_ceiling(dtype, CONFIG, 100))


def test_the_floor_is_the_largest_distance_of_an_equivalent_run() -> None:
    found = noise(0.0, 2e-5, 5e-5)
    assert (found.floor, found.equivalent, found.distrusted) == (5e-5, "equivalent 2", [])
    assert found.bound == found.factor * 5e-5
    assert found.factor == pytest.approx(4.9, abs=0.1)


def test_fewer_samples_give_a_larger_factor_and_many_still_four() -> None:
    factors = [noise(1e-5, num_points=number).factor for number in (8, 16, 32, 200)]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] > 10
    assert factors[-1] == 4.0


@pytest.mark.parametrize(("factor", "num_samples"), [(1.5, 4), (1.2, 16), (2.0, 8)])
def test_the_chance_of_a_value_beyond_is_that_of_drawn_samples(factor: float, num_samples: int) -> None:
    draw = random.Random(0).gauss
    rounds = 60_000
    beyond = sum(abs(draw(0, 1)) > factor * max(abs(draw(0, 1)) for _ in range(num_samples)) for _ in range(rounds))
    assert beyond / rounds == pytest.approx(
        estimate_chance_beyond(factor, num_samples), rel=0.15
    )  # 5 sigma of few hundred


def test_runs_that_are_equal_in_every_bit_leave_fp32_s_own_spacing_as_the_floor() -> None:
    found = noise(0.0, 0.0, dtype=Dtype.FP32)
    assert found.floor == SPACING
    assert found.bound >= 4 * SPACING


def test_what_is_far_beyond_rounding_is_not_in_the_floor() -> None:
    found = noise(2e-5, 0.05)
    assert (found.floor, found.distrusted) == (2e-5, ["equivalent 1"])
    everything = noise(0.3, 0.05, math.inf)
    assert (everything.floor, len(everything.distrusted)) == (None, 3)
    assert everything.bound < 1e-5


def test_an_equivalent_that_stands_alone_an_order_above_all_others_is_not_in_the_floor() -> None:
    ceiling = estimate_rounding_ceiling(Dtype.BF16, CONFIG, 100)
    assert noise(0.0, 3e-5, 0.5 * ceiling).distrusted == ["equivalent 2"]
    assert noise(0.0, 0.1 * ceiling, 0.5 * ceiling).distrusted == []  # two say so
    assert noise(0.0, 0.0, 0.05 * ceiling).distrusted == []  # kernels alone round otherwise, and by what bf16 explains


@pytest.mark.parametrize(
    ("dtype", "config", "expected"),
    [
        (Dtype.BF16, {"num_hidden_layers": 32, "hidden_size": 4096}, 2**-8 * 8),
        (Dtype.FP16, {"num_hidden_layers": 32, "hidden_size": 4096}, 2**-11 * 8),
        (Dtype.FP32, {"num_hidden_layers": 32, "hidden_size": 4096}, 2**-24 * 8 * 64),
        (Dtype.FP32, {"num_hidden_layers": 32, "hidden_size": 64}, 2**-24 * 8 * 32),  # 1024 tokens
        (Dtype.FP32, {"text_config": {"num_hidden_layers": 32, "hidden_size": 4096}}, 2**-24 * 8 * 64),
    ],
)
def test_the_ceiling_grows_with_the_square_root_of_what_is_summed(
    dtype: Dtype, config: dict[str, int], expected: float
) -> None:
    assert estimate_rounding_ceiling(dtype, config, 1024) == expected


@pytest.mark.parametrize(
    ("loss", "norm", "verdict", "deciding"),
    [
        (0.0, 0.0, CellResult.EQUAL, []),
        (SPACING, 0.0, CellResult.EQUAL, []),
        (1e-6, 0.0, CellResult.WITHIN_NOISE, []),
        (1e-6, 2e-3, CellResult.DIFFERS, ["gradient norm"]),
        (1e-3, math.inf, CellResult.DIFFERS, ["loss", "gradient norm"]),
    ],
)
def test_each_quantity_is_held_against_its_own_bound(
    loss: float, norm: float, verdict: CellResult, deciding: list[str]
) -> None:
    noises = {
        name: measure_noise(Dtype.BF16, name, {"kernel": far(floor)}, 1e-2)
        for name, floor in (("loss", 1e-5), ("gradient norm", 1e-4))
    }
    assert judge_distances({"loss": far(loss), "gradient norm": far(norm)}, noises) == (verdict, deciding)


def test_without_a_measured_floor_nothing_is_judged_but_what_is_equal() -> None:
    assert judge_distances({"loss": far(1e-6)}, {}) == (CellResult.NOT_JUDGED, ["loss"])
    assert judge_distances({"loss": far(0.0)}, {}) == (CellResult.EQUAL, [])


def test_a_row_of_one_sure_token_is_measured_by_what_the_others_are(tmp_path: Path) -> None:
    logs = [
        write_log(tmp_path / name, [passed(0, "x", row_log_probs=[-30.0, sure])])
        for name, sure in (("a", -1e-6), ("b", -2e-6))
    ]
    found = measure_parity_distances(compare(*map(PastRun.read, logs)))
    assert found["log-probs"].value == pytest.approx(1e-6 / 15)  # and not 1, though it doubled
    assert found["log-probs"].num_points == 2


def test_a_floor_is_of_as_many_numbers_as_its_points_stand_for() -> None:
    """A pass has one point for its tokens, the farthest of them. More numbers make a bound smaller."""
    points = [
        ComparedPoint(source=f"{number}.pkl", place=number, reference=1.0, other=1.0, apart=1e-5, num_values=100)
        for number in range(3)
    ]
    quantity = Quantity.summarize("token log-probs", points)
    differences = Differences(
        num_matched=3, num_only_in_reference=0, num_only_in_other=0, results=[quantity], costs=[], notes=[]
    )
    found = measure_parity_distances(differences)["token log-probs"]
    assert found.num_points == 300
    assert found.value == pytest.approx(1e-5)
    bound, of_three = (
        measure_noise(Dtype.BF16, "token log-probs", {"kernel": point}, 1e-2).bound
        for point in (found, replace(found, num_points=3))
    )
    assert bound == pytest.approx(4e-5)
    assert of_three > 10 * bound


def test_no_number_where_there_was_one_is_infinitely_far(tmp_path: Path) -> None:
    logs = [write_log(tmp_path / str(loss), [passed(0, "x", loss)]) for loss in (2.0, math.nan)]
    assert measure_parity_distances(compare(*map(PastRun.read, logs)))["loss"].value == math.inf


def test_a_hundred_clean_runs_raise_no_alarm_and_a_fault_ten_times_the_noise_is_found() -> None:
    """Rounding drawn as normal, kinds of equivalents up to five times apart, as bf16's were on a CPU; eight inputs."""
    draw = random.Random(1)
    num_found = 0
    for _ in range(100):
        measured = {
            str(scale): far(max(abs(draw.gauss(0, scale * 1e-5)) for _ in range(8)), 8) for scale in (0.2, 1, 0.5, 1)
        }
        noise = measure_noise(Dtype.BF16, "loss", measured, estimate_rounding_ceiling(Dtype.BF16, CONFIG, 100))
        for _, scale in product(range(40), (0.2, 1)):
            clean = max(abs(draw.gauss(0, scale * 1e-5)) for _ in range(8))
            assert judge_distances({"loss": far(clean)}, {"loss": noise})[0] in (
                CellResult.EQUAL,
                CellResult.WITHIN_NOISE,
            )
        num_found += judge_distances({"loss": far(4e-4)}, {"loss": noise})[0] is CellResult.DIFFERS
    assert num_found == 100
