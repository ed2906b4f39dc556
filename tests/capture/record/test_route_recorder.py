"""The experts that a mixture of experts chose are recorded once a pass, whatever runs its layers again."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from capture import capture_files, recording
from capture.file_format.capture_file import CapturedCall, read_call
from capture.record.route_recorder import RouteRecorder
from capture.record.routers import calls_topk, find_routers
from tests.helpers.families import tiny_config, tiny_model

IDS_BS = torch.tensor([[3, 5, 9, 7, 4, 8], [3, 3, 6, 1, 0, 0]])
MASK_BS = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
# A router of its own; one that masks groups of experts; scores in place of numbers; a block that chooses itself.
FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text", "dbrx", "granitemoe"]


def record(model: PreTrainedModel, folder: Path, **settings: Any) -> list[CapturedCall]:
    with recording(model, folder, reproduce=True, **settings) as recorder:
        output = model(input_ids=IDS_BS, attention_mask=MASK_BS, labels=IDS_BS)
        output.loss.backward()
    assert recorder.failure is None
    return [read_call(path) for path in capture_files(folder)]


def watch_experts(model: PreTrainedModel, seen: list[Tensor]) -> None:
    """Keep what the experts of a family are given, as [T, K]."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(
                lambda _, args: seen.extend(arg for arg in args if not arg.is_floating_point())
            )


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "dbrx", "granitemoe"])
def test_recorded_routes_are_what_the_experts_were_given(family: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(family))
    seen: list[Tensor] = []
    watch_experts(model, seen)
    [call] = record(model, tmp_path)
    assert len(seen) == len(call.routes) >= 1
    for choice_TK, given_TK in zip(call.routes.values(), seen, strict=True):
        assert choice_TK.tolist() == given_TK.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_of_a_family_are_found_by_what_they_do(family: str) -> None:
    routers = find_routers(tiny_model(tiny_config(family)))
    assert routers
    assert all(calls_topk(router) for router in routers.values())


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "qwen3"])
def test_a_dense_model_has_no_router(family: str) -> None:
    assert find_routers(tiny_model(tiny_config(family))) == {}


def test_scores_that_are_zero_for_other_experts_are_read_as_a_choice(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("llama4_text"))
    scores: list[Tensor] = []
    for router in find_routers(model).values():
        router.register_forward_hook(lambda _, args, output: scores.append(output[0]))
    [call] = record(model, tmp_path)
    for choice_TK, scores_TE in zip(call.routes.values(), scores, strict=True):
        is_chosen_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(1, choice_TK.long(), True)
        assert torch.equal(is_chosen_TE, scores_TE > 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_runs_a_layer_again_changes_nothing(reentrant: bool, tmp_path: Path) -> None:
    config = tiny_config("mixtral")
    [plain] = record(tiny_model(config).train(), tmp_path / "plain")
    model = tiny_model(config).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    [checkpointed] = record(model, tmp_path / "checkpointed")
    assert list(checkpointed.routes) == list(plain.routes)
    assert all(torch.equal(plain.routes[name], choice) for name, choice in checkpointed.routes.items())


def test_routes_are_left_out_where_they_are_not_asked_for(tmp_path: Path) -> None:
    [call] = record(tiny_model(tiny_config("mixtral")), tmp_path, routes=False)
    assert call.routes == {}


def test_a_router_that_runs_twice_in_a_pass_is_left_out(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("mixtral"))
    [first, second] = find_routers(model).values()
    second.register_forward_hook(lambda module, args, output: first(args[0]))
    [call] = record(model, tmp_path)
    assert list(call.routes) == ["model.layers.1.mlp.gate"]


def test_a_router_that_chooses_for_other_tokens_is_left_out() -> None:
    model = tiny_model(tiny_config("mixtral"))
    recorder = RouteRecorder()
    recorder.attach(model)
    recorder.begin(12)
    model(input_ids=IDS_BS[:, :5])
    assert recorder.take() == []


def test_a_copy_of_a_recorded_model_records_nothing(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("mixtral"))
    with recording(model, tmp_path, reproduce=True):
        twin = copy.deepcopy(model)
        model(input_ids=IDS_BS)
        twin(input_ids=IDS_BS + 1)
    [call] = [read_call(path) for path in capture_files(tmp_path)]
    assert len(call.routes) == 2


def test_a_compiled_layer_is_not_looked_at(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("mixtral"))
    model.model.layers[0].compile(backend="eager")
    [call] = record(model, tmp_path)
    assert list(call.routes) == ["model.layers.1.mlp.gate"]
