"""A run by itself names the tensor of a pass that was the first to hold a NaN or an infinity."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from actor_init.backends.protocol import open_backend
from actor_init.spec import ActorSpec, Dtype
from capture.file_format.actor_config import write_actor_config
from replay.command_line.cli import main
from replay.objective.objective import compute_negated_mean
from replay.runner.non_finite import NOT_AGAIN, NonFiniteSearch, find_first_non_finite
from tests.helpers.failing_inputs import CONFIG, folder_of
from tests.helpers.made_captures import write_pass
from tests.helpers.made_records import record
from tests.helpers.replaced_parts import replace_opening, replace_stand_in_loss

DOWN, ATTENTION = "transformer.h.1.mlp.c_proj", "transformer.h.0.attn"
# Tokens of both rows of each pass, none of them padding.
LENGTHS = [20, 21, 22]
BACKENDS = [
    ["--backend", "ddp"],
    ["--backend", "ddp", "--no-packing"],
    ["--backend", "ddp", "--compile"],
    ["--backend", "fsdp2", "--gradient-checkpointing"],
    ["--backend", "deepspeed", "--zero-stage", "1"],
    ["--backend", "deepspeed", "--zero-stage", "3"],
]


def spoil_output(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    """Set row 1, token 17 of the output to nan in the second pass."""
    length = 21
    if output.shape[0] * output.shape[1] != 2 * length:
        return output
    spoilt = output.clone()
    spoilt.view(2 * length, -1)[length + 17] = torch.nan
    return spoilt


def spoil_gradient(module: nn.Module, _: Any, output: Any) -> None:
    tensor = output[0]
    if tensor.requires_grad and tensor.shape[0] * tensor.shape[1] == 2 * 21:
        tensor.register_hook(lambda gradient: gradient * torch.inf)


def replay_spoilt(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], Any], *typed: str
) -> tuple[list[Any], Any]:
    """Replay the inputs of a folder; return the lines of the log, and what run.json has found."""

    def open_spoilt(*arguments: Any) -> Any:
        backend = open_backend(*arguments)
        spoil(backend.model)
        return backend

    replace_opening(monkeypatch, open_spoilt)
    main(["--traceback", "--inputs", str(folder), "--log-folder", str(tmp_path / "logs"), *typed])
    [log] = (tmp_path / "logs").iterdir()
    lines = [json.loads(line) for line in (log / "rank0.jsonl").read_text().splitlines()]
    return lines, json.loads((log / "run.json").read_text())["first_non_finite"]


def replay_with_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], Any], *typed: str
) -> tuple[list[Any], Any]:
    """Replay three inputs as `replay_spoilt` does."""
    lines, found = replay_spoilt(folder_of(tmp_path, LENGTHS), tmp_path, monkeypatch, spoil, *typed)
    assert [line["index"] for line in lines] == [0, 1, 2]
    return lines, found


@pytest.mark.slow
@pytest.mark.usefixtures("one_world", "compiles_to_graphs")
@pytest.mark.parametrize("backend", BACKENDS, ids=" ".join)
@pytest.mark.parametrize("steps", [[], ["--step"]], ids=["", "step"])
def test_the_first_output_is_named_before_a_step_spoils_all(
    backend: list[str],
    steps: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A compiled block would not call the hook that makes the fault.
    where = "transformer.wte" if "--compile" in backend else DOWN

    def spoil(model: nn.Module) -> None:
        model.get_submodule(where).register_forward_hook(spoil_output)

    lines, found = replay_with_fault(tmp_path, monkeypatch, spoil, *backend, *steps)
    named = f"output of {where}, row 1, token 17"
    assert [line["first_non_finite"] for line in lines[:2]] == [None, named]
    assert (found["index"], found["rank"], found["what"]) == (1, 0, named)
    assert f"not finite pass 2, rank 0, {found['source']}: {named}" in capsys.readouterr().out
    # DeepSpeed takes no step with such a gradient.
    if steps and "deepspeed" in backend:
        assert lines[2]["first_non_finite"] is None
    elif steps:
        assert lines[2]["first_non_finite"].startswith("parameter transformer.wte.weight")
    else:
        assert lines[2]["first_non_finite"] is None
        assert isinstance(lines[2]["loss"], float)
        assert isinstance(lines[2]["grad_norm"], float)


@pytest.mark.usefixtures("one_world")
@pytest.mark.parametrize("backend", [BACKENDS[0], *BACKENDS[3:]], ids=" ".join)
def test_the_first_gradient_is_named_and_what_looks_for_it_leaves_no_gradient(
    backend: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(model: nn.Module) -> None:
        model.get_submodule(ATTENTION).register_forward_hook(spoil_gradient)

    clean, _ = replay_with_fault(tmp_path / "clean", monkeypatch, lambda model: None, *backend)
    lines, found = replay_with_fault(tmp_path / "spoilt", monkeypatch, spoil, *backend)
    assert found["what"].startswith(f"gradient of the output of {ATTENTION}")
    assert found["index"] == 1
    assert lines[2]["grad_norm"] == pytest.approx(clean[2]["grad_norm"])


@pytest.mark.usefixtures("one_world")
def test_what_is_not_finite_in_padding_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "inputs"
    write_pass(folder, length=10, num_real=8)
    write_actor_config(folder, CONFIG, "tiny")

    def spoil_padding_and_a_token(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        spoilt = output.clone()
        spoilt[0, 9], spoilt[1, 6] = torch.nan, torch.nan
        return spoilt

    def spoil(model: nn.Module) -> None:
        model.get_submodule("transformer.ln_f").register_forward_hook(spoil_padding_and_a_token)

    _, found = replay_spoilt(folder, tmp_path, monkeypatch, spoil, "--backend", "ddp", "--no-packing")
    assert found["what"] == "output of transformer.ln_f, row 1, token 6"


@pytest.mark.usefixtures("one_world")
def test_a_parameter_is_named_first_and_the_search_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter(f"{DOWN}.weight")[3, 4] = torch.inf

    monkeypatch.setattr("replay.runner.replayer.NonFiniteSearch", partial(NonFiniteSearch, num_searches_left=2))
    lines, _ = replay_with_fault(tmp_path, monkeypatch, spoil, "--backend", "ddp")
    assert [line["first_non_finite"] for line in lines] == [f"parameter {DOWN}.weight"] * 2 + [None]


@pytest.mark.usefixtures("one_world")
def test_a_good_run_looks_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("there is nothing to look for")

    monkeypatch.setattr("replay.runner.non_finite.NonFiniteSearch.find_first", refuse)
    lines, found = replay_with_fault(tmp_path, monkeypatch, lambda model: None, "--backend", "ddp", "--step")
    assert found is None
    assert all(line["error"] is None for line in lines)


@pytest.mark.usefixtures("one_world")
def test_in_fp16_no_gradient_is_named_since_it_overflows_in_healthy_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second pass has a loss that is nan once, and a gradient that overflows each time."""
    calls: list[Tensor] = []

    def loss(log_probs_BA: Tensor, inputs: Any) -> Tensor:
        calls.append(log_probs_BA)
        return compute_negated_mean(log_probs_BA, inputs) * (torch.nan if len(calls) == 2 else 1.0)

    def spoil(model: nn.Module) -> None:
        model.get_submodule(ATTENTION).register_forward_hook(spoil_gradient)

    replace_stand_in_loss(monkeypatch, loss)
    lines, _ = replay_with_fault(tmp_path, monkeypatch, spoil, "--backend", "ddp", "--dtype", "fp16")
    assert [line["first_non_finite"] for line in lines] == [None, NOT_AGAIN, None]


