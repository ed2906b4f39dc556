"""A kept sketch tells gradients of one length apart, names the parameter, and sees a rank that holds another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actor_init.spec import UsageError
from replay.agreement.noise_floor import CellResult, MatrixJudge
from replay.options.option_parsing import build_replay_spec
from replay.options.spec import MeasureSpec
from replay.runlog.gradient_sketches import LEAST_SHARE, ParameterDistance, compare, make_row, read, write
from replay.runlog.token_log_probs import write_token_log_probs
from tests.helpers.made_logs import passed
from tests.helpers.parity_rows import Made


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(**gradients: Tensor) -> dict[str, Tensor]:
    return {name.replace("_at_", "@"): make_row(gradient) for name, gradient in gradients.items()}


def compare_by_name(rows: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, ParameterDistance]:
    return {distance.name: distance for distance in compare(rows, other)}


class World:
    """A world of ranks whose gathered values are given."""

    rank = 0

    def __init__(self, others: list[dict[str, bytes]]) -> None:
        self.others = others

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]


def test_a_row_holds_the_norm_and_changes_with_the_gradient_by_as_much_as_it() -> None:
    gradient = random(48, 40)
    row = make_row(gradient)
    assert row[0].item() == pytest.approx(gradient.norm().item(), rel=1e-6)
    moved = [(make_row(gradient + 1e-3 * random(48, 40, seed=seed)) - row)[1:].norm() for seed in range(1, 30)]
    size = 1e-3 * (48 * 40) ** 0.5
    assert torch.stack(moved).square().mean().item() == pytest.approx(size**2, rel=0.2)  # 29 of relative spread 0.2


def test_a_transposed_gradient_is_far_though_as_long() -> None:
    gradient = random(32, 32)
    found = compare_by_name(rows(q=gradient), rows(q=gradient.T.contiguous()))["q"]
    assert found.other_norm == pytest.approx(found.size)
    assert found.distance > 0.7 * found.size


def test_a_small_parameter_is_measured_by_itself_down_to_a_share_of_the_whole() -> None:
    large, small, tiny = random(64, 64), 0.2 * random(64, seed=1), 1e-9 * random(8, seed=2)
    found = compare_by_name(rows(w=large, b=small, k=tiny), rows(w=large, b=2 * small, k=-tiny))
    assert found["w"].distance == 0
    assert found["b"].distance >= small.norm().item() * 0.99  # its length alone says so
    assert found["k"].size == pytest.approx(LEAST_SHARE * large.norm().item(), rel=1e-2)
    assert found["k"].distance / found["k"].size < 1e-7


def test_a_gradient_that_is_missing_counts_as_zero() -> None:
    found = compare_by_name(rows(w=random(8, 8), b=random(8)), rows(w=random(8, 8)))
    assert found["b"].other_norm == 0
    assert found["b"].distance >= found["b"].size * 0.99


def test_what_is_not_finite_is_equal_to_its_like_alone() -> None:
    broken = torch.full((4, 4), torch.inf)
    assert compare_by_name(rows(w=broken), rows(w=broken))["w"].distance == 0
    assert compare_by_name(rows(w=random(4, 4)), rows(w=broken))["w"].distance == torch.inf


def test_a_rank_that_holds_other_gradients_is_kept_and_counts(tmp_path: Path) -> None:
    gradient = random(16, 16)
    agrees, differs = ({"w": make_row(tensor).numpy().tobytes()} for tensor in (gradient, 2 * gradient))
    made: Any = World([agrees, differs])
    write(tmp_path, 3, [("w", gradient)], made)
    kept = read(tmp_path, 3)
    assert sorted(kept) == ["w", "w@2"]
    assert compare_by_name(rows(w=gradient), dict(kept))["w"].distance > 0.9 * gradient.norm().item()


def test_sketches_that_are_gone_are_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pass000003.safetensors is missing or damaged: .* Try: the run again"):
        read(tmp_path, 3)


def test_parity_names_the_parameter_whose_gradient_differs_where_nothing_else_does(tmp_path: Path) -> None:
    made = Made(tmp_path, [])
    alone: Any = World([])
    spec = replace(build_replay_spec({"dtype": "fp32"}), measure=MeasureSpec(details=True))
    for name, varies in (("ref", ""), ("eager", "kernel"), ("cell", ""), ("clean", "")):
        made.add(name, varies=varies, spec=spec, records=[passed(index, letter) for index, letter in enumerate("wx")])
        folder = made.rows[-1].log
        assert folder is not None
        for index in range(2):
            q_proj = random(32, 32, seed=index)
            own = {"o_proj": random(8, 8), "q_proj": q_proj.T.contiguous() if name == "cell" else q_proj}
            write(folder, index, own.items(), alone)
            write_token_log_probs(folder, index, 0, [-1.0, None, -2.0])
    judged = MatrixJudge().judge(made.rows).cells
    assert judged["clean"].result is CellResult.EQUAL
    assert (judged["cell"].result, judged["cell"].deciding) == (CellResult.DIFFERS, ["gradients"])
    assert judged["cell"].distances["gradients"].where in ("q_proj at w.pkl", "q_proj at x.pkl")


@pytest.mark.parametrize(("dtype", "rounding"), [("fp32", 1e-7), ("bf16", 4e-4)])
def test_parity_finds_a_token_that_is_off_by_five_times_the_noise_floor(
    dtype: str, rounding: float, tmp_path: Path
) -> None:
    made = Made(tmp_path, [])
    alone: Any = World([])
    spec = replace(build_replay_spec({"dtype": dtype}), measure=MeasureSpec(details=True))
    right = -10 * torch.rand(2, 200, generator=torch.Generator().manual_seed(0))
    noise = [10 * rounding * random(2, 200, seed=seed).clamp(-2, 2) for seed in range(3)]
    floor = float(noise[0].abs().max())
    for name, varies in (("ref", ""), ("eager", "kernel"), ("cell", ""), ("clean", "")):
        made.add(name, varies=varies, spec=spec, records=[passed(index, letter) for index, letter in enumerate("wx")])
        folder = made.rows[-1].log
        assert folder is not None
        values = right + (torch.zeros(2, 200) if name == "ref" else noise[0] if varies else noise[1])
        if name == "cell":
            values[1, 17] = right[1, 17] + 5 * floor
        for index in range(2):
            write_token_log_probs(folder, index, 0, [None, *values[index].tolist()])
            write(folder, index, [("w", random(4, 4))], alone)
    judged = MatrixJudge().judge(made.rows).cells
    assert judged["clean"].result is CellResult.WITHIN_NOISE
    assert (judged["cell"].result, judged["cell"].deciding) == (CellResult.DIFFERS, ["token log-probs"])
    assert judged["cell"].distances["token log-probs"].where == "x.pkl"
