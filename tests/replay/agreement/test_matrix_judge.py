"""From logs with known numbers to verdicts: which run is held against which, and what is said of a bad reference."""

import math
from pathlib import Path
from typing import Any

import pytest

from replay.agreement.noise_floor import CellResult
from replay.agreement.plan import Role
from tests.helpers.made_logs import passed
from tests.helpers.parity_rows import CONFIG, NAMES, Made


@pytest.fixture
def made(tmp_path: Path) -> Made:
    made = Made(tmp_path, [])
    made.add("ref")
    made.add("again", varies="the same again")
    made.add("eager", 1 + 2e-7, varies="kernel")
    return made


def test_a_clean_run_has_no_remarks(made: Made) -> None:
    made.add("near", 1 - 3e-7)
    made.add("equal")
    result = made.judged()
    assert result.is_clean
    assert result.remarks == []
    assert {name: cell.result for name, cell in result.cells.items()} == {
        "again": "EQUAL",
        "eager": "WITHIN NOISE",
        "near": "WITHIN NOISE",
        "equal": "EQUAL",
    }


def test_each_quantity_can_differ_alone(made: Made) -> None:
    clean = [passed(index, letter) for index, letter in enumerate(NAMES[:-1])]
    rows: dict[str, Any] = {
        "loss": {"loss": 2.1},
        "log-probs": {"row_log_probs": [-10.0, -20.1]},
        "gradient norm": {"norm": 4.1},
    }
    for quantity, change in rows.items():
        made.add(quantity, records=[*clean, passed(3, "z", **change)])
    result = made.judged()
    assert not result.is_clean
    for quantity in rows:
        judged = result.cells[quantity]
        assert (judged.result, judged.deciding) == (CellResult.DIFFERS, [quantity])
        assert judged.distances[quantity].source == "z.pkl"
        assert judged.distances[quantity].place == 3


