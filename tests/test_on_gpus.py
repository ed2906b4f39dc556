"""The checks of `replay diagnose` on GPUs: `pytest -m gpu`, `-m multi_gpu`, and `-k overfit` for a wide model alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT

LIMIT = 540  # seconds; the widest takes about a minute


def assert_all_pass(home: Path, options: str, *, num_processes: int) -> None:
    launcher = [sys.executable]
    if num_processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--no-python"]
        launcher += [f"--nproc-per-node={num_processes}", sys.executable]
    where = ["--log-folder", str(home / "logs")]
    where += [] if "--dtype" in options else ["--dtype", "bf16"]  # the sample's job had fp32
    done = subprocess.run(
        [*launcher, "-m", "replay", "diagnose", *options.split(), *where],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    [file] = home.glob("logs/*-diagnose/diagnose.json")
    checks = json.loads(file.read_text())["checks"]
    passed = {check["name"] for check in checks if check["status"] == "ok"}
    assert {"loss, four ways", "as a plain model", "accumulated", "one row learned", "inputs learned"} <= passed


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", ["", "--backend fsdp2", "--zero-stage 3 --no-packing", "--backend fsdp2 --dtype fp32"]
)
def test_every_check_passes_on_one_gpu(options: str, tmp_path: Path) -> None:
    assert_all_pass(tmp_path, options, num_processes=1)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2"])
def test_overfit_two_layers_of_llama_8b(backend: str, tmp_path: Path) -> None:
    assert_all_pass(tmp_path, f"--backend {backend} --model llama-3.1-8b --num-layers 2", num_processes=1)


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    "options",
    [
        "--zero-stage 2",
        "--zero-stage 0",
        "--backend fsdp2",
        "--backend fsdp2 --tp 2",
        "--backend fsdp2 --ring 2",
        "--tp 2",
    ],
)
def test_every_check_passes_on_two_gpus(options: str, tmp_path: Path) -> None:
    assert_all_pass(tmp_path, options, num_processes=2)
