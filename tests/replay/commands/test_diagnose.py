"""`replay diagnose`: a sound actor passes every check, and each fault fails the line that is there for it."""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import replay
from actor_init.action_log_probs import action_log_probs
from actor_init.backends.fsdp2 import FSDP2Backend
from actor_init.inputs.packing import ActorInputs, prepare_inputs
from actor_init.model import build_on_meta
from actor_init.spec import UsageError
from actor_init.world import World
from capture import recording
from capture.file_format.actor_config import write_actor_config
from replay.command_line.cli import main, parse_command_line
from replay.commands.diagnose.report import diagnose_in_world
from replay.output.text import CheckResult
from tests.helpers.interrupted_world import InterruptedWorld
from tests.helpers.made_captures import write_pass
from tests.helpers.ranks import run_ranks
from tests.helpers.schemas import assert_valid
from tests.helpers.sharded import SIZES
from tests.helpers.typed import spec_of
from tests.trainers.common import make_batches, make_model

pytestmark = pytest.mark.usefixtures("proofs_once")

EVERY = [
    "attention kernel",
    "loss, four ways",
    "as a plain model",
    "loss on peers",
    "gradient on ranks",
    "same pass twice",
    "twice the tokens",
    "accumulated",
    "one row learned",
    "inputs learned",
]
LEARNING = {"one row learned", "inputs learned"}
FEW = ["--steps", "15"]
FAST = ["--backend", "fsdp2", "--dtype", "fp32"]


def inputs_in(folder: Path, **config: Any) -> Path:
    for step in range(2):
        write_pass(folder, step=step, num_rows=3, length=26, num_real=24, num_actions=20, vocabulary=264)
    write_actor_config(folder, {"model_type": "llama", **SIZES, **config}, "tiny")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return inputs_in(tmp_path / "inputs")


