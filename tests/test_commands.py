"""The commands of the README, as they are typed, each in processes of its own.

COLD ones are as a user's in everything; each launcher is among them, in the slow tier. The others have their imports
already, and compile to graphs alone: kernels are those of tests/actor_init/backends/test_contract.py. Most have short
inputs.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import ROOT, run
from tests.helpers.made_captures import copy_short_inputs

pytestmark = pytest.mark.long

COLD = [
    "replay --max-inputs 5",
    "deepspeed --num_gpus=2 replay --shuffle-inputs --max-inputs 10",
    "torchrun --nproc-per-node 2 replay --backend fsdp2 --max-inputs 5",
]
WARM = [
    "python -m replay --max-inputs 2",
    "deepspeed --num_gpus=1 replay --max-inputs 5 --compile",
    "torchrun replay --backend fsdp2 --tp 2",
    "deepspeed --num_gpus=1 replay --compile --no-packing --no-flash-attn --max-inputs 2",
    "deepspeed --num_gpus=1 replay --num-layers 2 --zero-stage 3 --max-inputs 5",
    "deepspeed --num_gpus=1 replay --shuffle-inputs --random-seed 123 --max-inputs 10",
    "deepspeed --num_gpus=1 replay --no-backward --max-inputs 5",
    "deepspeed --num_gpus=1 --module replay --quiet",
    "torchrun replay --backend fsdp2 --tp 2 --max-inputs 2",
    "torchrun replay --backend fsdp2 --ring 2 --max-inputs 2",
    "torchrun --nproc-per-node 2 replay --backend fsdp2 --max-inputs 2",
    "torchrun -m replay --max-inputs 2 --passes all --loss sft --step",
]
# Two ranks are dealt twenty inputs, and a rollout pass comes first.
OF_THE_SAMPLE = (COLD[0], COLD[1], WARM[0], *WARM[-4:])
NUM_SHORT = 10


def only_log(log_folder: Path) -> dict[str, Any]:
    (folder,) = log_folder.iterdir()
    log: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return log


@pytest.fixture(scope="module")
def short_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_short_inputs(tmp_path_factory.mktemp("short") / "inputs", NUM_SHORT)


@pytest.mark.parametrize(
    "command", [COLD[0], *[pytest.param(command, marks=pytest.mark.slow) for command in COLD[1:]], *WARM]
)
def test_the_command_succeeds_and_leaves_its_log(command: str, short_inputs: Path, tmp_path: Path) -> None:
    inputs = "" if command in OF_THE_SAMPLE else f" --inputs {short_inputs}"
    done = run(command + inputs, tmp_path, cold=command in COLD, graphs=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    log = only_log(tmp_path)
    assert log["status"] == "finished"
    num_asked = int(command.split("--max-inputs ")[1].split()[0]) if "--max-inputs" in command else NUM_SHORT
    assert log["statistics"]["num_passes"] == num_asked
    if "--tp 2" in command:
        assert "needs 2 processes and 1 was started; starting them" in done.stderr
        assert log["world_size"] == 2
    # Only of the sample the job's numbers are there; its other loss is not the job's.
    if command in OF_THE_SAMPLE and "--loss" not in command:
        assert log["verdict"]["outcome"] == "REPRODUCED"
    assert log["verdict"]["outcome"] != "DIFFERS"
    assert "passes measured" in done.stdout
    assert "\x1b" not in done.stdout


def test_the_launches_of_the_readme_are_among_them() -> None:
    launches = re.findall(r"^    ((?:deepspeed|torchrun|replay) .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len([launch for launch in launches if launch in {*COLD, *WARM}]) == 3, launches


def test_deepcompile_on_a_cpu_is_one_clear_error(tmp_path: Path) -> None:
    done = run("deepspeed --num_gpus=1 replay --deepcompile --no-flash-attn --max-inputs 5", tmp_path)
    assert done.returncode != 0
    ours = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("replay:")]
    assert ours == ["replay: --deepcompile needs CUDA, and this machine has none. Try: --compile"]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_random_weights_are_the_same_under_every_backend_and_world_size(tmp_path: Path) -> None:
    losses: list[dict[str, float]] = []
    inputs = copy_short_inputs(tmp_path / "inputs", 4, of_each_rank=True)
    for number, command in enumerate(
        (
            "replay --dtype fp32 --loss stand-in",
            "torchrun --nproc-per-node 2 replay --dtype fp32 --backend fsdp2 --loss stand-in",
            "torchrun --nproc-per-node 2 replay --dtype fp32 --zero-stage 3 --loss stand-in",
        )
    ):
        home = tmp_path / str(number)
        assert run(f"{command} --inputs {inputs}", home).returncode == 0
        (folder,) = home.iterdir()
        lines = [line for path in sorted(folder.glob("rank*.jsonl")) for line in path.read_text().splitlines()]
        losses.append({record["source"]: record["loss"] for record in map(json.loads, lines)})
        assert len(losses[-1]) == 8
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)
