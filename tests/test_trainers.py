"""Jobs of real trainers, recorded and replayed: each micro-batch's loss is the one that the trainer computed.

Where the model was given labels its loss is in the capture, and the replay says itself that it is REPRODUCED.

The jobs (tests/trainers/) train at learning rate 0, so that the weights they saved at the start are those of every
step. Those of TRL and OpenRLHF need the extra `trainers`; OpenRLHF is not in it, for it installs on CUDA machines only.

Where a job is run a second time with other arguments, its imports are there already; so they are under DeepSpeed's and
accelerate's launchers, which are processes more that import: tests/test_commands.py starts DeepSpeed's cold.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from capture import capture_files, read_micro_batch
from replay.command_line.cli import main as replay_main
from tests.helpers.machine import job_environment
from tests.helpers.ports import free_port
from tests.helpers.read_logs import read_log
from tests.warm import warm_bin

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
JOBS = Path("tests") / "trainers"
BOUND = 1e-5  # relative: fp32 sums in another order, of packed rows here and of padded ones there

ONE = ["-m"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
DEEPSPEED = ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
ACCELERATE = [
    "-m",
    "accelerate.commands.launch",
    "--cpu",
    "--num_machines",
    "1",
    "--num_processes",
    "1",
]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m"]


def run_job(folder: Path, launcher: Sequence[str], job: str, *arguments: str, cold: bool = True) -> str:
    """`capture run` of the job under that launcher. Returns what it wrote to stderr."""
    command = [*launcher, "capture", "run", "--to", str(folder / "captures")]
    command += [str(JOBS / f"{job}.py"), str(folder), *arguments]
    return run_command(command, cold=cold)


def run_command(command: Sequence[str], *, cold: bool = True) -> str:
    """`command` is what comes after `python`."""
    python = sys.executable if cold else str(warm_bin() / "python")
    done = subprocess.run(
        [python, *command], cwd=ROOT, env=job_environment(), capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stderr


def losses_of(folder: Path) -> list[float]:
    """What the trainer computed, rank by rank."""
    found: list[float] = []
    for path in sorted(folder.glob("losses_rank*.json")):
        found += json.loads(path.read_text())
    return found


def replayed_losses(folder: Path, *typed: str, loss: str, outcome: str) -> list[float]:
    """What replay computes from the captures of training passes, rank by rank; it has to come to this outcome."""
    command = ["--inputs", str(folder / "captures"), "--model", str(folder / "model"), "--dtype", "fp32"]
    command += ["--backend", "fsdp2", "--loss", loss, "--quiet", "--log-folder", str(folder / "logs"), *typed]
    assert replay_main(command) == 0
    (log,) = (folder / "logs").iterdir()
    run, records = read_log(log)
    assert run["verdict"]["outcome"] == outcome, run["verdict"]
    by_rank = sorted(records, key=lambda record: record.source)  # the replay took them step by step
    return [record.result.loss for record in by_rank if record.result.loss is not None]


def check(folder: Path, num_passes: int, *, loss: str = "sft", outcome: str = "REPRODUCED") -> None:
    expected = losses_of(folder)
    assert len(expected) == num_passes
    assert len(set(expected)) == num_passes  # each micro-batch has a loss of its own
    assert replayed_losses(folder, loss=loss, outcome=outcome) == pytest.approx(expected, rel=BOUND)


@pytest.mark.parametrize("kind", ["bare", "compiled", "outer-checkpoint"])
def test_a_plain_loop(kind: str, tmp_path: Path, one_world: None) -> None:
    said = run_job(tmp_path, ONE, "plain_loop", kind, cold=kind == "bare")
    assert f"capture: 3 passes of {'OptimizedModule' if kind == 'compiled' else 'LlamaForCausalLM'}" in said
    check(tmp_path, 3)


def test_the_trainer_of_transformers_under_torchrun(tmp_path: Path, one_world: None) -> None:
    """One process, in which the Trainer wraps its model in DDP all the same."""
    said = run_job(tmp_path, [*TORCHRUN, "1", "-m"], "transformers_trainer")
    assert "capture: 3 passes of DistributedDataParallel" in said
    check(tmp_path, 3)


def test_the_trainer_of_transformers_with_the_callback(tmp_path: Path, one_world: None) -> None:
    run_command([str(JOBS / "transformers_trainer.py"), str(tmp_path), "callback"], cold=False)
    assert len(capture_files(tmp_path / "captures")) == 3
    check(tmp_path, 3)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_accelerate_with_two_ranks(kind: str, tmp_path: Path, one_world: None) -> None:
    run_job(tmp_path, [*TORCHRUN, "2", "-m"], "accelerate_job", kind, cold=False)
    check(tmp_path, 6)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_accelerate_with_two_ranks_and_the_line_that_records(kind: str, tmp_path: Path, one_world: None) -> None:
    run_command([*TORCHRUN, "2", str(JOBS / "accelerate_job.py"), str(tmp_path), kind, "recorded"], cold=False)
    assert len(capture_files(tmp_path / "captures")) == 6
    check(tmp_path, 6)


@pytest.mark.parametrize("stage", ["1", "3"])
def test_deepspeeds_engine_with_two_ranks(stage: str, tmp_path: Path, one_world: None) -> None:
    run_job(
        tmp_path,
        [*DEEPSPEED, "--master_port", str(free_port()), "--module"],
        "deepspeed_engine",
        stage,
        cold=False,
    )
    check(tmp_path, 6)


@pytest.mark.skipif(not find_spec("lightning"), reason="needs lightning")
@pytest.mark.parametrize("strategy", ["one device", "ddp", "ddp_fork"])
def test_lightning_with_its_own_launcher(strategy: str, tmp_path: Path, one_world: None) -> None:
    """It starts the script again for rank 1, or forks; a batch of validation runs without autograd in each rank."""
    num_ranks = 1 if strategy == "one device" else 2
    typed = () if num_ranks == 1 else (strategy,)
    said = run_job(tmp_path, ONE, "lightning_job", str(num_ranks), *typed, cold=strategy == "ddp")
    assert said.count("capture: 4 passes of LlamaForCausalLM") == 1
    assert "nothing recorded" not in said
    check(tmp_path, 3 * num_ranks)


@pytest.mark.skipif(not find_spec("lightning"), reason="needs lightning")
@pytest.mark.parametrize("typed", [["1", "auto"], ["2", "ddp"]])
def test_lightning_with_the_callback(typed: list[str], tmp_path: Path, one_world: None) -> None:
    """The validation pass comes first: the recording begins at the first training forward, and has the later one."""
    run_command([str(JOBS / "lightning_job.py"), str(tmp_path), *typed, "callback"], cold=False)
    check(tmp_path, 3 * int(typed[0]))


@pytest.mark.skipif(not find_spec("lightning"), reason="needs lightning")
def test_fabric_with_its_own_launcher_and_an_evaluation_between_steps(tmp_path: Path, one_world: None) -> None:
    said = run_job(tmp_path, ONE, "fabric_job", "2", cold=False)
    assert "capture: 6 passes of _FabricModule" in said
    check(tmp_path, 6)


def test_the_first_fsdp_with_two_ranks(tmp_path: Path, one_world: None) -> None:
    run_job(tmp_path, [*TORCHRUN, "2", "-m"], "fsdp1_job", "original", cold=False)
    check(tmp_path, 6)


@pytest.fixture(scope="module")
def lora_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a recorded LoRA job, under accelerate's launcher, which is as good as any here."""
    folder = tmp_path_factory.mktemp("lora")
    said = run_job(folder, ACCELERATE, "peft_lora", cold=False)
    assert "capture: 3 passes of PeftModelForCausalLM" in said
    return folder