def test_data_ranks_are_held_against_the_same_inputs_accumulated(made: Made) -> None:
    windows = [passed(index, letter, norm=None if index % 2 == 0 else 4.0) for index, letter in enumerate(NAMES)]
    made.add("ref 2", records=windows, role=Role.REFERENCE)
    for name, norm in (("two ranks", 4.0), ("summed, not averaged", 8.0)):
        records = [passed(i // 2, letter, norm=norm, rank=i % 2) for i, letter in enumerate(NAMES)]
        made.add(name, reference="ref 2", num_processes=2, records=records)
    result = made.judged()
    assert result.cells["ref 2"].result is CellResult.EQUAL
    assert result.cells["two ranks"].result is CellResult.EQUAL
    assert result.cells["summed, not averaged"].deciding == ["gradient norm"]
    assert result.cells["two ranks"].notes == []


def test_a_reference_that_does_not_repeat_itself_is_not_noise(tmp_path: Path) -> None:
    made = Made(tmp_path, [])
    made.add("ref")
    made.add("again", 1.01, varies="the same again")
    made.add("eager", 1.02, varies="kernel")
    made.add("cell", 0.99)
    result = made.judged()
    assert not result.is_clean
    assert "The reference does not repeat itself: look for dropout, or memory" in result.remarks[0]
    assert {cell.result for cell in result.cells.values()} == {CellResult.DIFFERS}


def test_a_reference_that_all_others_are_far_from_is_named(tmp_path: Path) -> None:
    made = Made(tmp_path, [])
    made.add("ref")
    made.add("again", varies="the same again")
    for name in ("kernel", "reduction order", "tp"):
        made.add(name, 1.01, varies=name)
    [remark] = made.judged().remarks
    assert remark.endswith("The reference itself may be the one that is wrong")
    assert "fp32 loss: not in the floor, for it is more than rounding explains (1.5e-06)" in remark


def test_repeating_and_row_order_alone_measure_no_noise(tmp_path: Path) -> None:
    made = Made(tmp_path, [])
    made.add("ref")
    made.add("again", varies="the same again")
    made.add("reversed", varies="row order")
    made.add("cell", 1 + 1e-6)
    judged = made.judged().cells["cell"]
    assert judged.result is CellResult.NOT_JUDGED
    assert judged.notes == ["no equivalent run measured its noise"]


def test_each_dtype_has_its_own_bound_and_is_held_against_fp32(made: Made) -> None:
    made.add("ref bf16", 1.001, reference="ref bf16", dtype="bf16")
    made.add("eager bf16", 1.0011, varies="kernel", reference="ref bf16", dtype="bf16")
    made.add("bf16", 1.0012, reference="ref bf16", dtype="bf16")
    made.add("fp32", 1.0001)
    assert made.verdict_of("bf16") is CellResult.WITHIN_NOISE
    assert made.verdict_of("fp32") is CellResult.DIFFERS
    assert made.judged().remarks == []


def add_group(made: Made, group: str, dtype: str, noise: float, distance: float, *, start: float = 1.0) -> str:
    """Add a reference, an equivalent `noise` and a cell `distance` away from it; return the cell's name."""
    prefix = f"{group} {dtype}"
    shared: dict[str, Any] = {"reference": f"{prefix} ref", "dtype": dtype, "group": group}
    made.add(f"{prefix} ref", start, **shared)
    made.add(f"{prefix} eager", start * (1 + noise), varies="kernel", **shared)
    made.add(f"{prefix} cell", start * (1 + distance), **shared)
    return f"{prefix} cell"


@pytest.mark.parametrize("order", [1, -1], ids=["", "reversed"])
@pytest.mark.parametrize("loud", [("", "bf16"), ("edge rows", "bf16")])
def test_a_cell_is_held_against_the_noise_of_its_own_group_and_dtype(
    loud: tuple[str, str], order: int, tmp_path: Path
) -> None:
    """The loud one's equivalent is 1e-3 from its reference, the others' 2e-7; each cell is 2e-4 from its own."""
    made = Made(tmp_path, [])
    baselines = [(group, dtype) for group in ("", "edge rows") for dtype in ("bf16", "fp32")][::order]
    names = {
        (group, dtype): add_group(made, group, dtype, 1e-3 if (group, dtype) == loud else 2e-7, 2e-4)
        for group, dtype in baselines
    }
    result = made.judged()
    assert {baseline: result.cells[name].result for baseline, name in names.items()} == {
        baseline: CellResult.WITHIN_NOISE if baseline == loud else CellResult.DIFFERS for baseline in baselines
    }
    measured = {noise.baseline: noise.floor for noise in result.noises if noise.quantity == "loss"}
    assert {baseline: floor > 1e-4 for baseline, floor in measured.items() if floor} == {
        baseline: baseline == loud for baseline in baselines
    }


def test_a_group_whose_noise_was_not_measured_borrows_none(tmp_path: Path) -> None:
    made = Made(tmp_path, [])
    add_group(made, "", "fp32", 2e-7, 3e-7)
    made.add("edge ref", group="edge rows", reference="edge ref")
    made.add("edge cell", 1 + 3e-7, group="edge rows", reference="edge ref")
    judged = made.judged().cells["edge cell"]
    assert (judged.result, judged.notes) == (CellResult.NOT_JUDGED, ["no equivalent run measured its noise"])


def test_an_equivalent_that_cannot_be_rounding_is_named_with_its_group(tmp_path: Path) -> None:
    made = Made(tmp_path, [])
    add_group(made, "", "fp32", 2e-7, 0.0)
    add_group(made, "edge rows", "fp32", 0.01, 0.0)
    [remark] = made.judged().remarks
    assert remark.startswith("edge rows, fp32 loss: not in the floor")
    assert "edge rows fp32 eager (0.01)" in remark


@pytest.mark.parametrize(("start", "num_remarks"), [(1.001, 0), (1.05, 1)])
def test_dtypes_are_held_against_each_other_on_the_requested_inputs_alone(
    start: float, num_remarks: int, tmp_path: Path
) -> None:
    """References of a group come first here, and are far from those of the other dtype."""
    made = Made(tmp_path, [])
    add_group(made, "edge rows", "bf16", 1e-3, 0.0, start=1.5)
    add_group(made, "edge rows", "fp32", 2e-7, 0.0, start=3.0)
    add_group(made, "", "fp32", 2e-7, 0.0)
    add_group(made, "", "bf16", 1e-3, 0.0, start=start)
    remarks = made.judged().remarks
    assert len(remarks) == num_remarks
    assert all(text.startswith("the reference in bf16 is 0.05 from that in fp32 in its loss") for text in remarks)


def test_a_narrow_reference_that_is_further_from_fp32_than_rounding_explains_is_named(made: Made) -> None:
    made.add("ref bf16", 1.05, reference="ref bf16", dtype="bf16")
    [remark] = made.judged().remarks
    assert remark.startswith("the reference in bf16 is 0.05 from that in fp32 in its loss at w.pkl, and")


def test_what_did_other_work_is_not_judged_and_says_why(made: Made) -> None:
    made.add("other", work={"config": {**CONFIG["config"], "hidden_size": 32}})
    judged = made.judged().cells["other"]
    assert judged.result is CellResult.NOT_JUDGED
    assert "hidden_size is 32, not 64" in judged.notes[0]
    assert not made.judged().is_clean


def test_a_run_without_the_reference_s_gradient_norms_says_so(made: Made) -> None:
    made.add("forward alone", records=[passed(index, letter, norm=None) for index, letter in enumerate(NAMES)])
    judged = made.judged().cells["forward alone"]
    assert judged.result is CellResult.NOT_JUDGED
    assert judged.notes == [
        "gradient norms are not compared: no gradient was averaged over the same inputs (1 input each, against none)"
    ]


def test_what_is_not_finite_in_both_is_equal_and_said(tmp_path: Path) -> None:
    made = Made(tmp_path, [])
    records = [passed(index, letter, math.nan) for index, letter in enumerate(NAMES)]
    for name, varies in (("ref", ""), ("eager", "kernel"), ("cell", "")):
        made.add(name, varies=varies, records=records)
    judged = made.judged().cells["cell"]
    assert judged.result is CellResult.EQUAL
    assert judged.notes == ["loss is not finite at 4 points"]