@pytest.fixture
def diagnose(one_world: None, tmp_path: Path) -> Callable[..., tuple[int, dict[str, dict[str, Any]]]]:
    """Runs `replay diagnose` here; returns its exit code and its checks by name."""

    def run(inputs: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
        code = main(["diagnose", *where(inputs, tmp_path), *arguments])
        return code, checks_in(tmp_path)

    return run


def where(inputs: Path, home: Path) -> list[str]:
    return ["--inputs", str(inputs), "--log-folder", str(home / "logs")]


def checks_in(home: Path) -> dict[str, dict[str, Any]]:
    """The checks by name, of the one log of a home."""
    [file] = home.glob("logs/*-diagnose/diagnose.json")
    return {check["name"]: check for check in json.loads(file.read_text())["checks"]}


def failing(checks: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, check in checks.items() if check["status"] == "failed"}


@pytest.mark.parametrize("options", [["--backend", "fsdp2"], ["--zero-stage", "2", "--no-packing"]], ids=" ".join)
def test_a_sound_actor_passes_every_check(
    options: list[str], folder: Path, diagnose: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checks = diagnose(folder, *options)
    said = capsys.readouterr().out
    assert (code, failing(checks)) == (0, set()), said
    assert list(checks) == EVERY
    assert {name for name, check in checks.items() if check["status"] == "not run"} == {
        "loss on peers",
        "gradient on ranks",
    }
    assert "flash-attn has no CPU kernel" in checks["attention kernel"]["found"]
    assert said.count("\n  ok  ") == 7
    assert "all 7 checks that were run passed" in said


def test_it_computes_in_the_job_s_dtype(tmp_path: Path, diagnose: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path)
    with recording(model, tmp_path / "captures", reproduce=True):
        model(**make_batches(1)[0]).loss.backward()
    _, checks = diagnose(tmp_path / "captures", "--backend", "fsdp2", "--steps", "1")
    assert "actor      fsdp2, ZeRO stage 3, fp32, packed" in capsys.readouterr().out
    assert "bound 0.0001," in checks["same pass twice"]["found"]


# faults


@contextmanager
def accumulation_not_scaled() -> Iterator[None]:
    with patch.object(FSDP2Backend, "backward", lambda self, loss: torch.autograd.backward(loss)):
        yield


@contextmanager
def last_micro_batch_alone() -> Iterator[None]:
    """A window's gradient is that of its last pass."""
    backward = FSDP2Backend.backward

    def forgetting(self: FSDP2Backend, loss: Tensor) -> None:
        self.model.zero_grad(set_to_none=True)
        backward(self, loss)

    with patch.object(FSDP2Backend, "backward", forgetting):
        yield


@contextmanager
def frozen(but_for: str) -> Iterator[None]:
    def freezing(*args: Any, **kwargs: Any) -> Any:
        model = build_on_meta(*args, **kwargs)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(but_for in name)
        return model

    with patch("actor_init.backends.fsdp2.build_on_meta", freezing):
        yield


@contextmanager
def targets_not_shifted() -> Iterator[None]:
    def itself(*args: Any, **kwargs: Any) -> ActorInputs:
        inputs = prepare_inputs(*args, **kwargs)
        return replace(inputs, target_ids_N=inputs.input_ids.flatten()[inputs.predictor_N])

    with patch("replay.runner.run_pass.prepare_inputs", itself):
        yield


@contextmanager
def log_probs_changed(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    with patch(
        "actor_init.backends.fsdp2.action_log_probs",
        lambda model, inputs: change(action_log_probs(model, inputs)),
    ):
        yield


FAULTS: list[tuple[str, AbstractContextManager[None], list[str], set[str], str]] = [
    ("accumulation not scaled", accumulation_not_scaled(), [], {"accumulated"}, "--grad-accumulation"),
    ("the last micro-batch alone", last_micro_batch_alone(), [], {"accumulated"}, "from one pass to the next"),
    ("frozen parameters", frozen(but_for="norm"), FEW, {"as a plain model", *LEARNING}, "frozen parameters"),
    (
        "targets not shifted",
        targets_not_shifted(),
        [],
        {"loss, four ways", "as a plain model"},
        "the actor alone is off",
    ),
    (
        "a loss that no parameter moves",
        log_probs_changed(lambda log_probs_BA: log_probs_BA.detach() + 0 * log_probs_BA),
        FEW,
        {"as a plain model", *LEARNING},
        "it hardly moves",
    ),
    ("the loss goes up", nullcontext(), [*FEW, "--learning-rate", "30"], LEARNING, "the steps are too large"),
    ("no step", nullcontext(), [*FEW, "--learning-rate", "0"], LEARNING, "it hardly moves"),
    ("too few steps", nullcontext(), ["--steps", "3"], {"one row learned"}, "still falling. Try: --steps 12"),
]


@pytest.mark.parametrize(("name", "fault", "options", "lines", "advice"), FAULTS, ids=[row[0] for row in FAULTS])
def test_a_fault_fails_its_own_lines(
    name: str,
    fault: AbstractContextManager[None],
    options: list[str],
    lines: set[str],
    advice: str,
    folder: Path,
    diagnose: Any,
) -> None:
    with fault:
        code, checks = diagnose(folder, *FAST, *options)
    assert (code, failing(checks)) == (1, lines)
    assert any(advice in checks[line]["advice"] for line in lines)


def test_dropout_is_random_from_pass_to_pass(tmp_path: Path, diagnose: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = diagnose(inputs_in(tmp_path / "inputs", attention_dropout=0.5), *FAST, "--json")
    assert code == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["exit_code"], list(checks)) == (1, [check["name"] for check in printed["result"]["checks"]])
    assert_valid("diagnose", printed)
    assert "same pass twice" in failing(checks)
    assert "dropout" in checks["same pass twice"]["advice"]


def test_a_loss_that_is_summed_grows_with_the_tokens(folder: Path, diagnose: Any) -> None:
    with patch(
        "replay.commands.diagnose.untimed_actor.compute_negated_mean", lambda log_probs_BA, inputs: -log_probs_BA.sum()
    ):
        code, checks = diagnose(folder, *FAST)
    assert code == 1
    assert {"loss, four ways", "twice the tokens"} <= failing(checks)


def test_what_raises_is_a_failed_check_and_the_next_are_tried(folder: Path, diagnose: Any) -> None:
    def breaking(batch: Any) -> Any:
        raise RuntimeError("no\nsuch kernel")

    with patch("replay.commands.diagnose.checks.repeat_rows", breaking):
        code, checks = diagnose(folder, *FAST)
    assert (code, failing(checks)) == (1, {"a pass"})
    assert checks["a pass"]["found"] == "RuntimeError: no such kernel"
    assert checks["accumulated"]["status"] == "not run"
    assert all(checks[name]["status"] == "ok" for name in LEARNING)


def test_ctrl_c_keeps_the_lines_that_are_finished(folder: Path, diagnose: Any) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with patch("replay.commands.diagnose.checks.train_until_learned", interrupt):
        code, checks = diagnose(folder, *FAST)
    assert code == 130
    assert list(checks) == EVERY[:-2]


@pytest.mark.parametrize(
    ("typed", "complaint"),
    [
        ("--optimizer none", "diagnose trains"),
        ("--steps 0", "--steps"),
        ("--grad-accumulation 2", "unknown option --grad-accumulation"),
        ("--model llama-3.1-8b --num-layers 99", "--num-layers 99"),
    ],
)
def test_wrong_usage_is_one_line(
    typed: str, complaint: str, folder: Path, tmp_path: Path, diagnose: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", *where(folder, tmp_path), *typed.split()]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert complaint in line


def test_inputs_of_another_model_are_wrong_usage(tmp_path: Path, diagnose: Any) -> None:
    inputs = inputs_in(tmp_path / "inputs", vocab_size=64)
    with pytest.raises(UsageError, match="beyond the model's vocabulary of 64"):
        parse_command_line(["diagnose", *where(inputs, tmp_path)])()


# several ranks


@pytest.mark.slow
def test_from_python_two_ranks_are_checked_in_processes_of_their_own(folder: Path, tmp_path: Path) -> None:
    options: Any = {"dtype": "fp32", "backend": "ddp", "learning_rate": 0, "log_folder": tmp_path / "logs"}
    result = replay.diagnose(folder, steps=1, processes=2, max_inputs=1, **options)
    assert (result.exit_code, {*result.failing}) == (1, LEARNING)
    statuses = result.to_frame().set_index("name").status
    assert list(statuses.index) == EVERY
    assert statuses["gradient on ranks"] == "ok"
    assert result.result["world_size"] == 2
    assert_valid("diagnose", result.to_dict())
    with pytest.raises(UsageError) as refusal:
        replay.diagnose(folder, num_layers=99, **options)
    assert str(refusal.value).startswith("num_layers=99")
    assert [path.name for path in (tmp_path / "logs").iterdir()] == [result.folder.parent.name]


def diagnose_on_two_ranks(home: Path, jobs: list[tuple[str, str]], *parallel: str) -> list[dict[str, dict[str, Any]]]:
    """The checks of each job, of options and a fault, in one world of two ranks."""
    inputs = inputs_in(home / "inputs")
    homes = [home / str(number) for number in range(len(jobs))]
    table = [
        {"arguments": [*options.split(), *where(inputs, its_home), "--dtype", "fp32"]}
        | ({"fault": fault} if fault else {})
        for (options, fault), its_home in zip(jobs, homes, strict=True)
    ]
    (home / "jobs.json").write_text(json.dumps(table))
    run_ranks(["-m", "tests.helpers.diagnose_worker", str(home / "jobs.json"), *parallel], 2)
    return [checks_in(its_home) for its_home in homes]


def test_what_data_ranks_do_not_reduce_rightly_is_found(tmp_path: Path) -> None:
    sound, not_reduced, summed = diagnose_on_two_ranks(
        tmp_path,
        [
            ("--zero-stage 0 --max-inputs 1", ""),
            ("--zero-stage 0 --max-inputs 1 --steps 1", "gradient_not_reduced"),
            ("--backend fsdp2 --max-inputs 1 --steps 1", "gradient_summed"),
        ],
    )
    assert failing(sound) == set()
    assert sound["gradient on ranks"]["status"] == "ok"
    assert {"as a plain model", "gradient on ranks"} <= failing(not_reduced)
    assert "as a plain model" in failing(summed)
    # Both ranks are wrong alike.
    assert summed["gradient on ranks"]["status"] == "ok"


def test_tp_ranks_that_see_other_tokens_are_found(tmp_path: Path) -> None:
    sound, fed_otherwise = diagnose_on_two_ranks(
        tmp_path,
        [
            ("--tp 2 --backend fsdp2", ""),
            ("--tp 2 --backend fsdp2 --steps 1", "different_inputs"),
        ],
        "2",
    )
    assert failing(sound) == set()
    assert sound["loss on peers"]["status"] == "ok"
    assert {"loss, four ways", "loss on peers"} & failing(fed_otherwise)


@pytest.mark.parametrize("num_run", [0, 1])
def test_after_ctrl_c_the_checks_that_ran_can_be_read(num_run: int, world: World, folder: Path, tmp_path: Path) -> None:
    interrupted = InterruptedWorld.from_world(world, lambda value: isinstance(value, CheckResult), num_run)
    spec, screen = spec_of([*where(folder, tmp_path), *FAST]), io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        diagnose_in_world(interrupted, spec, screen, num_steps=1)
    label, log = screen.getvalue().splitlines()[-1].split()
    assert label == "log"
    result: Any = replay.open(log)
    assert result.checks == interrupted.told
    assert [check.name for check in result.checks] == EVERY[:num_run]
    assert (result.status, result.exit_code) == ("running", 1)