def lora_verdict(folder: Path, logs: Path, *typed: str) -> dict[str, Any]:
    command = ["--inputs", str(folder / "captures"), "--dtype", "fp32", "--loss", "sft", "--quiet", *typed]
    assert replay_main([*command, "--log-folder", str(logs)]) == 0
    (log,) = logs.iterdir()
    run, records = read_log(log)
    assert [record.result.loss for record in records] == pytest.approx(losses_of(folder), rel=BOUND)
    found: dict[str, Any] = run["verdict"]
    return found


@pytest.mark.skipif(not find_spec("peft"), reason="needs peft")
@pytest.mark.parametrize("typed", ["fsdp2", "ddp", "deepspeed --zero-stage 1", "deepspeed --zero-stage 3"])
def test_a_lora_adapter_as_trained(typed: str, lora_job: Path, tmp_path: Path, one_world: None) -> None:
    """8 of 29 parameters are trained; the norm of their gradient was noted where the job clipped it."""
    model = ["--model", str(lora_job / "model"), "--adapter", str(lora_job / "adapter")]
    verdict = lora_verdict(lora_job, tmp_path / "logs", *model, "--backend", *typed.split())
    assert verdict["outcome"] == "REPRODUCED", verdict
    assert verdict["window_counts"] == {"REPRODUCED": 3}


