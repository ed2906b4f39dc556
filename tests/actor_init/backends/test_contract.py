"""Every strategy and toggle gives the loss and the gradient norm of a plain Hugging Face model.

The table is chosen so that every pair of toggles meets at least once; a test below counts the pairs.
"""

import itertools
import shlex
from pathlib import Path

import pytest

from replay.options.spec import find_sample_folder
from tests.helpers.contract import (
    BF16_BOUND,
    BF16_NORM_BOUND,
    FEW,
    MANY,
    STEPPING,
    Row,
    check_clipped_steps,
    check_losses_and_norms,
    records_of,
    replayed,
)
from tests.helpers.reference import Reference

pytestmark = pytest.mark.slow

TABLE = [
    Row("deepspeed 0", 1, True, True, False, 2, MANY),
    Row("deepspeed 0", 2, False, False, True, 1, FEW),
    Row("deepspeed 1", 1, False, True, True, 1, FEW),
    Row("deepspeed 1", 2, True, False, False, 2, MANY),
    Row("deepspeed 2", 1, True, True, False, 2, FEW),
    Row("deepspeed 2", 2, False, False, True, 1, MANY),
    Row("deepspeed 3", 1, False, False, True, 2, MANY),
    Row("deepspeed 3", 2, True, True, False, 1, FEW),
    Row("fsdp2 2", 1, True, True, True, 1, MANY),
    Row("fsdp2 2", 2, False, False, False, 2, FEW),
    Row("fsdp2 3", 1, True, True, False, 1, MANY),
    Row("fsdp2 3", 2, False, False, True, 2, FEW),
    Row("ddp", 1, False, True, True, 1, FEW),
    Row("ddp", 2, True, False, False, 2, MANY),
]
TOGGLES = list(Row.__annotations__)
# Compiling to kernels takes most of the time: one row of all tests does, and the others make graphs alone. Backends
# differ in what they put around a block's graph, not in how it is compiled.
KERNELS = TABLE[0]
BF16_ROWS = [
    ("deepspeed 1", f"--zero-stage 1 --max-inputs {FEW}"),
    ("fsdp2 3", f"--backend fsdp2 --max-inputs {FEW}"),
    ("fsdp2 3, in chunks", f"--backend fsdp2 --head chunks --max-inputs {FEW}"),
    ("ddp", f"--backend ddp --max-inputs {FEW}"),
]
STEP_ROWS = {
    **{f"deepspeed {stage}": f"--zero-stage {stage}" for stage in range(4)},
    **{f"fsdp2 {stage}": f"--backend fsdp2 --zero-stage {stage}" for stage in (2, 3)},
    "ddp": "--backend ddp",
}


@pytest.fixture(scope="module")
def logs(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The log folder of every row, by name; all rows of one world size run in one go, but for that with kernels."""
    home = tmp_path_factory.mktemp("logs")
    folders = replayed({KERNELS.name: KERNELS.arguments()}, KERNELS.num_ranks, model_folder, home)
    for num_ranks in (1, 2):
        rows = [row for row in TABLE if row.num_ranks == num_ranks and row != KERNELS]
        runs = {row.name: row.arguments() for row in rows}
        if num_ranks == 1:
            runs |= {f"bf16 {name}": shlex.split(flags) for name, flags in BF16_ROWS}
            runs |= {f"step {name}": shlex.split(f"{STEPPING} {flags}") for name, flags in STEP_ROWS.items()}
        folders |= replayed(runs, num_ranks, model_folder, home, graphs=True)
    return folders


def test_every_pair_of_toggles_meets() -> None:
    for first, second in itertools.combinations(range(len(TOGGLES)), 2):
        expected_pairs = set(itertools.product({row[first] for row in TABLE}, {row[second] for row in TABLE}))
        assert {(row[first], row[second]) for row in TABLE} == expected_pairs, (TOGGLES[first], TOGGLES[second])


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_losses_and_norms_are_the_reference_s(row: Row, logs: dict[str, Path], reference: Reference) -> None:
    check_losses_and_norms(row, logs[row.name], reference)


@pytest.mark.parametrize("name", [name for name, _ in BF16_ROWS])
def test_bf16_stays_within_its_bound(name: str, logs: dict[str, Path], reference: Reference) -> None:
    for record in records_of(logs[f"bf16 {name}"]):
        path = find_sample_folder() / record.source
        assert record.result.loss == pytest.approx(reference.answer(path).loss, rel=BF16_BOUND)
        assert record.result.grad_norm == pytest.approx(reference.gradient_norm([path]), rel=BF16_NORM_BOUND)


@pytest.mark.parametrize("name", STEP_ROWS)
def test_clipped_steps_lead_where_a_plain_loop_leads(name: str, logs: dict[str, Path], model_folder: Path) -> None:
    check_clipped_steps(logs[f"step {name}"], model_folder)
