"""An attention kernel that is one file and one entry in the registry is chosen, run and named like the others."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from actor_init.attention import kernel_choice
from actor_init.attention.kernel_choice import choose_default_kernel, choose_kernel_name
from actor_init.declarations.attention import KERNELS, find_kernel
from actor_init.spec import ActorSpec, ParallelSpec, UsageError
from capture.file_format.capture_file import CapturedCall
from replay.command_line.cli import main
from replay.commands.doctor.report import list_checked_kernels
from replay.options.option_parsing import (
    build_replay_spec,
    format_command_line,
    format_error_with_flags,
    spec_from_dict,
    spec_to_dict,
)
from replay.options.spec import ReplaySpec
from replay.resolution.job_defaults import choose_job_kernel
from tests.helpers import toy_kernel
from tests.helpers.read_logs import read_log
from tests.helpers.toy_kernel import KERNEL

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
LLAMA = LlamaConfig(num_hidden_layers=1)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, KERNEL.option_value, KERNEL)


def losses(kernel: str, logs: Path, *typed: str) -> list[float | None]:
    options = ["--attention", kernel, "--backend", "ddp", "--dtype", "fp32", "--max-inputs", "2", *typed]
    assert main([*options, "--log-folder", str(logs / kernel)]) == 0
    (log,) = (logs / kernel).iterdir()
    return [record.result.loss for record in read_log(log)[1]]


@pytest.mark.slow
@pytest.mark.usefixtures("one_world", "register")
@pytest.mark.parametrize("typed", [[], ["--no-packing"]], ids=" ".join)
def test_it_replays_the_sample_with_eager_s_losses_and_is_named(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = toy_kernel.num_calls
    found = losses("toy", tmp_path, *typed)
    header = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("backend"))
    assert ", attention toy_softmax, " in header
    assert toy_kernel.num_calls > before
    (log,) = (tmp_path / "toy").iterdir()
    run = json.loads((log / "run.json").read_text())
    assert run["spec"]["actor"]["attention"] == "toy"
    assert run["facts"]["attention_kernel"] == "toy_softmax"
    # fp32 sums of some hundred tokens' log-probs, in another order
    assert found == pytest.approx(losses("eager", tmp_path, *typed), rel=1e-5)


@pytest.mark.usefixtures("register")
def test_the_kernel_check_finds_it_right() -> None:
    assert kernel_choice.measure_error(find_kernel("toy"), CPU) < kernel_choice.BOUND / 3
    assert "toy" in list_checked_kernels()  # by the doctor


@pytest.mark.usefixtures("register")
def test_what_it_does_not_declare_is_refused() -> None:
    with pytest.raises(UsageError) as refusal:
        ActorSpec(attention="toy", parallel=ParallelSpec(ring=2))
    assert (
        format_error_with_flags(refusal.value)
        == "--attention toy has no ring. Try: --ring 2 --attention flash, or sdpa"
    )
    with pytest.raises(UsageError, match=r"'foo' is not allowed. Give one of auto, flash, .*, eager, toy$"):
        build_replay_spec({"attention": "foo"})


@pytest.mark.usefixtures("register")
def test_specs_and_jobs_know_it_and_auto_does_not_take_it() -> None:
    spec = build_replay_spec({"attention": "toy"})
    assert format_command_line(spec) == ["--attention", "toy"]
    assert spec_from_dict(spec_to_dict(spec)) == spec
    assert choose_kernel_name(spec.actor, CPU, LLAMA) == "toy_softmax"
    assert choose_default_kernel(CPU) == "sdpa"
    job = SimpleNamespace(environment={"attention": "toy_of_a_job"}, tensors={}, weights=None, outputs={})
    found = choose_job_kernel(ReplaySpec().actor.with_defaults(), cast(CapturedCall, job), CPU, GPT2Config())
    assert found.option_value == "toy"


def test_help_lists_it() -> None:
    done: Any = subprocess.run(
        [sys.executable, "-m", "tests.helpers.toy_kernel", "--help-all"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    words = " ".join(done.stdout.split())
    assert "--attention auto|flash|cudnn|varlen|flex|sdpa|eager|toy" in words


def test_without_its_entry_nobody_knows_it() -> None:
    with pytest.raises(UsageError, match=r"'toy' is not allowed. Give one of auto, flash, .*, eager$"):
        ActorSpec(attention="toy")
