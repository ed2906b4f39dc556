"""What parity's picture shows: each run's share of its bound; of many runs, those that have a toggle's value."""

from pathlib import Path

from actor_init.spec import Dtype
from replay.agreement.matrix import read_settings
from replay.agreement.noise_floor import CellResult, FarthestPoint, JudgedCell, MatrixResult, ParityNoise
from replay.agreement.plan import Cell, Role
from replay.agreement.rows import ParityLog
from replay.campaign.campaign import Campaign
from replay.commands.parity.report import compute_shares
from replay.comparison.plot import draw_parity
from replay.processes.pool import Machine
from tests.helpers.liger_on_a_cpu import liger_on_a_cpu
from tests.helpers.planning import planned

BOUNDS = {Dtype.FP32: 2.0, Dtype.BF16: 8.0, Dtype.FP16: 4.0}


def made() -> tuple[list[Cell], ParityLog, MatrixResult]:
    """The full matrix of two devices, whose nth cell is n away from its reference."""
    with liger_on_a_cpu():
        found = planned([dict(setting) for setting in read_settings("full", 2)])
    campaign = Campaign(
        folder=Path(),
        command_name="parity",
        command_line="",
        machine=Machine(num_devices=2, has_gpus=False),
        plan=found,
    )
    log = ParityLog(campaign=campaign)
    cells = [cell for cell in found.cells if cell.role is Role.CELL]
    judged = {
        cell.name: JudgedCell(
            result=CellResult.EQUAL,
            distances={"loss": FarthestPoint(value=float(number), source="x", place=0, num_points=1)},
            deciding=(),
        )
        for number, cell in enumerate(cells)
    }
    noises = [
        ParityNoise(
            dtype=dtype,
            quantity="loss",
            floor=1.0,
            equivalent="",
            factor=1.0,
            bound=bound,
            ceiling=9.0,
            measured={},
            distrusted=(),
        )
        for dtype, bound in BOUNDS.items()
    ]
    return cells, log, MatrixResult(cells=judged, noises=noises, remarks=(), costs={})


def test_each_run_has_a_line() -> None:
    cells, log, result = made()
    expected = {cell.name: {"loss": [number / BOUNDS[cell.spec.actor.dtype]]} for number, cell in enumerate(cells)}
    assert compute_shares(log, result, max_runs=len(cells)) == expected


def test_of_many_runs_each_value_of_an_option_has_a_line(tmp_path: Path) -> None:
    cells, log, result = made()
    found = compute_shares(log, result)
    values = [line.partition(" (")[0] for line in found]
    stages = [f"deepspeed, ZeRO stage {stage}" for stage in range(4)]
    stages += ["fsdp2, ZeRO stage 2", "fsdp2, ZeRO stage 3"]
    others = ["bf16", "fp16", "fp32", "packed", "padded", "eager", "sdpa", "compile blocks"]
    kernels = ["kernels fused", "kernels model"]
    assert values == ["ddp", *stages, *others, "compile off", *kernels, "data 2", "one process", "ring 2", "tp 2"]
    for value, word in (("tp 2", " tp 2"), ("padded", " padded "), ("compile blocks", " compiled"), ("bf16", " bf16 ")):
        numbers = [number for number, cell in enumerate(cells) if word in f"{cell.name} "]
        expected = [number / BOUNDS[cells[number].spec.actor.dtype] for number in numbers]
        assert found[f"{value} ({len(numbers)} runs)"] == {"loss": expected}
    draw_parity(tmp_path / "parity.svg", found)
    text = (tmp_path / "parity.svg").read_text()
    assert all(line in text for line in found)