@pytest.mark.parametrize(
    ("changes", "dtype", "is_needed"),
    [
        ({}, Dtype.FP32, False),
        ({"loss": math.nan}, Dtype.FP32, True),
        ({"row_log_probs": [-1.0, -math.inf]}, Dtype.FP32, True),
        ({"grad_norm": math.inf}, Dtype.FP32, True),
        ({"grad_norm": math.inf}, Dtype.BF16, True),
        # The loss scale of fp16 makes gradients overflow, but nothing else.
        ({"grad_norm": math.inf}, Dtype.FP16, False),
        ({"grad_norm": math.inf, "loss": math.nan}, Dtype.FP16, True),
        ({"loss": math.nan, "error": "boom"}, Dtype.FP32, False),
        ({"loss": math.nan, "first_non_finite": "output of a"}, Dtype.FP32, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_search_is_needed_if_any_rank_has_a_number_that_is_not_finite(
    changes: dict[str, Any], dtype: Dtype, is_needed: bool, rank: int
) -> None:
    search = NonFiniteSearch(spec=ActorSpec(dtype=dtype), world=cast(Any, None), report_progress=lambda: None)
    good: dict[str, Any] = {"grad_norm": 1.0, "row_log_probs": [-1.0, -2.0]}
    records = [record(0, rank=number, **good | (changes if number == rank else {})) for number in range(2)]
    assert search.is_needed(records) is is_needed
    search.num_searches_left = 0
    assert not search.is_needed(records)


def test_the_runs_first_tensor_is_that_of_the_first_pass_that_names_one() -> None:
    records = [record(0), record(1, rank=1, first_non_finite="a"), record(2, first_non_finite="b")]
    first = find_first_non_finite(records)
    assert first is not None
    assert (first.index, first.source, first.rank, first.what) == (1, "input_1.pkl", 1, "a")
    assert find_first_non_finite(records[:1]) is None