def test_a_job_that_was_tensor_parallel_is_reproduced_by_one_process(tmp_path: Path, one_world: None) -> None:
    """Its two ranks have the same micro-batches, and the replay is fed both."""
    run_job(tmp_path, [*TORCHRUN, "2", "-m"], "tensor_parallel", cold=False)
    assert replayed_losses(tmp_path, loss="sft", outcome="REPRODUCED") == pytest.approx(losses_of(tmp_path), rel=BOUND)


@pytest.mark.skipif(not find_spec("peft"), reason="needs peft")
def test_a_lora_adapter_that_is_merged_has_the_losses_alone(lora_job: Path, tmp_path: Path, one_world: None) -> None:
    typed = ["--model", str(lora_job / "merged"), "--backend", "fsdp2"]
    verdict = lora_verdict(lora_job, tmp_path / "logs", *typed)
    assert verdict["outcome"] == "UNSETTLED"
    assert "--adapter FOLDER" in json.dumps(verdict)


@pytest.mark.skipif(not find_spec("peft"), reason="needs peft")
@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["--adapter", "nowhere"], "Give a folder with adapter_config.json"),
        (["--adapter", "ADAPTER", "--tp", "2", "--backend", "fsdp2"], "--tp 2 splits Linears, and this model has"),
        (["--model", "ADAPTER"], "is an adapter without its base. Try: --model BASE --adapter"),
    ],
)
def test_what_an_adapter_cannot_be_replayed_with_is_refused(
    typed: list[str],
    says: str,
    lora_job: Path,
    capfd: pytest.CaptureFixture[str],
    one_world: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", str(warm_bin() / "python"))  # of the ranks that --tp 2 starts
    given = [str(lora_job / "adapter") if argument == "ADAPTER" else argument for argument in typed]
    assert replay_main(["--inputs", str(lora_job / "captures"), *given]) == 2
    assert says in " ".join(capfd.readouterr().err.split())  # with --tp 2 it is the ranks' own


@pytest.mark.skipif(not find_spec("trl"), reason="needs the extra: pip install -e '.[trainers]'")
@pytest.mark.parametrize("kind", ["sft", "packed-sft", "dpo", "grpo"])
def test_trl(kind: str, tmp_path: Path, one_world: None) -> None:
    """DPO and GRPO: minus the mean log-prob of the completions, which the trainer computed on the way to its loss.

    What they differentiate is another loss than the model's, and the gradient is not judged by that.
    """
    run_job(tmp_path, ONE, "trl_trainers", kind)
    check(tmp_path, 2, outcome="REPRODUCED" if "sft" in kind else "UNSETTLED")


@pytest.mark.skipif(not find_spec("trl"), reason="needs the extra trainers")
@pytest.mark.parametrize(
    ("kind", "loss", "typed"),
    [
        ("noted-grpo", "policy", "--reduction window-tokens --kl-coefficient 0.1 --kl k3-weighted"),
        ("noted-dpo", "dpo", "--dpo-beta 0.1"),
    ],
)
def test_a_job_of_trl_that_notes_its_loss_is_reproduced(
    kind: str, loss: str, typed: str, tmp_path: Path, one_world: None
) -> None:
    run_job(tmp_path, ONE, "trl_trainers", kind)
    assert replayed_losses(tmp_path, *typed.split(), loss=loss, outcome="REPRODUCED") == pytest.approx(
        losses_of(tmp_path), abs=1e-6
    )


@pytest.mark.skipif(not find_spec("trl"), reason="needs the extra trainers")
def test_under_trl_a_missing_gradient_is_named(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """SFTTrainer differentiates a loss of its own, whose gradients are those of the loss that the model returned."""
    run_job(tmp_path, ONE, "trl_trainers", "detached-sft")
    check(tmp_path, 2, outcome="DIFFERS")
    said = capsys.readouterr().out
    assert (
        "gradient (model.layers.1.self_attn.q_proj.weight, which has no gradient in the job) of the job's step 1"
        in said
    )


@pytest.mark.skipif(not find_spec("openrlhf"), reason="needs openrlhf 0.11 (pip install --no-deps openrlhf pylatexenc)")
def test_the_actor_of_openrlhf(tmp_path: Path, one_world: None) -> None:
    said = run_job(tmp_path, ONE, "openrlhf_actor")
    assert "capture: 3 passes of Actor" in said
    assert read_micro_batch(capture_files(tmp_path / "captures")[0]).action_mask_BA is not None
    check(tmp_path, 3, loss="stand-in")
